"""The charts of a load test as inline SVG, drawn by what draws the evaluation's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from cluster.lab.evaluation import plots
from cluster.lab.evaluation.plots import Axis, Point, Series, Span
from loadtest.result import FaultResult, Tick
from loadtest.run import SearchResult

TIME = "seconds since the test began"


def run_charts(ticks: Sequence[Tick], faults: Sequence[FaultResult], stride_s: float) -> list[str]:
    """Lag, streams and answers, cores and network over the test; the time that each fault cost is shaded in all."""
    if not ticks:
        return []
    chart = partial(plots.chart, spans=[_span(each) for each in faults])
    lag = [_line("p50", ticks, lambda tick: tick.lag_p50_s), _line("p99", ticks, lambda tick: tick.lag_p99_s)]
    last = ticks[-1].at_s
    lag.append(Series("one stride", (Point(ticks[0].at_s, stride_s), Point(last, stride_s)), marked=False))
    roles = sorted({role for tick in ticks for role in tick.use.cores})
    cores = [_line(role, ticks, lambda tick, role=role: tick.use.cores.get(role, 0.0)) for role in roles]  # type: ignore[misc]
    cores.append(_line("other programs", ticks, lambda tick: tick.use.others))
    drawn = [
        # A frame closes its window a sample early, so that lags may be below 0.
        chart("Lag of the answers that came", lag, Axis(TIME, low=0), Axis("seconds")),
        chart(
            "Streams and answers",
            [_line("streams", ticks, lambda t: t.streams), _line("answers a second", ticks, lambda t: t.answers)],
            Axis(TIME, low=0),
            Axis("count", low=0),
        ),
        chart("Cores in use", cores, Axis(TIME, low=0), Axis("cores", low=0)),
        chart(
            "Bytes a second",
            [
                _line("taken from cameras", ticks, lambda t: t.sent_bytes_s / 1e6),
                _line("through all interfaces", ticks, lambda t: t.use.network_bytes_s / 1e6),
            ],
            Axis(TIME, low=0),
            Axis("MB a second", low=0),
        ),
        chart(
            "Lateness of the load generator itself (p99)",
            [_line("packets sent late", ticks, lambda t: 1000 * t.late_p99_s)],
            Axis(TIME, low=0),
            Axis("milliseconds", low=0),
        ),
    ]
    rungs = {rung: None for tick in ticks for rung, cameras in tick.rungs.items() if cameras}
    if rungs:
        lines = [_line(rung, ticks, lambda tick, rung=rung: tick.rungs.get(rung, 0.0)) for rung in rungs]  # type: ignore[misc]
        drawn.append(chart("Cameras on the quality ladder", lines, Axis(TIME, low=0), Axis("cameras", low=0)))
    if any(tick.use.gpus for tick in ticks):
        share = Axis("share of the time", low=0, high=1, percent=True)
        drawn.append(chart("GPUs", _gpus(ticks), Axis(TIME, low=0), share))
    return drawn


def _span(fault: FaultResult) -> Span:
    """From a fault until all its cameras were on time again, or to the end where they never were."""
    healed = math.isfinite(fault.recovery_s)
    told = f"on time again after {fault.recovery_s:.1f} s" if healed else "not on time again"
    return Span(fault.at_s, fault.at_s + fault.recovery_s, fault.name, f"{fault.name}: {fault.victim}; {told}")


def search_chart(results: Sequence[SearchResult]) -> str:
    """Every try of every search, in the order in which they were made."""
    series = []
    for each in results:
        for stable, word in ((True, "kept up"), (False, "did not")):
            points = tuple(
                Point(number, one.streams, text=one.note)
                for number, one in enumerate(each.tries, 1)
                if one.stable is stable
            )
            series.append(Series(f"{each.replicas} replicas, {word}", points, joined=False))
    return plots.chart("The search", series, Axis("measurement", low=0), Axis("streams", low=0))


def _gpus(ticks: Sequence[Tick]) -> list[Series]:
    numbers = sorted({gpu.number for tick in ticks for gpu in tick.use.gpus})
    series = []
    for number in numbers:
        mine = [(tick.at_s, gpu) for tick in ticks for gpu in tick.use.gpus if gpu.number == number]
        series.append(
            Series(f"GPU {number} computing", tuple(Point(at, gpu.compute) for at, gpu in mine), marked=False)
        )
        decoding = tuple(Point(at, gpu.decode) for at, gpu in mine if gpu.decode is not None)
        series.append(Series(f"GPU {number} decoding", decoding, marked=False))
    return series


def _line(name: str, ticks: Sequence[Tick], value: Callable[[Tick], float]) -> Series:
    return Series(name, tuple(Point(tick.at_s, float(value(tick))) for tick in ticks), marked=False)
