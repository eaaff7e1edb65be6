"""From a load test to its page: one file, no requests to anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from cluster.errors import SightlineError
from loadtest.report import charts, tables
from loadtest.report.body import Facts
from loadtest.report.tables import Table
from loadtest.result import Tick
from loadtest.run import RunResult, SearchResult

OTHERS = 0.25
"""Cores that other programs may use before it is told."""


def write(path: Path, facts: Facts, found: RunResult | Sequence[SearchResult]) -> None:
    """Write the page.

    Raises:
        SightlineError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(facts, found), encoding="utf-8")
    except OSError as error:
        raise SightlineError(f"cannot write {path}: {error.strerror or error}; choose another place") from None


def page(facts: Facts, found: RunResult | Sequence[SearchResult]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loadtest.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if isinstance(found, RunResult):
        head, good = verdict_text(found)
        drawn = charts.run_charts(found.ticks, found.faults, found.measurement.stride_s)
        shown = run_tables(found)
    else:
        head, good = search_text(found), True
        drawn = [charts.search_chart(found)]
        best = max(found, key=lambda each: each.streams)
        drawn += charts.run_charts(best.ticks, (), best.best.stride_s) if best.best is not None else []
        shown = search_tables(found)
    ticks = found.ticks if isinstance(found, RunResult) else [tick for each in found for tick in each.ticks]
    return environment.get_template("page.html").render(
        facts=facts,
        head=head,
        good=good,
        others=others_text(ticks),
        charts=[Markup(svg) for svg in drawn],
        tables=shown,
    )


def run_tables(found: RunResult) -> list[Table]:
    """All tables of one test."""
    measured = found.measurement
    shown = [
        tables.times_table(measured),
        tables.windows_table(found.during or measured),
        tables.tokens_table(measured),
        tables.packets_table(measured),
    ]
    if measured.rungs:
        shown.insert(2, tables.rungs_table(measured))
    return [tables.faults_table(found.faults), *shown] if found.faults else shown


def search_tables(found: Sequence[SearchResult]) -> list[Table]:
    """The tries, and the times at the most streams of all."""
    best = max(found, key=lambda each: each.streams).best
    shown = [tables.search_table(found)]
    return shown if best is None else [*shown, tables.times_table(best), tables.windows_table(best)]


def verdict_text(found: RunResult) -> tuple[str, bool]:
    """One sentence on a test, and whether it is a good one."""
    verdict, measured = found.measurement.verdict, found.measurement
    if not verdict.stable:
        return f"{measured.streams} streams were too many: {'; '.join(verdict.reasons)}.", False
    if found.silent:
        return f"{found.silent} windows were neither answered nor counted while things went wrong.", False
    if found.extra:
        return f"{found.extra} windows were counted that were never due while things went wrong.", False
    return f"The cluster kept up with {measured.streams} streams.", True


def others_text(ticks: Sequence[Tick]) -> str:
    """What other programs took of the machine, where that is worth a sentence; empty where it is not."""
    cores = sum(tick.use.others for tick in ticks) / max(1, len(ticks))
    if cores < OTHERS:
        return ""
    return (
        f"Other programs used {cores:.1f} cores of this machine meanwhile: a cluster that has it for itself keeps up "
        "with more."
    )


def search_text(found: Sequence[SearchResult]) -> str:
    """One sentence per number of replicas."""
    sentences = []
    for each in found:
        replicas = "1 replica" if each.replicas == 1 else f"{each.replicas} replicas"
        beyond = {
            "generator": "beyond that the load generator's own machine was the limit, not the cluster",
            "cluster": "beyond that the cluster did not keep up",
            None: "and nobody looked beyond that",
        }[each.limit]
        share = "" if each.replicas == 1 else f", {each.streams / each.replicas:.1f} each"
        sentences.append(f"{replicas} kept up with {each.streams} streams{share}; {beyond}.")
    return " ".join(sentences)
