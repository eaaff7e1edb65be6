"""From a load test to its page: one file, no requests to anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.lab.bench.harness import machine
from cluster.lab.report.number_format import finite
from cluster.lab.report.page import Page, Section
from loadtest.profile import Profile
from loadtest.report import charts, tables
from loadtest.result import FaultResult, Measurement, Tick
from loadtest.run import RunResult, SearchResult


@dataclass(frozen=True, slots=True)
class Facts:
    """What was tested: shown above everything else. ``cluster``: name of a setting -> its value, for people."""

    title: str
    profile_name: str
    profile: Profile
    cluster: Mapping[str, str]
    simulated: bool


def run_json(facts: Facts, result: RunResult) -> dict[str, Any]:
    """One test at a fixed number of streams."""
    body = {
        "loadtest": "run",
        "figures": run_figures(result),
        "verdict": asdict(result.measurement.verdict),
        "faults": [_fault(each) for each in result.faults],
        "runs": [{**_measurement(result.measurement), "city": result.city}],
        "during_faults": None if result.during is None else _measurement(result.during),
        "others_cores": _others(result.ticks),
        "ticks": [asdict(tick) for tick in result.ticks],
    }
    return dict(finite(body | _about(facts)))


def search_json(facts: Facts, results: Sequence[SearchResult], *, two_cores: bool) -> dict[str, Any]:
    """The most streams, for one or several numbers of replicas; ``two_cores``: see :func:`search_figures`."""
    searches = [
        {
            "replicas": each.replicas,
            "streams": each.streams,
            "limit": each.limit,
            "tries": [asdict(one) for one in each.tries],
            "others_cores": _others(each.ticks),
            "best": None if each.best is None else _measurement(each.best),
        }
        for each in results
    ]
    figures = search_figures(results, two_cores=two_cores)
    return dict(finite({"loadtest": "search", "figures": figures, "searches": searches} | _about(facts)))


def run_figures(result: RunResult) -> dict[str, float]:
    """``recovery_s``: the slowest of the faults that killed or stopped something; ``recovery_strides`` likewise."""
    found = result.measurement
    figures = {
        "streams": float(found.streams),
        "stable": float(found.verdict.stable),
        "silent_losses": float(result.silent),
        "counted_twice": float(result.extra),
        "answered_share": found.answered_share,
        "lag_p50_s": found.lag.p50,
        "lag_p95_s": found.lag.p95,
        "lag_p99_s": found.lag.p99,
        "alert_p50_s": found.alert.p50,
        "alert_p99_s": found.alert.p99,
        "generator_late_p99_s": found.late.p99,
    }
    if result.faults:
        figures["recovery_s"] = max(each.recovery_s for each in result.faults)
        figures["recovery_strides"] = max(each.recovery_strides for each in result.faults)
    return figures


def search_figures(results: Sequence[SearchResult], *, two_cores: bool) -> dict[str, float]:
    """``streams``: the most of any; ``scaling_efficiency``: streams of the most replicas over so many times those of
    the fewest, per replica; ``streams_two_cores``: where ``two_cores`` says that it was measured as that figure wants
    it."""
    figures = {"silent_losses": float(sum(each.silent for each in results))}
    figures |= {f"streams_{each.replicas}_replicas": float(each.streams) for each in results}
    figures["streams"] = float(max(each.streams for each in results))
    least, most = min(results, key=lambda r: r.replicas), max(results, key=lambda r: r.replicas)
    if most.replicas > least.replicas and least.streams:
        figures["scaling_efficiency"] = most.streams / most.replicas / (least.streams / least.replicas)
    if two_cores:
        figures["streams_two_cores"] = figures["streams"]
    return figures


def _others(ticks: Sequence[Tick]) -> float:
    """Cores that other programs used on average."""
    return sum(tick.use.others for tick in ticks) / max(1, len(ticks))


def _about(facts: Facts) -> dict[str, Any]:
    return {
        "title": facts.title,
        "profile": {"name": facts.profile_name, **facts.profile.model_dump(mode="json")},
        "cluster": dict(facts.cluster),
        "simulated": facts.simulated,
        "machine": machine(),
    }


def _measurement(found: Measurement) -> dict[str, Any]:
    return {**asdict(found), "answered_share": found.answered_share, "verdict": asdict(found.verdict)}


def _fault(fault: FaultResult) -> dict[str, Any]:
    return asdict(fault) | {"recovered": math.isfinite(fault.recovery_s), "recovery_strides": fault.recovery_strides}


OTHERS = 0.25
"""Cores that other programs may use before it is told."""

_SIMULATED = (
    "No model ran: the simulated engine drew its answers at random and took the time that a cost model says. "
    "Cameras, sockets, decoding, scheduling and processes are real."
)


def page(facts: Facts, found: RunResult | Sequence[SearchResult]) -> str:
    """The page as text."""
    notices = [_SIMULATED] if facts.simulated else []
    if isinstance(found, RunResult):
        head, good = verdict_text(found)
        drawn = charts.run_charts(found.ticks, found.faults, found.measurement.stride_s)
        shown, ticks = tables.run_tables(found), found.ticks
    else:
        head, good = search_text(found), True
        best = max(found, key=lambda each: each.streams)
        drawn = {"The search": charts.search_chart(found)}
        drawn |= charts.run_charts(best.ticks, (), best.best.stride_s) if best.best is not None else {}
        shown, ticks = tables.search_tables(found), tuple(tick for each in found for tick in each.ticks)
    if others := others_text(ticks):
        notices.append(others)
    told = [("profile", f"{facts.profile_name}: {facts.profile.about}"), *facts.cluster.items()]
    section = Section(charts=drawn, tables=shown)
    return Page(facts.title, head, good, notices, facts=told, sections=[section]).html()


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
    cores = _others(ticks)
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
