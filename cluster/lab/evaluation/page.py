"""Page of an evaluation: tables, and charts (the paper's figures 14 to 18, and calibration)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.metrics import Estimate
from cluster.lab.evaluation.report import (
    BOUNDS,
    EvaluationReport,
    SettingRow,
    format_estimate,
    format_number,
    frontier,
    within_bound,
)
from cluster.lab.evaluation.settings import Role
from cluster.lab.report.charts import Axis, Point, Series, chart
from cluster.lab.report.page import Page, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_table(report: EvaluationReport) -> Table:
    """Every figure with its interval and target."""
    rows = []
    for name, value in report.figures.values.items():
        within = within_bound(name, value)
        measured = report.figures.measured.get(name)
        shown = format_number(value) if measured is None else format_estimate(measured)
        target = ("", "") if within is None else ("{} {:g}".format(*BOUNDS[name]), "yes" if within else "no")
        rows.append((name, shown, *target))
    missed = frozenset(place for place, row in enumerate(rows) if row[-1] == "no")
    return Table("Figures", ("figure", "value [95 %]", "must reach", "reached"), rows, missed)


def setting_table(report: EvaluationReport) -> Table:
    """Every setting that is not a point of a sweep."""
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


def sweep_table(report: EvaluationReport) -> Table:
    """Every point of the sweeps."""
    rows = [
        (curve, f"{place:g}", line.setting.name, format_estimate(line.accuracy.f1), f"{100 * line.flops_share:.1f} %")
        for line in report.lines
        if line.setting.sweep is not None
        for curve, place in [line.setting.sweep]
    ]
    return Table("Sweeps", ("curve", "at", "setting", "F1 [95 %]", "FLOPs"), rows)


def tables(report: EvaluationReport) -> list[Table]:
    """Figures; settings; sweeps, if any; F1 of the compared settings by kind of event, by motion and by stratum;
    calibration."""
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
        *([sweep_table(report)] if len(report.table) < len(report.lines) else []),
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
    """Page with sections for notes and skipped videos, if any."""
    items = {"Notes": notes, "Skipped": [f"`{each.path.name}`: {each.reason}" for each in skipped]}
    remarks = [Section(name, items=texts) for name, texts in items.items() if texts]
    return Page(title, facts=list(facts.items()), sections=[shown, *remarks])


_ROLES: dict[Role, str] = {
    "full": "full computation",
    "codecsight": "CodecSight",
    "ours": "ours",
    "other": "other policies",
}
_COLORS: dict[Role, int] = {"full": 2, "codecsight": 1, "ours": 0, "other": 7}
_F1 = Axis("F1, mean over kinds", high=1.0)
_SWEEPS = {
    "stride": Axis("stride, share of the window", percent=True),
    "threshold": Axis("motion threshold τ, pixels", log=True),
    "margin": Axis("margin above the noise, grey levels"),
    "anchor interval": Axis("anchor interval, seconds", log=True),
    "camera GOP": Axis("GOP of the video, seconds", log=True),
    "window": Axis("window, seconds", log=True),
    "budget": Axis("budget, share of the overlap", percent=True),
}


def make_charts(report: EvaluationReport) -> dict[str, Figure]:
    """File name (without suffix) -> figure; omits curves that were not measured."""

    def priced(title: str, axis: str, price: Callable[[SettingRow], float]) -> Figure:
        share = Axis(f"{axis}, share of full computation", log=True, percent=True)
        return chart(title, _frontier(report.table, price), share, _F1)

    tokens = "tokens through the language model"
    found = {
        "f1-tokens": priced("F1 against computed tokens", tokens, lambda line: line.computed_share),
        "f1-flops": priced("F1 against prefill operations", "prefill FLOPs", lambda line: line.flops_share),
        "calibration": _calibration(report),
    }
    if any(name.endswith("motion") for name in report.groups):
        found["f1-motion"] = _by_motion(report)
    cost = Axis("prefill FLOPs a window, share of full's", percent=True)
    for name, axis in _SWEEPS.items():
        series, what = _swept(report.lines, name), axis.title.split(",")[0]
        if series:
            stem = name.replace(" ", "-")
            found[f"f1-{stem}"] = chart(f"F1 against {what}", series, axis, _F1)
            costs = _swept(report.lines, name, cost=True)
            found[f"flops-{stem}"] = chart(f"Operations against {what}", costs, axis, cost)
    return found


def _point(x: float, measured: Estimate, text: str) -> Point:
    return Point(x, *measured, text=f"{text}: F1 {measured.value:.3f}")


def _frontier(lines: Sequence[SettingRow], price: Callable[[SettingRow], float]) -> list[Series]:
    """Every setting as a point, and the Pareto frontier of ours as a line. Only full computation and CodecSight show
    intervals, for legibility."""
    series = []
    for role, name in _ROLES.items():
        points = [
            _point(price(line), line.accuracy.f1, f"{line.setting.name} at {100 * price(line):.1f} %")
            for line in lines
            if line.setting.role == role
        ]
        if role in ("ours", "other"):
            points = [replace(point, low=math.nan, high=math.nan) for point in points]
        series.append(Series(name, points, joined=False, color=_COLORS[role]))
        if role == "ours":
            best = [Point(*place) for place in frontier((point.x, point.y) for point in points)]
            series.append(Series("ours, best at a price", best, marked=False, color=_COLORS[role]))
    return series


def _swept(lines: Sequence[SettingRow], curve: str, *, cost: bool = False) -> list[Series]:
    found: dict[Role, list[Point]] = {}
    for line in lines:
        if line.setting.sweep is not None and line.setting.sweep[0] == curve:
            place = line.setting.sweep[1]
            name = _ROLES[line.setting.role]
            if cost:
                point = Point(place, line.flops_share, text=f"{name} at {place:g}: {100 * line.flops_share:.1f} %")
            else:
                point = _point(place, line.accuracy.f1, f"{name} at {place:g}")
            found.setdefault(line.setting.role, []).append(point)
    return [Series(_ROLES[role], points, color=_COLORS[role]) for role, points in found.items()]


def _by_motion(report: EvaluationReport) -> Figure:
    levels = [name for name in report.groups if name.endswith("motion")]
    # One setting of ours is chosen per FLOPs limit, so several share the role.
    ours = iter((0, 3, 4))
    series = []
    for line in report.compared:
        name = line.setting.name
        points = [
            _point(place, report.groups[level][name].f1, f"{name}, {level}") for place, level in enumerate(levels, 1)
        ]
        color = next(ours) if line.setting.role == "ours" else _COLORS[line.setting.role]
        series.append(Series(name, points, color=color))
    return chart("F1 by motion", series, Axis("third of the videos by motion: 1 low, 2 medium, 3 high"), _F1)


def _calibration(report: EvaluationReport) -> Figure:
    points = [
        Point(each.score, each.rate, each.ci_low, each.ci_high, f"{each.windows} windows, event in {each.rate:.0%}")
        for each in report.figures.calibration.bins
    ]
    ideal = Series("as it should be", (Point(0.0, 0.0), Point(1.0, 1.0)), marked=False)
    rate = Axis("share of windows with the event", low=0.0, high=1.0)
    score = Axis("score", low=0.0, high=1.0)
    return chart("Event rate by score, full computation", [Series("windows", points), ideal], score, rate)
