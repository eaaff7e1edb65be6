"""Reports of a simulated city: terminal tables and one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.lab.city import Floats
from cluster.lab.city.against import Compared
from cluster.lab.city.city import carries
from cluster.lab.city.mix import BurstPeriod
from cluster.lab.city.plan import CityPlan, Event, PoolPlan
from cluster.lab.city.result import CityResult, Figures, Objective
from cluster.lab.city.study import Trial
from cluster.lab.city.tally import REASONS, lag_quantile
from cluster.lab.report.charts import Axis, Point, Series, chart
from cluster.lab.report.number_format import seconds_text
from cluster.lab.report.page import Page, Section, Table
from cluster.types.cameras import Priority

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def search_chart(trials: Sequence[Trial], objective: Objective, *, fewer: bool) -> Figure:
    """Figures of every trial, over replicas if ``fewer``, else over cameras."""

    def line(name: str, value: Callable[[Trial], float]) -> Series:
        points = tuple(Point(t.replicas if fewer else t.cameras, value(t), text=f"{value(t):.4f}") for t in trials)
        return Series(name, points)

    series = [
        line("on time", lambda t: t.on_time),
        line("answered", lambda t: t.answered),
        line("quality", lambda t: t.quality),
        line("useful work over capacity", lambda t: t.utilisation),
    ]
    wanted = f"objective: {objective.on_time:g} on time, {objective.answered:g} answered, quality {objective.quality:g}"
    return chart(wanted, series, Axis("replicas" if fewer else "cameras"), Axis("share", percent=True))


def city_charts(result: CityResult) -> list[Figure]:
    """Charts over time; bins without windows are gaps, and charts without data are omitted."""
    tally = result.tally
    seconds = Axis("seconds", log=True)
    share, rate = Axis("share", percent=True, low=0.0), Axis("windows/s", low=0.0)
    lags = {
        f"{priority} {name}": [lag_quantile(bins, part) if bins.any() else float("nan") for bins in of_bin]
        for priority in Priority
        if (of_bin := tally.lags[:, priority.rank]).any()
        for part, name in ((0.5, "p50"), (0.99, "p99"))
    }
    windows = {
        "ended": tally.due.sum(axis=1) / tally.bin_s,
        "answered": tally.answered.sum(axis=1) / tally.bin_s,
        "gated": tally.gated.sum(axis=1) / tally.bin_s,
        "dropped": tally.dropped.sum(axis=(1, 2)) / tally.bin_s,
    }
    capacity, due_s = np.maximum(tally.capacity_s, 1e-9), tally.due_s.sum(axis=1)
    load = {
        "replicas busy": tally.busy_s / capacity,
        "useful work": tally.useful_s / capacity,
        "quality": np.where(due_s > 0, tally.value_s.sum(axis=1) / np.maximum(due_s, 1e-9), np.nan),
    }
    spent = tally.rung_s / np.maximum(tally.rung_s.sum(axis=1, keepdims=True), 1e-9)
    reduced = tally.rung_s[:, 1:].any()
    used = zip(result.plan.ladder.rungs, spent.T, strict=True)
    rungs = {rung.name: of for rung, of in used if reduced and of.any()}
    dropped = tally.dropped.sum(axis=1) / tally.bin_s
    drops = {reason: of for reason, of in zip(REASONS, dropped.T, strict=True) if of.any()}
    contents: list[tuple[str, Mapping[str, Sequence[float] | Floats], Axis]] = [
        ("Lag of computed windows, seconds", lags, seconds),
        ("Windows a second", windows, rate),
        ("Load and quality", load, share),
        ("Video by rung of the ladder", rungs, share),
        ("Windows dropped a second, by reason", drops, rate),
    ]
    return [
        chart(title, [_over_time(result, *line) for line in lines.items()], Axis("minutes"), axis)
        for title, lines, axis in contents
        if lines
    ]


def _over_time(result: CityResult, name: str, values: Sequence[float] | Floats) -> Series:
    bin_s = result.tally.bin_s
    points = tuple(
        Point((at + 0.5) * bin_s / 60, float(value), text=format(value, ".3g")) for at, value in enumerate(values)
    )
    return Series(name, points, marked=False)


NOTES = (
    "Placement, admission, window queues and the quality ladder are production code in simulated time; engine steps "
    "take the cost model's time, with its spread.",
    "Motion follows a two-state Markov chain per camera. The mix's shares are assumptions until you replace them by "
    "counts of your own cameras.",
    "Networks and decoders take no time and lose nothing; replicas' reports reach their controller at once.",
    "Useful work is the least time, in full steps, that the answers given within their stride take.",
)


def verdict(result: CityResult, objective: Objective) -> str:
    """The result in one sentence."""
    figures = result.figures
    word = "meet" if objective.met(figures) else "do not meet"
    refused = f"; {figures.refused:,} cameras were refused" if figures.refused else ""
    return (
        f"{_pool(result)} {word} the objective for {result.plan.cameras:,} cameras: {_percent(figures.on_time)} of "
        f"computed windows within their stride, {_percent(figures.answered)} of all windows answered, quality "
        f"{figures.quality:.3f} of full{refused}."
    )


def facts(result: CityResult) -> list[tuple[str, str]]:
    """Inputs and admission results of the simulation, as label and text."""
    plan, admitted = result.plan, result.admitted
    title = f": {plan.mix.title}" if plan.mix.title else ""
    uncounted = _span(result.first * result.tally.bin_s)
    found = [
        ("cameras", f"{plan.cameras:,}, mix {plan.mix_name}{title}"),
        ("replicas", _pool(result)),
        ("ladder", f"{plan.ladder_name}: {plan.ladder.source}"),
        ("time", f"{_span(plan.timing.seconds)}; the first {uncounted} do not count; seed {plan.seed}"),
        ("controllers", f"{result.districts}"),
    ]
    found += [("costs", f"{pool.costs_title}: {pool.costs.source}") for pool in plan.pools]
    found += [("limit", _limit(plan, pool)) for pool in plan.pools]
    if plan.events:
        found.append(("events", ", ".join(map(_event, plan.events))))
    if result.bursts:
        found.append(("bursts", ", ".join(map(_burst, result.bursts))))
    accepted = plan.cameras - admitted.reduced - admitted.refused
    admission = f"{accepted:,} accepted, {admitted.reduced:,} at reduced quality, {admitted.refused:,} refused"
    if admitted.refused and not admitted.missing_replicas:
        admission += ", whose windows do not fit into the replicas' memory"
    elif admitted.refused:
        admission += f", which need {admitted.missing_replicas:.1f} more replicas"
    found.append(("admission", admission))
    if result.cost_per_hour is not None and result.cost_per_camera_month is not None:
        money = f"{result.cost_per_hour:,.2f} an hour, {result.cost_per_camera_month:,.2f} per camera and month"
        found.append(("cost", f"{money}, at {plan.price_per_hour:g} per accelerator-hour"))
    balance = result.balance
    found.append(
        (
            "windows, whole run",
            f"{balance.expected:,} = {balance.answered:,} computed + {balance.gated:,} gated + "
            f"{balance.dropped:,} dropped + {balance.waiting:,} waiting",
        )
    )
    return found


def _limit(plan: CityPlan, pool: PoolPlan) -> str:
    """Whether a replica's time or its memory is exhausted first."""
    computed, held = carries(plan.mix, pool.costs, plan.hour)
    title = f"a replica on {pool.kind} computes {computed:,.0f} cameras at full quality"
    if math.isinf(held):
        return f"{title}; its cost model has no memory limit, so memory is not counted"
    return f"{title} and holds the windows of {held:,.0f}: {'time' if computed < held else 'memory'} binds"


HEADS = ("priority", "windows", "on time", "answered", "quality", "lag p50", "p95", "p99", "dropped")


def tables(result: CityResult) -> list[Table]:
    """Figures by priority, load, and use of the ladder's rungs."""
    groups = [(str(priority), figures) for priority, figures in result.by_priority().items()]
    rows = [_figures_row(name, figures) for name, figures in [*groups, ("all", result.figures)]]
    figures = result.figures
    load = ((_percent(figures.utilisation), _percent(figures.busy), f"{figures.computed_per_s:,.0f}"),)
    shares = result.rung_shares()
    return [
        Table("Windows", HEADS, tuple(rows)),
        Table("Load", ("useful work over capacity", "replicas busy", "computed windows/s"), load),
        Table("Video by rung of the ladder", tuple(shares), (tuple(_percent(share) for share in shares.values()),)),
    ]


def _trial_table(trials: Sequence[Trial]) -> Table:
    heads = ("cameras", "replicas", "met", "on time", "answered", "quality", "useful work", "lag p99")
    rows = tuple(
        (
            f"{each.cameras:,}",
            f"{each.replicas:,}",
            "yes" if each.met else "no",
            _percent(each.on_time),
            _percent(each.answered),
            f"{each.quality:.3f}",
            _percent(each.utilisation),
            seconds_text(each.lag_p99_s),
        )
        for each in trials
    )
    return Table("Search", heads, rows)


def comparison_table(compared: Sequence[Compared]) -> Table:
    """Load tests next to their simulation, simulated values first."""
    pairs = [(name, "measured") for name in ("lag p50", "lag p99", "answered/s")]
    heads = ("cameras", "replicas", "busy", *(head for pair in pairs for head in pair), "worst")
    rows = []
    for each in compared:
        measured, found = each.run.measured, each.simulated
        rows.append(
            (
                f"{each.run.cameras:,}",
                f"{each.run.replicas:,}",
                _percent(found.busy),
                seconds_text(found.lag_p50_s),
                seconds_text(measured.lag_p50_s),
                seconds_text(found.lag_p99_s),
                seconds_text(measured.lag_p99_s),
                f"{found.computed_per_s:.2f}",
                f"{measured.answered_per_s:.2f}",
                f"{100 * each.error:.1f} %",
            )
        )
    return Table("Simulated against measured", heads, tuple(rows))


def page(result: CityResult, objective: Objective, trials: Sequence[Trial] = (), *, fewer: bool = False) -> str:
    """One self-contained HTML document. ``trials``: of a search; ``fewer``: it was for the fewest replicas."""
    charts, shown = city_charts(result), tables(result)
    if trials:
        charts.append(search_chart(trials, objective, fewer=fewer))
        shown.append(_trial_table(trials))
    sections = [
        Section(tables=shown),
        Section("Over time", charts={str(figure.get_label()): figure for figure in charts}),
        Section("How it was computed", items=NOTES),
    ]
    title = f"{result.plan.cameras:,} cameras on {_pool(result)}"
    met = objective.met(result.figures)
    return Page(title, verdict(result, objective), met, facts=facts(result), sections=sections).html()


def _figures_row(name: str, figures: Figures) -> tuple[str, ...]:
    return (
        name,
        f"{figures.windows:,}",
        _percent(figures.on_time),
        _percent(figures.answered),
        f"{figures.quality:.3f}",
        seconds_text(figures.lag_p50_s),
        seconds_text(figures.lag_p95_s),
        seconds_text(figures.lag_p99_s),
        ", ".join(f"{reason} {count:,}" for reason, count in figures.dropped.items()) or "none",
    )


def _event(event: Event) -> str:
    return f"minute {event.at_s / 60:.4g}: {event.what} {event.amount:g}"


def _burst(spell: BurstPeriod) -> str:
    minutes = f"minutes {spell.start_s / 60:.4g} to {spell.end_s / 60:.4g}"
    return f"{minutes}: {spell.name} at {_percent(spell.share)} of the cameras it reaches"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds:g} s"


def _pool(result: CityResult) -> str:
    return " + ".join(f"{pool.replicas:,} {pool.kind}" for pool in result.plan.pools)


def _percent(share: float) -> str:
    text = f"{100 * share:.2f}"
    # Never round an incomplete share up to 100 %.
    return "99.99 %" if text == "100.00" and share < 1 else f"{text} %"
