"""A simulated city over time as charts: lags, windows, load and quality, rungs of the ladder; and a search's trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.lab.evaluation.plots import Axis, Point, Series, chart
from cluster.types.priority import Priority
from loadtest.city.result import CityResult, Objective
from loadtest.city.search import Trial
from loadtest.city.tally import REASONS, lag_quantile

TIME = Axis("minutes")


def city_charts(result: CityResult) -> list[str]:
    """SVG documents; stretches without windows leave gaps."""
    return [_lags(result), _windows(result), _load(result), *_ladder(result), *_drops(result)]


def search_charts(trials: Sequence[Trial], objective: Objective, *, fewer: bool) -> list[str]:
    """What each count that was tried reached; ``fewer``: over replicas, else over cameras."""
    if not trials:
        return []

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
    return [chart(wanted, series, Axis("replicas" if fewer else "cameras"), Axis("share", percent=True))]


def _over_time(result: CityResult, values: Sequence[float], show: str = ".3g") -> tuple[Point, ...]:
    middle = result.tally.bin_s / 2
    return tuple(
        Point((at * result.tally.bin_s + middle) / 60, value, text=format(value, show))
        for at, value in enumerate(values)
    )


def _lags(result: CityResult) -> str:
    lags = result.tally.lags
    series = []
    for priority in Priority:
        of_bin = lags[:, priority.rank]
        if not of_bin.any():
            continue
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            values = [lag_quantile(bins, share) if bins.any() else float("nan") for bins in of_bin]
            series.append(Series(f"{priority} {name}", _over_time(result, values), marked=False))
    return chart("Lag of computed windows, seconds", series, TIME, Axis("seconds", log=True))


def _windows(result: CityResult) -> str:
    tally = result.tally
    each = {
        "ended": tally.due.sum(axis=1),
        "answered": tally.answered.sum(axis=1),
        "last answer stands": tally.gated.sum(axis=1),
        "dropped": tally.dropped.sum(axis=(1, 2)),
    }
    series = [Series(name, _over_time(result, (n / tally.bin_s).tolist()), marked=False) for name, n in each.items()]
    return chart("Windows a second", series, TIME, Axis("windows/s", low=0.0))


def _load(result: CityResult) -> str:
    tally = result.tally
    capacity, due_s = np.maximum(tally.capacity_s, 1e-9), tally.due_s.sum(axis=1)
    quality = np.where(due_s > 0, tally.value_s.sum(axis=1) / np.maximum(due_s, 1e-9), 1.0)
    series = [
        Series("replicas busy", _over_time(result, (tally.busy_s / capacity).tolist()), marked=False),
        Series("useful work", _over_time(result, (tally.useful_s / capacity).tolist()), marked=False),
        Series("quality", _over_time(result, quality.tolist()), marked=False),
    ]
    return chart("Load and quality", series, TIME, Axis("share", percent=True, low=0.0))


def _ladder(result: CityResult) -> list[str]:
    spent = result.tally.rung_s
    if not spent[:, 1:].any():
        return []
    shares = spent / np.maximum(spent.sum(axis=1, keepdims=True), 1e-9)
    series = [
        Series(name, _over_time(result, shares[:, place].tolist()), marked=False)
        for place, name in enumerate(result.rungs)
        if shares[:, place].any()
    ]
    return [chart("Video by rung of the ladder", series, TIME, Axis("share", percent=True, low=0.0))]


def _drops(result: CityResult) -> list[str]:
    dropped = result.tally.dropped.sum(axis=1) / result.tally.bin_s
    series = [
        Series(reason, _over_time(result, dropped[:, place].tolist()), marked=False)
        for place, reason in enumerate(REASONS)
        if dropped[:, place].any()
    ]
    return [chart("Windows dropped a second, by reason", series, TIME, Axis("windows/s", low=0.0))] if series else []
