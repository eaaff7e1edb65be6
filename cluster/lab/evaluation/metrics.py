"""Window labels, and video-level F1 by CodecSight's rule with bootstrap intervals over videos.

A video is positive if ``consecutive`` windows in a row are (two, as published). That equals a threshold on the video's
score: the maximum, over all runs of that many windows, of the run's minimum score.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CONSECUTIVE = 2
RESAMPLES = 2000
LEVEL = 0.95
# Minimum number of units for a confidence interval.
_MIN_UNITS = 3


def video_score(scores: Sequence[float] | Floats, consecutive: int = CONSECUTIVE) -> float:
    """Largest threshold at which the video is positive; ``-inf`` with fewer than ``consecutive`` windows."""
    if consecutive < 1:
        raise ValueError(f"a video is positive after at least one window, not {consecutive}")
    windows = np.asarray(scores, dtype=np.float64)
    if len(windows) < consecutive:
        return -np.inf
    return float(np.lib.stride_tricks.sliding_window_view(windows, consecutive).min(axis=1).max())


class Estimate(NamedTuple):
    """A value and its confidence interval; ``nan`` where undefined, or with too few samples."""

    value: float
    low: float
    high: float

    def row(self, name: str) -> dict[str, float]:
        """Columns ``name``, ``name_low`` and ``name_high`` of a flat row."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """Decisions on ``v`` videos and ``k`` kinds, with the ground truth.

    * ``truth``, ``positive`` ``[v, k]`` bool; ``judged`` ``[v, k]`` bool: where the truth is known
    """

    kinds: tuple[str, ...]
    truth: Bools
    positive: Bools
    judged: Bools

    def subset(self, videos: Bools) -> Decisions:
        """Decisions on the videos selected by a mask ``[v]``."""
        return Decisions(self.kinds, self.truth[videos], self.positive[videos], self.judged[videos])

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def events(self) -> int:
        """Number of positive (video, kind) pairs."""
        return int((self.truth & self.judged).sum())

    def counts(self, weights: Floats) -> Counts:
        """True positives, false positives and false negatives per kind, each ``[b, k]``; ``weights`` ``[b, v]`` weight
        the videos."""
        hit, miss = self.truth & self.judged, ~self.truth & self.judged
        found = (hit & self.positive, miss & self.positive, hit & ~self.positive)
        return Counts(*(weights @ each for each in found))


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """``tp, fp, fn`` ``[b, k]`` of ``b`` resamplings and ``k`` kinds. All metrics of a kind without events are ``nan``;
    with events but no positive decision, precision and F1 are 0."""

    tp: Floats
    fp: Floats
    fn: Floats

    def precision(self) -> Floats:
        return np.where(self._events, self.tp / np.maximum(self.tp + self.fp, 1), np.nan)

    def recall(self) -> Floats:
        return np.where(self._events, self.tp / np.maximum(self.tp + self.fn, 1), np.nan)

    def f1(self) -> Floats:
        return np.where(self._events, 2 * self.tp / np.maximum(2 * self.tp + self.fp + self.fn, 1), np.nan)

    def pooled(self) -> Counts:
        """Summed over kinds, ``[b, 1]``."""
        return Counts(*(each.sum(axis=1, keepdims=True) for each in (self.tp, self.fp, self.fn)))

    @property
    def _events(self) -> Bools:
        events: Bools = (self.tp + self.fn) > 0
        return events


def mean_over_kinds(values: Floats) -> Floats:
    """``[b, k]`` -> ``[b]``: mean over kinds that are not ``nan``."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)


@functools.lru_cache(maxsize=32)
def bootstrap_weights(units: int, resamples: int = RESAMPLES) -> Floats:
    """Weights ``[b, units]``: ones for the sample itself, then its resamplings (none with too few units).

    Deterministic, so that differences between settings are paired.
    """
    once = np.ones((1, units))
    if units < _MIN_UNITS or not resamples:
        return once
    draws = np.random.default_rng(0).multinomial(units, np.full(units, 1 / units), size=resamples)
    return np.concatenate((once, draws))


def estimate(values: Floats) -> Estimate:
    """The sample's value (first of ``values`` ``[b]``) with the central ``LEVEL`` interval of the resamplings' (the
    rest), ignoring ``nan``."""
    known = values[1:][~np.isnan(values[1:])]
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(known) else (np.nan, np.nan)
    return Estimate(float(values[0]), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of one setting on some videos. ``f1``, ``precision``, ``recall``: macro averages over kinds;
    ``by_kind``: F1 of each; ``pooled_f1``, ``pooled_recall``: micro averages, for small strata."""

    videos: int
    events: int
    f1: Estimate
    precision: Estimate
    recall: Estimate
    by_kind: dict[str, Estimate]
    precision_by_kind: dict[str, float]
    recall_by_kind: dict[str, float]
    pooled_f1: Estimate
    pooled_recall: Estimate

    @property
    def worst(self) -> float:
        """Lowest F1 over kinds."""
        known = [each.value for each in self.by_kind.values() if not np.isnan(each.value)]
        return min(known) if known else float("nan")


def accuracy(decisions: Decisions, *, resamples: int = RESAMPLES) -> Accuracy:
    """Score decisions, with bootstrap intervals over videos."""
    counts = decisions.counts(bootstrap_weights(len(decisions), resamples))
    f1, precision, recall = counts.f1(), counts.precision(), counts.recall()
    return Accuracy(
        videos=len(decisions),
        events=decisions.events,
        f1=estimate(mean_over_kinds(f1)),
        precision=estimate(mean_over_kinds(precision)),
        recall=estimate(mean_over_kinds(recall)),
        by_kind={kind: estimate(column) for kind, column in zip(decisions.kinds, f1.T, strict=True)},
        precision_by_kind=dict(zip(decisions.kinds, precision[0].tolist(), strict=True)),
        recall_by_kind=dict(zip(decisions.kinds, recall[0].tolist(), strict=True)),
        pooled_f1=estimate(counts.pooled().f1()[:, 0]),
        pooled_recall=estimate(counts.pooled().recall()[:, 0]),
    )


def f1_drop(full: Decisions, other: Decisions) -> Estimate:
    """Macro F1 of ``full`` minus that of ``other`` on the same videos, with a paired interval."""
    return _paired(full, other, lambda counts: mean_over_kinds(counts.f1()))


def recall_drop(full: Decisions, other: Decisions) -> Estimate:
    """Pooled recall of ``full`` minus that of ``other``, with a paired interval."""
    return _paired(full, other, lambda counts: counts.pooled().recall()[:, 0])


def _paired(full: Decisions, other: Decisions, statistic: Callable[[Counts], Floats]) -> Estimate:
    if len(full) != len(other):
        raise ValueError(f"paired differences need the same videos, not {len(full)} and {len(other)}")
    weights = bootstrap_weights(len(full))
    return estimate(statistic(full.counts(weights)) - statistic(other.counts(weights)))


def terciles(motion: Sequence[float]) -> tuple[Bools, Bools, Bools]:
    """Low, medium and high third of videos by motion, each ``[v]`` bool; sizes differ by at most one."""
    order = np.argsort(np.asarray(motion, dtype=np.float64), kind="stable")
    low, medium, high = (np.isin(np.arange(len(order)), part) for part in np.array_split(order, 3))
    return low, medium, high
