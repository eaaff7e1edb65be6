"""The computed windows of a district as columns: one row each, from the end at its camera to its answer or its drop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.city.tally import PLACES, REASONS, Tally

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ANSWERED = -1
OPEN = -2

COLUMNS = ("camera", "rank", "end_s", "stride_s", "strides", "value_s", "work_s", "useful_s")


class Rows:
    """Rows have numbers that grow from 0; those at the front that are settled are tallied and forgotten.

    Columns: ``camera``; ``rank`` of its priority; ``end_s``, when its last frame arrived; the stride it stands for;
    ``strides`` it takes in; ``value_s`` of an answer; ``work_s`` it takes of a replica, without its part of the
    step; ``useful_s`` with what that part is in a full step.
    """

    def __init__(self) -> None:
        self.base = 0
        self._size = 0
        self._columns = {name: np.zeros(1024) for name in COLUMNS}
        self._finish = np.zeros(1024)
        self._outcome = np.full(1024, OPEN, dtype=np.int64)

    def __len__(self) -> int:
        """Rows that are held: all that are open, and settled ones that came after an open one."""
        return self._size

    @property
    def open(self) -> int:
        """Windows that wait or are being computed."""
        return int((self._outcome[: self._size] == OPEN).sum())

    def append(self, **columns: Floats | Ints) -> int:
        """New rows in the order of the arrays; returns the number of the first."""
        count = len(columns["end_s"])
        while self._size + count > len(self._finish):
            self._grow()
        place = slice(self._size, self._size + count)
        for name, values in self._columns.items():
            values[place] = columns[name]
        self._outcome[place] = OPEN
        self._size += count
        return self.base + self._size - count

    def answered(self, rows: Sequence[int], finish_s: Sequence[float]) -> tuple[Ints, Floats]:
        """These were answered then; returns their cameras and work."""
        place = np.array(rows, dtype=np.int64) - self.base
        self._settle(place, ANSWERED)
        self._finish[place] = finish_s
        return self._columns["camera"][place].astype(np.int64), self._columns["work_s"][place]

    def dropped(self, rows: Sequence[int], reason: str) -> tuple[Ints, Floats, Floats]:
        """These are given up; returns their cameras, ends and strides taken in."""
        place = np.array(rows, dtype=np.int64) - self.base
        self._settle(place, PLACES[reason])
        columns = self._columns
        return columns["camera"][place].astype(np.int64), columns["end_s"][place], columns["strides"][place]

    def flush(self, tally: Tally) -> None:
        """Tally the settled rows at the front, and forget them."""
        waiting = np.flatnonzero(self._outcome[: self._size] == OPEN)
        count = int(waiting[0]) if len(waiting) else self._size
        self._tally(np.arange(count), tally)
        left = slice(count, self._size)
        for values in (*self._columns.values(), self._finish, self._outcome):
            values[: self._size - count] = values[left].copy()
        self._size -= count
        self.base += count

    def close(self, tally: Tally) -> None:
        """Tally all that is settled; only open rows are left, under numbers that nobody may use any more."""
        self.flush(tally)
        done = self._outcome[: self._size] != OPEN
        self._tally(np.flatnonzero(done), tally)
        self._size = int((~done).sum())
        self._outcome[: self._size] = OPEN

    def _tally(self, rows: Ints, tally: Tally) -> None:
        if not len(rows):
            return
        held = {name: values[rows] for name, values in self._columns.items()}
        rank, done = held["rank"].astype(np.int64), self._outcome[rows]
        for place, reason in enumerate(REASONS):
            if (gone := done == place).any():
                tally.drop(held["end_s"][gone], rank[gone], reason)
        ok = done == ANSWERED
        tally.answer(
            held["end_s"][ok],
            rank[ok],
            self._finish[rows][ok] - held["end_s"][ok],
            held["stride_s"][ok],
            held["value_s"][ok],
            held["useful_s"][ok],
        )

    def _settle(self, place: Ints, outcome: int) -> None:
        if (place < 0).any() or (self._outcome[place] != OPEN).any():
            raise RuntimeError("a window was settled twice")
        self._outcome[place] = outcome

    def _grow(self) -> None:
        self._columns = {
            name: np.concatenate((values, np.zeros(len(values)))) for name, values in self._columns.items()
        }
        self._finish = np.concatenate((self._finish, np.zeros(len(self._finish))))
        self._outcome = np.concatenate((self._outcome, np.full(len(self._outcome), OPEN, dtype=np.int64)))
