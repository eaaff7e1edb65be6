"""The charts of a load test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.lab.report.charts import Axis, Point, Series, Span, chart
from loadtest.result import FaultResult, Tick
from loadtest.run import SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_charts(ticks: Sequence[Tick], faults: Sequence[FaultResult], stride_s: float) -> dict[str, Figure]:
    """Lag, streams and answers, cores and network over the test by title; the time that each fault cost is shaded."""
    drawn: dict[str, Figure] = {}
    spans = [_span(each) for each in faults]

    def draw(title: str, unit: Axis, lines: Mapping[str, Sequence[float]]) -> None:
        series = [
            Series(name, [Point(tick.at_s, value) for tick, value in zip(ticks, values, strict=True)], marked=False)
            for name, values in lines.items()
        ]
        if lines:
            drawn[title] = chart(title, series, Axis("seconds since the test began", low=0), unit, spans)

    if not ticks:
        return drawn
    uses = [tick.use for tick in ticks]
    # A frame closes its window a sample early, so that lags may be below 0.
    lags = {"p50": [tick.lag_p50_s for tick in ticks], "p99": [tick.lag_p99_s for tick in ticks]}
    draw("Lag of the answers that came", Axis("seconds"), lags | {"one stride": [stride_s] * len(ticks)})
    streams = {"streams": [tick.streams for tick in ticks], "answers a second": [tick.answers for tick in ticks]}
    draw("Streams and answers", Axis("count", low=0), streams)
    roles = sorted({role for use in uses for role in use.cores})
    cores = {role: [use.cores.get(role, 0.0) for use in uses] for role in roles}
    draw("Cores in use", Axis("cores", low=0), cores | {"other programs": [use.others for use in uses]})
    rates = {
        "taken from cameras": [tick.sent_bytes_s / 1e6 for tick in ticks],
        "through all interfaces": [use.network_bytes_s / 1e6 for use in uses],
    }
    draw("Bytes a second", Axis("MB a second", low=0), rates)
    late = {"packets sent late": [1000 * tick.late_p99_s for tick in ticks]}
    draw("Lateness of the load generator itself (p99)", Axis("milliseconds", low=0), late)
    rungs = dict.fromkeys(rung for tick in ticks for rung, cameras in tick.rungs.items() if cameras)
    ladder = {rung: [tick.rungs.get(rung, 0.0) for tick in ticks] for rung in rungs}
    draw("Cameras on the quality ladder", Axis("cameras", low=0), ladder)
    gpus: dict[str, list[float]] = {}
    for number in sorted({gpu.number for use in uses for gpu in use.gpus}):
        mine = [next((gpu for gpu in use.gpus if gpu.number == number), None) for use in uses]
        gpus[f"GPU {number} computing"] = [math.nan if gpu is None else gpu.compute for gpu in mine]
        gpus[f"GPU {number} decoding"] = [math.nan if not gpu or gpu.decode is None else gpu.decode for gpu in mine]
    draw("GPUs", Axis("share of the time", low=0, high=1, percent=True), gpus)
    return drawn


def _span(fault: FaultResult) -> Span:
    """From a fault until all its cameras were on time again, or to the end where they never were."""
    healed = math.isfinite(fault.recovery_s)
    told = f"on time again after {fault.recovery_s:.1f} s" if healed else "not on time again"
    return Span(fault.at_s, fault.at_s + fault.recovery_s, fault.name, f"{fault.name}: {fault.victim}; {told}")


def search_chart(results: Sequence[SearchResult]) -> Figure:
    """Every try of every search, in the order in which they were made."""
    series = [
        Series(
            f"{each.replicas} replicas, {word}",
            [Point(at, one.streams, text=one.note) for at, one in enumerate(each.tries, 1) if one.stable is stable],
            joined=False,
        )
        for each in results
        for stable, word in ((True, "kept up"), (False, "did not"))
    ]
    return chart("The search", series, Axis("measurement", low=0), Axis("streams", low=0))
