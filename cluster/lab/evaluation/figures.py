"""The figures of an evaluation: what pruning and refresh cost in accuracy at a price, against full computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.lab.evaluation.calibration import Calibration, calibrate
from cluster.lab.evaluation.metrics import Measured, accuracy, f1_drop, recall_drop
from cluster.lab.evaluation.policies import Setting
from cluster.lab.evaluation.results import Results, Thresholds

# Shares of full computation's prefill FLOPs, and the names that figures at them bear.
LIMITS = {"15": 0.15, "8": 0.08}
# An F1 this much below another is not below it: rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Figures:
    """``values``: figure -> number. ``measured``: those of them with an interval. ``chosen``: limit -> the setting that
    stands for ours there. ``notes``: how they came about, and why one is missing."""

    values: dict[str, float]
    measured: dict[str, Measured]
    chosen: dict[str, Setting]
    calibration: Calibration
    notes: list[str] = field(default_factory=list)


def figures(test: Results, thresholds: Thresholds, validation: Results | None = None) -> Figures:
    """All figures.

    One setting of ours for all scenes stands for each price: of those whose share of full computation's FLOPs is within
    it (a count that needs no labels), the one with the best F1 on ``validation``. Without validation results it is
    chosen on the test results themselves, and a note says so. Of settings that are equally good, the one whose scores
    are nearest to full computation's.
    """
    found = Figures({}, {}, {}, calibrate(*test.window_scores(test.full)))
    whole = test.decisions(test.full, thresholds)
    exact = accuracy(whole)
    _put(found, "f1_full", exact.f1)
    _put(found, "f1_full_min", exact.worst)
    for name, limit in LIMITS.items():
        setting = choose(test, thresholds, limit, validation)
        if setting is None:
            found.notes.append(f"f1_drop_at_{name}: no setting of ours stays within {limit:.0%} of full's FLOPs")
            continue
        found.chosen[name] = setting
        _put(found, f"f1_drop_at_{name}", f1_drop(whole, test.decisions(setting, thresholds)))
        _put(found, f"flops_share_at_{name}", test.flops_share(setting))
    _against_codecsight(found, test, thresholds)
    if "15" in found.chosen:
        ours = test.decisions(found.chosen["15"], thresholds)
        _in_strata(found, test, "f1_drop_noisy", ("noisy",), lambda some: f1_drop(whole.of(some), ours.of(some)))
        _in_strata(found, test, "f1_drop_night", ("night",), lambda some: f1_drop(whole.of(some), ours.of(some)))
        _in_strata(
            found,
            test,
            "recall_drop_low_contrast",
            ("low_contrast", "slow"),
            lambda some: recall_drop(whole.of(some), ours.of(some)),
        )
    _put(found, "calibration_monotone", found.calibration.monotone)
    if validation is None and found.chosen:
        found.notes.append("settings were chosen on the scenes they are measured on; --validation DIR avoids that")
    return found


def choose(test: Results, thresholds: Thresholds, limit: float, validation: Results | None = None) -> Setting | None:
    """The setting of ours for this share of full computation's FLOPs; see ``figures``."""
    judge = validation or test
    affordable = [setting for setting in comparable(test) if test.flops_share(setting) <= limit]
    return max(affordable, key=lambda setting: _merit(judge, setting, thresholds), default=None)


def comparable(results: Results) -> list[Setting]:
    """Settings of ours that answer the same windows as full computation; one of each key."""
    shape = results.full.shape
    found: dict[str, Setting] = {}
    for setting in results.settings:
        cut = setting.shape
        alike = (cut.window_s, cut.stride_s, cut.fps) == (shape.window_s, shape.stride_s, shape.fps)
        if setting.role == "ours" and alike:
            # A point of a curve may be a setting of the table too; the table's comes first.
            found.setdefault(setting.key, setting)
    return list(found.values())


def flops_for(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """FLOPs at which a frontier of ``(flops, F1)`` points reaches an F1; ``nan`` where it never does.

    The frontier is the best F1 at or below each price, with straight lines between the points where it rises: between
    two settings there is always one (a budget, a margin) that costs and gives something in between. Below the cheapest
    point nothing is known, so that one's price is the least.
    """
    best: list[tuple[float, float]] = []
    for flops, f1 in sorted(points, key=lambda point: (point[0], -point[1])):
        if not math.isnan(f1) and (not best or f1 > best[-1][1]):
            best.append((flops, f1))
    for index, (flops, f1) in enumerate(best):
        if f1 >= wanted - _ROUNDING:
            if index == 0:
                return flops
            below, lower = best[index - 1]
            return below + (flops - below) * min(1.0, max(0.0, (wanted - lower) / (f1 - lower)))
    return float("nan")


def _merit(results: Results, setting: Setting, thresholds: Thresholds) -> tuple[float, float]:
    decisions = results.decisions(setting, thresholds)
    f1 = accuracy(decisions, resamples=0).f1.value
    return (-1.0 if math.isnan(f1) else round(f1, 9), -results.disagreement(setting))


def _against_codecsight(found: Figures, test: Results, thresholds: Thresholds) -> None:
    published = next((each for each in test.settings if each.role == "codecsight" and each.sweep is None), None)
    ours = comparable(test)
    if published is None or not ours:
        found.notes.append("flops_vs_codecsight: the settings lack the published rule or ours")
        return
    wanted = accuracy(test.decisions(published, thresholds), resamples=0).f1.value
    points = [
        (test.flops_share(setting), accuracy(test.decisions(setting, thresholds), resamples=0).f1.value)
        for setting in ours
    ]
    _put(found, "f1_codecsight", wanted)
    _put(found, "flops_share_codecsight", test.flops_share(published))
    needed = flops_for(points, wanted)
    if math.isnan(needed):
        found.notes.append(f"flops_vs_codecsight: no setting of ours reaches the published rule's F1 of {wanted:.3f}")
    else:
        _put(found, "flops_vs_codecsight", needed / test.flops_share(published))


def _in_strata(
    found: Figures, test: Results, name: str, strata: tuple[str, ...], measure: Callable[[np.ndarray], Measured]
) -> None:
    some = test.stratum(*strata)
    if not (test.truth[some] & test.judged[some]).any():
        found.notes.append(f"{name}: no video of {' or '.join(strata)} has an event")
        return
    _put(found, name, measure(some))


def _put(found: Figures, name: str, value: Measured | float) -> None:
    number = value.value if isinstance(value, Measured) else value
    if math.isnan(number):
        found.notes.append(f"{name}: there is too little to tell")
        return
    found.values[name] = float(number)
    if isinstance(value, Measured):
        found.measured[name] = value
