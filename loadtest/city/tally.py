"""What happened to every window of a simulated city, by time and priority, and lags as histograms.

A window counts in the stretch of time in which it ended at its camera, wherever it was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from cluster.replica.window_queue import DropReason
from cluster.types.cameras import Priority
from loadtest.city import Floats, Ints

COLUMNS = ("camera", "rank", "end_s", "stride_s", "strides", "value_s", "useful_s")


class Rows:
    """Windows that wait or are being computed, as rows whose numbers grow from 0; what becomes of them is tallied.

    Columns: ``camera``; ``rank`` of its priority; ``end_s``, when its last frame arrived; the stride it stands for;
    ``strides`` it takes in; ``value_s`` of an answer; ``useful_s`` it takes of a replica, with its part of
    a full step.
    """

    def __init__(self, tally: Tally) -> None:
        self.base = 0
        self._tally = tally
        self._size = 0
        self._columns = {name: np.zeros(1024) for name in COLUMNS}
        self._open = np.zeros(1024, dtype=bool)

    def __len__(self) -> int:
        """Rows that are held: all that are open, and settled ones that came after an open one."""
        return self._size

    @property
    def open(self) -> int:
        """Windows that wait or are being computed."""
        return int(self._open[: self._size].sum())

    def append(self, **columns: Floats | Ints) -> int:
        """New rows in the order of the arrays; returns the number of the first."""
        count = len(columns["end_s"])
        while self._size + count > len(self._open):
            self._columns = {name: np.resize(values, 2 * len(values)) for name, values in self._columns.items()}
            self._open = np.resize(self._open, 2 * len(self._open))
        place = slice(self._size, self._size + count)
        for name, values in self._columns.items():
            values[place] = columns[name]
        self._open[place] = True
        self._size += count
        return self.base + self._size - count

    def answered(self, rows: Sequence[int], finish_s: Sequence[float]) -> Ints:
        """These were answered then; returns their cameras."""
        row = self._settle(rows)
        lag_s = np.array(finish_s) - row["end_s"]
        self._tally.answer(
            row["end_s"], row["rank"].astype(np.int64), lag_s, row["stride_s"], row["value_s"], row["useful_s"]
        )
        cameras: Ints = row["camera"].astype(np.int64)
        return cameras

    def dropped(self, rows: Sequence[int], reason: str) -> tuple[Ints, Floats, Floats]:
        """These are given up; returns their cameras, ends and strides taken in."""
        row = self._settle(rows)
        self._tally.drop(row["end_s"], row["rank"].astype(np.int64), reason)
        return row["camera"].astype(np.int64), row["end_s"], row["strides"]

    def forget_settled(self) -> None:
        """Forget the settled rows at the front."""
        waiting = np.flatnonzero(self._open[: self._size])
        count = int(waiting[0]) if len(waiting) else self._size
        left = slice(count, self._size)
        for values in (*self._columns.values(), self._open):
            values[: self._size - count] = values[left].copy()
        self._size -= count
        self.base += count

    def _settle(self, rows: Sequence[int]) -> dict[str, Floats]:
        """The columns of these rows, which are not open any more."""
        place = np.array(rows, dtype=np.int64) - self.base
        if (place < 0).any() or not self._open[place].all():
            raise RuntimeError("a window was settled twice")
        self._open[place] = False
        return {name: values[place] for name, values in self._columns.items()}


LEAST_S, PER_DECADE = 1e-4, 200
LAG_BINS = 9 * PER_DECADE + 2
"""Logarithmic bins 1.2 % wide from 0.1 ms to a day, one below and one above."""


class Lost(StrEnum):
    """Why a window was not answered, beyond the queue's own reasons."""

    SHED = "shed"
    REFUSED = "refused"
    NO_REPLICA = "no_replica"
    REPLICA_LOST = "replica_lost"


REASONS: tuple[str, ...] = (*DropReason, *Lost)
PLACES = {reason: place for place, reason in enumerate(REASONS)}
RANKS = len(Priority)


class Tally:
    """Counts over ``bins`` stretches of ``bin_s`` seconds, by priority rank.

    ``due`` counts windows and ``due_s`` the seconds of video they stand for; likewise for the others. ``value_s`` is
    the seconds of video that were answered, times what an answer is worth at the camera's rung (``Rung.value``).
    ``done`` counts computed windows when they were answered; ``busy_s``, ``useful_s`` and ``capacity_s`` are seconds of
    replicas.
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
        """Which stretch each time is in; what is later than the last counts there."""
        return np.minimum(at_s / self.bin_s, self.bins - 1).astype(np.int64)

    def close(self, end_s: Floats, rank: Ints, stride_s: Floats, rung: Ints) -> None:
        """These windows ended at their cameras."""
        at = self.bin(end_s)
        cell = at * RANKS + rank
        _add(self.due, cell, 1)
        _add(self.due_s, cell, stride_s)
        _add(self.rung_s, at * self.rung_s.shape[1] + rung, stride_s)

    def gate(self, end_s: Floats, rank: Ints, value_s: Floats) -> None:
        """For these the last answer stands."""
        cell = self.bin(end_s) * RANKS + rank
        _add(self.gated, cell, 1)
        _add(self.value_s, cell, value_s)

    def answer(
        self, end_s: Floats, rank: Ints, lag_s: Floats, stride_s: Floats, value_s: Floats, useful_s: Floats
    ) -> None:
        """These were computed, ``lag_s`` after their last frame arrived; ``useful_s``: of a replica, in full steps."""
        cell = self.bin(end_s) * RANKS + rank
        on_time = lag_s <= stride_s
        _add(self.answered, cell, 1)
        _add(self.on_time, cell[on_time], 1)
        _add(self.value_s, cell, value_s)
        _add(self.lags, cell * LAG_BINS + lag_bin(lag_s), 1)
        # Throughput counts when it is done, which is what a replica's time is held against.
        done = self.bin(end_s + lag_s)
        _add(self.done, done * RANKS + rank, 1)
        _add(self.useful_s, done[on_time], useful_s[on_time])

    def drop(self, end_s: Floats, rank: Ints, reason: str) -> None:
        _add(self.dropped, (self.bin(end_s) * RANKS + rank) * len(REASONS) + PLACES[reason], 1)

    def add(self, other: Tally) -> None:
        """Take in another district's counts."""
        for name, mine in vars(self).items():
            if isinstance(mine, np.ndarray):
                mine += getattr(other, name)


def _add(table: Ints | Floats, cell: Ints, amount: int | Floats) -> None:
    """Add to cells of a table, numbered through row by row; one after the other, wherever a cell comes again. Over one
    dimension ``np.add.at`` is many times faster than over several."""
    np.add.at(table.reshape(-1), cell, amount)


def lag_bin(lag_s: Floats) -> Ints:
    """Which bin of the histogram each lag falls into."""
    place = np.floor(PER_DECADE * np.log10(np.maximum(lag_s, 1e-12) / LEAST_S)) + 1
    found: Ints = np.clip(place, 0, LAG_BINS - 1).astype(np.int64)
    return found


def lag_quantile(histogram: Ints, share: float) -> float:
    """The lag in seconds that a share of the windows does not exceed, to half a bin's width; 0 without windows."""
    total = int(histogram.sum())
    if total == 0:
        return 0.0
    wanted = share * total
    upto = np.cumsum(histogram)
    place = int(np.searchsorted(upto, wanted))
    before = float(upto[place] - histogram[place])
    within = (wanted - before) / float(histogram[place])
    # The lowest bin reaches from 0, the others are equally wide in the logarithm.
    return within * LEAST_S if place == 0 else float(LEAST_S * 10 ** ((place - 1 + within) / PER_DECADE))


def by_reason(dropped: Ints) -> dict[str, int]:
    """Counts of ``[..., reasons]`` by name, those that happened."""
    sums: Sequence[int] = dropped.reshape(-1, len(REASONS)).sum(axis=0).tolist()
    return {reason: count for reason, count in zip(REASONS, sums, strict=True) if count}
