"""Outcomes of all windows of a simulated city by time bin and priority, with lag histograms.

A window counts in the bin in which it ended at its camera, no matter when it was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from cluster.lab.city import Floats, Ints
from cluster.replica.window_queue import DropReason
from cluster.types.cameras import Priority

LEAST_S, PER_DECADE = 1e-4, 200
LAG_BINS = 9 * PER_DECADE + 2
"""Logarithmic bins 1.2 % wide from 0.1 ms to a day, plus one below and one above."""


class Lost(StrEnum):
    """Reasons for unanswered windows beyond the queue's :class:`DropReason`."""

    RANDOM = "random"
    SHED = "shed"
    REFUSED = "refused"
    NO_REPLICA = "no_replica"
    REPLICA_LOST = "replica_lost"


REASONS: tuple[str, ...] = (*DropReason, *Lost)
PLACES = {reason: place for place, reason in enumerate(REASONS)}
RANKS = len(Priority)


class Tally:
    """Counts over ``bins`` time bins of ``bin_s`` seconds, by priority rank.

    ``due`` counts windows that ended, ``due_s`` the seconds of video they account for. ``value_s`` is the answered
    seconds of video weighted by the value of an answer at the camera's rung (``Rung.value``). ``done`` counts computed
    windows in the bin in which they were answered; ``busy_s``, ``useful_s`` and ``capacity_s`` are replica seconds.
    """

    def __init__(self, *, bins: int, bin_s: float, rungs: int) -> None:
        self.bin_s = bin_s
        self.due = np.zeros((bins, RANKS), dtype=np.int64)
        self.due_s = np.zeros((bins, RANKS))
        self.gated = np.zeros((bins, RANKS), dtype=np.int64)
        self.answered = np.zeros((bins, RANKS), dtype=np.int64)
        self.on_time = np.zeros((bins, RANKS), dtype=np.int64)
        self.value_s = np.zeros((bins, RANKS))
        self.dropped = np.zeros((bins, RANKS, len(REASONS)), dtype=np.int64)
        self.rung_s = np.zeros((bins, rungs))
        self.lags = np.zeros((bins, RANKS, LAG_BINS), dtype=np.int64)
        self.done = np.zeros((bins, RANKS), dtype=np.int64)
        self.busy_s = np.zeros(bins)
        self.useful_s = np.zeros(bins)
        self.capacity_s = np.zeros(bins)
        self.moves = np.zeros(bins, dtype=np.int64)
        self.steps = np.zeros(bins, dtype=np.int64)

    @property
    def bins(self) -> int:
        return len(self.due)

    def bin(self, at_s: Floats) -> Ints:
        """Time bin of each time; times after the end count in the last bin."""
        return np.minimum(at_s / self.bin_s, self.bins - 1).astype(np.int64)

    def close(self, end_s: Floats, rank: Ints, stride_s: Floats, rung: Ints) -> None:
        """Count windows that ended at their cameras."""
        at = self.bin(end_s)
        cell = at * RANKS + rank
        _add(self.due, cell, 1)
        _add(self.due_s, cell, stride_s)
        _add(self.rung_s, at * self.rung_s.shape[1] + rung, stride_s)

    def gate(self, end_s: Floats, rank: Ints, value_s: Floats) -> None:
        """Count gated windows, for which the last answer stands."""
        cell = self.bin(end_s) * RANKS + rank
        _add(self.gated, cell, 1)
        _add(self.value_s, cell, value_s)

    def answer(
        self, end_s: Floats, rank: Ints, lag_s: Floats, stride_s: Floats, value_s: Floats, useful_s: Floats
    ) -> None:
        """Count computed windows. ``lag_s``: from last frame to answer; ``useful_s``: replica time in full steps."""
        cell = self.bin(end_s) * RANKS + rank
        on_time = lag_s <= stride_s
        _add(self.answered, cell, 1)
        _add(self.on_time, cell[on_time], 1)
        _add(self.value_s, cell, value_s)
        _add(self.lags, cell * LAG_BINS + lag_bin(lag_s), 1)
        # Throughput counts at completion, like the replica time that it is compared with.
        done = self.bin(end_s + lag_s)
        _add(self.done, done * RANKS + rank, 1)
        _add(self.useful_s, done[on_time], useful_s[on_time])

    def drop(self, end_s: Floats, rank: Ints, reason: str) -> None:
        _add(self.dropped, (self.bin(end_s) * RANKS + rank) * len(REASONS) + PLACES[reason], 1)

    def add(self, other: Tally) -> None:
        """Add another district's counts."""
        for name, mine in vars(self).items():
            if isinstance(mine, np.ndarray):
                mine += getattr(other, name)


def _add(table: Ints | Floats, cell: Ints, amount: int | Floats) -> None:
    """Add to cells of a table by flat index, accumulating over duplicates. ``np.add.at`` is many times faster over one
    dimension than over several."""
    np.add.at(table.reshape(-1), cell, amount)


def lag_bin(lag_s: Floats) -> Ints:
    """Histogram bin of each lag."""
    place = np.floor(PER_DECADE * np.log10(np.maximum(lag_s, 1e-12) / LEAST_S)) + 1
    found: Ints = np.clip(place, 0, LAG_BINS - 1).astype(np.int64)
    return found


def lag_quantile(histogram: Ints, share: float) -> float:
    """Quantile of the lag in seconds, accurate to half a bin; 0 without windows."""
    total = int(histogram.sum())
    if total == 0:
        return 0.0
    wanted = share * total
    upto = np.cumsum(histogram)
    place = int(np.searchsorted(upto, wanted))
    before = float(upto[place] - histogram[place])
    within = (wanted - before) / float(histogram[place])
    # The lowest bin starts at 0; the others have equal width in log space.
    return within * LEAST_S if place == 0 else float(LEAST_S * 10 ** ((place - 1 + within) / PER_DECADE))


def by_reason(dropped: Ints) -> dict[str, int]:
    """Sum ``[..., reasons]`` over the leading axes; nonzero counts by reason."""
    sums: Sequence[int] = dropped.reshape(-1, len(REASONS)).sum(axis=0).tolist()
    return {reason: count for reason, count in zip(REASONS, sums, strict=True) if count}
