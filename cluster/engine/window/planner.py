"""Layout of a window's tokens, and the runs of tokens to compute. Pure functions over integers and numpy arrays.

A window occupies *slots* ``0, 1, …``: the system prompt, the visual tokens of its frames in time order, then one
stretch per question. Slots are local to the window; :mod:`kv` maps them to memory. The tokens to compute form *runs* of
consecutive slots, and attention is exact causal attention over the slots, whatever was reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``[row, row + count)`` of a pass and the slots they attend to.

    Every row sees the slots ``[0, prefix)``. The last row sees all of ``[tail, stop)``, each row before it one slot
    less (bottom-right aligned causal mask), with ``count <= stop - tail`` and ``prefix <= tail``.
    """

    row: int
    count: int
    prefix: int
    tail: int
    stop: int

    @property
    def attended(self) -> int:
        """Row-slot pairs."""
        return self.count * (self.prefix + self.stop - self.tail) - self.count * (self.count - 1) // 2

    def moved(self, rows: int) -> Run:
        """The same run with its rows shifted by ``rows``."""
        return Run(self.row + rows, self.count, self.prefix, self.tail, self.stop)


@dataclass(frozen=True, slots=True)
class Tail:
    """Slots of one question: ``[start, start + tokens)``, followed by ``reserved`` ones for its explanation."""

    start: int
    tokens: int
    reserved: int

    @property
    def stop(self) -> int:
        return self.start + self.tokens + self.reserved


def causal_runs(slots: IntArray) -> list[Run]:
    """Runs of consecutive slots ``[s, e)`` among ascending ``slots [n]``, each attending causally to ``[0, e)``."""
    if not len(slots):
        return []
    borders = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate(([0], borders))
    stops = np.concatenate((borders, [len(slots)]))
    return [
        Run(int(a), int(b - a), prefix=int(slots[a]), tail=int(slots[a]), stop=int(slots[b - 1]) + 1)
        for a, b in zip(starts, stops, strict=True)
    ]


def question_tails(first: int, tokens: Sequence[int], reserved: Sequence[int]) -> list[Tail]:
    """Tails of questions with these lengths, placed back to back from slot ``first``."""
    tails: list[Tail] = []
    for count, more in zip(tokens, reserved, strict=True):
        tails.append(Tail(first, count, more))
        first += count + more
    return tails


def question_runs(window: int, tails: Sequence[Tail]) -> list[Run]:
    """One run per question, attending to the window's slots ``[0, window)`` and itself, never to another question."""
    runs: list[Run] = []
    row = 0
    for tail in tails:
        runs.append(Run(row, tail.tokens, prefix=window, tail=tail.start, stop=tail.start + tail.tokens))
        row += tail.tokens
    return runs


def spread_evenly(count: int, size: int) -> IntArray:
    """``size`` evenly spaced indices out of ``count``, ascending."""
    return ((np.arange(size, dtype=np.int64) * 2 + 1) * count) // (2 * size) if size else np.zeros(0, np.int64)
