"""Writing an evaluation: JSON, Markdown, one SVG per curve, and a page with all of it that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.lab.evaluation.curves import charts
from cluster.lab.evaluation.datasets import Skipped
from cluster.lab.evaluation.report import EvaluationReport, bound_text, measured_text, number, reached
from cluster.lab.report.page import Page, Section, Table, write_page


def figure_table(report: EvaluationReport) -> Table:
    """Every figure, its interval, what it must reach and whether it does."""
    rows = []
    for name, value in report.figures.values.items():
        told = reached(name, value)
        measured = report.figures.measured.get(name)
        shown = number(value) if measured is None else measured_text(measured)
        rows.append((name, shown, "" if told is None else bound_text(name), {True: "yes", False: "no", None: ""}[told]))
    missed = frozenset(place for place, row in enumerate(rows) if row[-1] == "no")
    return Table("Figures", ("figure", "value [95 %]", "must reach", "reached"), rows, missed)


def setting_table(report: EvaluationReport) -> Table:
    """Every setting but the sweeps' points."""
    heads = ("setting", "F1 [95 %]", "precision", "recall", "worst kind", "kept", "computed", "FLOPs", "latency")
    rows = [
        (
            line.setting.name,
            measured_text(line.accuracy.f1),
            number(line.accuracy.precision.value),
            number(line.accuracy.recall.value),
            number(line.accuracy.worst),
            str(line.row["kept"]),
            str(line.row["computed"]),
            f"{100 * line.flops_share:.1f} %",
            f"{1000 * float(line.row['latency_s']):.0f} ms",
        )
        for line in report.table
    ]
    return Table("Settings", heads, rows)


def tables(report: EvaluationReport) -> list[Table]:
    """Figures, settings, and under the settings that are compared F1 of each kind of event, in each third by motion
    and in each stratum; the bins of calibration."""
    lines = report.compared
    names = [line.setting.name for line in lines]
    kinds = [
        (kind, *(measured_text(line.accuracy.by_kind[kind]) for line in lines)) for kind in lines[0].accuracy.by_kind
    ]
    groups = [
        (group, str(found[names[0]].videos), str(found[names[0]].events), *(measured_text(found[n].f1) for n in names))
        for group, found in report.groups.items()
    ]
    bins = [
        (
            f"{each.low:.1f}–{each.high:.1f}",
            str(each.windows),
            number(each.score),
            f"{each.rate:.3f} [{each.ci_low:.2f}, {each.ci_high:.2f}]",
        )
        for each in report.figures.calibration.bins
    ]
    return [
        figure_table(report),
        setting_table(report),
        Table("F1 by kind of event", ("kind", *names), kinds),
        Table("F1 by motion and stratum", ("videos", "n", "events", *names), groups),
        Table("Calibration", ("score", "windows", "mean score", "event rate [95 %]"), bins),
    ]


def page(report: EvaluationReport) -> Page:
    """The report as every report is written."""
    shown = Section(charts=charts(report), tables=tables(report))
    sections = [shown, *remarks(report.figures.notes, report.skipped)]
    return Page(report.title, facts=list(report.facts.items()), sections=sections)


def remarks(notes: Sequence[str], skipped: Sequence[Skipped]) -> list[Section]:
    """What a reader must know, and what the data set left out, where there is any."""
    items = {"Notes": notes, "Skipped": [f"`{each.path.name}`: {each.reason}" for each in skipped]}
    return [Section(title, items=texts) for title, texts in items.items() if texts]


def write_report(report: EvaluationReport, folder: Path) -> Path:
    """Write ``accuracy.json``, ``accuracy.md``, ``accuracy.html`` and ``*.svg``; returns the page's path.

    Raises:
        SightlineError: the folder cannot be written.
    """
    return write_page(page(report), folder, "accuracy", report.to_json())
