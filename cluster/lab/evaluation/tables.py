"""Tables and page of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.lab.evaluation.charts import make_charts
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.report import EvaluationReport, format_bound, format_estimate, format_number, within_bound
from cluster.lab.report.page import Page, Section, Table


def figure_table(report: EvaluationReport) -> Table:
    """Every figure with interval and target."""
    rows = []
    for name, value in report.figures.values.items():
        within = within_bound(name, value)
        measured = report.figures.measured.get(name)
        shown = format_number(value) if measured is None else format_estimate(measured)
        rows.append(
            (name, shown, "" if within is None else format_bound(name), {True: "yes", False: "no", None: ""}[within])
        )
    missed = frozenset(place for place, row in enumerate(rows) if row[-1] == "no")
    return Table("Figures", ("figure", "value [95 %]", "must reach", "reached"), rows, missed)


def setting_table(report: EvaluationReport) -> Table:
    """Every setting but the points of sweeps."""
    heads = ("setting", "F1 [95 %]", "precision", "recall", "worst kind", "kept", "computed", "FLOPs", "latency")
    rows = [
        (
            line.setting.name,
            format_estimate(line.accuracy.f1),
            format_number(line.accuracy.precision.value),
            format_number(line.accuracy.recall.value),
            format_number(line.accuracy.worst),
            str(line.row["kept"]),
            str(line.row["computed"]),
            f"{100 * line.flops_share:.1f} %",
            f"{1000 * float(line.row['latency_s']):.0f} ms",
        )
        for line in report.table
    ]
    return Table("Settings", heads, rows)


def tables(report: EvaluationReport) -> list[Table]:
    """Figures and settings; for the compared settings F1 by kind of event, by motion and by stratum; calibration."""
    lines = report.compared
    names = [line.setting.name for line in lines]
    kinds = [
        (kind, *(format_estimate(line.accuracy.by_kind[kind]) for line in lines)) for kind in lines[0].accuracy.by_kind
    ]
    groups = [
        (
            group,
            str(found[names[0]].videos),
            str(found[names[0]].events),
            *(format_estimate(found[n].f1) for n in names),
        )
        for group, found in report.groups.items()
    ]
    bins = [
        (
            f"{each.low:.1f}–{each.high:.1f}",
            str(each.windows),
            format_number(each.score),
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


def make_page(report: EvaluationReport) -> Page:
    """Page of the report."""
    shown = Section(charts=make_charts(report), tables=tables(report))
    return report_page(report.title, report.facts, shown, report.figures.notes, report.skipped)


def report_page(
    title: str, facts: Mapping[str, str], shown: Section, notes: Sequence[str], skipped: Sequence[SkippedVideo]
) -> Page:
    """Page with notes and skipped videos, unless there are none."""
    items = {"Notes": notes, "Skipped": [f"`{each.path.name}`: {each.reason}" for each in skipped]}
    remarks = [Section(name, items=texts) for name, texts in items.items() if texts]
    return Page(title, facts=list(facts.items()), sections=[shown, *remarks])
