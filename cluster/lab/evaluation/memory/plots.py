"""The curves of an evaluation of memory: accuracy against budget, coverage, and time to the first word."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cluster.lab.evaluation.memory.coverage import Space
from cluster.lab.evaluation.memory.report import MemoryReport
from cluster.lab.evaluation.memory.results import SettingResult
from cluster.lab.evaluation.plots import Axis, Point, Series, chart
from cluster.lab.evaluation.report import measured_text

_SPACES: dict[Space, str] = {"joint": "keys and values", "key": "keys", "value": "values"}
_SHARE = Axis("share of all tokens", percent=True, low=0.0, high=1.0)
_TTFT = Axis("time to the first word, s", low=0.0)


def memory_charts(report: MemoryReport) -> dict[str, str]:
    """File name (without suffix) -> SVG; a curve that was not measured is left out.

    ``accuracy-budget``; ``coverage-joint``, ``coverage-key`` and ``coverage-value`` (CoRDS, figure 4: distribution of
    the distance from every token to the nearest that was kept); ``ttft-history``.
    """
    found = {
        "accuracy-budget": chart(
            "Accuracy against budget",
            _by_budget(report.results),
            Axis("tokens of a layer and head that are held", log=True),
            Axis("accuracy, all questions", percent=True, high=1.0),
        )
    }
    for space, name in _SPACES.items():
        series = _coverage(report.results, space)
        if series:
            found[f"coverage-{space}"] = chart(f"Coverage of {name}", series, Axis("distance to the nearest"), _SHARE)
    if any(result.answered for result in report.results):
        found["ttft-history"] = chart(
            "Time to the first word against length of history",
            _by_history(report.results),
            Axis("footage seen before the question, s"),
            _TTFT,
        )
    return found


def _by_budget(results: Sequence[SettingResult]) -> list[Series]:
    """One series for each combination of policies; without a bound a setting stands at what it held."""
    points: dict[str, list[Point]] = defaultdict(list)
    for result in results:
        setting, measured = result.setting, result.accuracy["all"]
        held = result.mean("held") if setting.budget is None else float(setting.budget)
        # A logarithmic axis has no place for a memory that holds nothing.
        if held > 0:
            text = f"{setting.name}: {measured_text(measured)}"
            name = f"{setting.compressor}/{setting.organiser}/{setting.retriever}"
            points[name].append(Point(held, measured.value, *measured.interval, text))
    return [Series(name, tuple(found)) for name, found in points.items()]


def _coverage(results: Sequence[SettingResult], space: Space) -> list[Series]:
    found = []
    for result in results:
        coverage = result.coverage.get(space)
        if coverage is not None:
            last = len(coverage.percentiles) - 1
            points = tuple(Point(value, rank / last) for rank, value in enumerate(coverage.percentiles))
            found.append(Series(f"{result.setting.name} ({coverage.area:.3f})", points, marked=False))
    return found


def _by_history(results: Sequence[SettingResult]) -> list[Series]:
    found = []
    for result in results:
        times: dict[float, list[float]] = defaultdict(list)
        for each in result.answered:
            times[round(each.history_s)].append(each.ttft_s)
        points = tuple(Point(history, sum(some) / len(some)) for history, some in sorted(times.items()))
        found.append(Series(result.setting.name, points))
    return found
