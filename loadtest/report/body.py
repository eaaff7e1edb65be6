"""A load test as JSON: the ``figures`` that have a number to reach, and everything behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.lab.bench.harness import machine
from loadtest.profile import Profile
from loadtest.result import FaultResult, Measurement, Tick, finite
from loadtest.run import RunResult, SearchResult


@dataclass(frozen=True, slots=True)
class Facts:
    """What was tested: shown above everything else. ``cluster``: name of a setting -> its value, for people."""

    title: str
    profile_name: str
    profile: Profile
    cluster: Mapping[str, str]
    calibrated: bool


def run_json(facts: Facts, result: RunResult) -> dict[str, Any]:
    """One test at a fixed number of streams."""
    return {
        "loadtest": "run",
        "figures": finite(run_figures(result)),
        "verdict": asdict(result.measurement.verdict),
        "faults": [_fault(each) for each in result.faults],
        "runs": [{**_measurement(result.measurement), "city": finite(result.city)}],
        "during_faults": None if result.during is None else _measurement(result.during),
        "others_cores": _others(result.ticks),
        "ticks": [finite(asdict(tick)) for tick in result.ticks],
        **_about(facts),
    }


def search_json(facts: Facts, results: Sequence[SearchResult], *, two_cores: bool) -> dict[str, Any]:
    """The most streams, for one or several numbers of replicas; ``two_cores``: see :func:`search_figures`."""
    return {
        "loadtest": "search",
        "figures": finite(search_figures(results, two_cores=two_cores)),
        "searches": [
            {
                "replicas": each.replicas,
                "streams": each.streams,
                "limit": each.limit,
                "tries": [asdict(one) for one in each.tries],
                "others_cores": _others(each.ticks),
                "best": None if each.best is None else _measurement(each.best),
            }
            for each in results
        ],
        **_about(facts),
    }


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
        "calibrated": facts.calibrated,
        "machine": machine(),
    }


def _measurement(found: Measurement) -> dict[str, Any]:
    body: dict[str, Any] = {**asdict(found), "answered_share": found.answered_share, "verdict": asdict(found.verdict)}
    return {key: finite(value) for key, value in body.items()}


def _fault(fault: FaultResult) -> dict[str, Any]:
    recovered = math.isfinite(fault.recovery_s)
    return {
        **{key: finite(value) for key, value in asdict(fault).items()},
        "recovered": recovered,
        "recovery_strides": fault.recovery_strides if recovered else None,
    }
