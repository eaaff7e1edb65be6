"""Examples shown more than once, some time apart: where making one takes longer than learning from it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cluster.lab.training.examples import Example

# Examples that are kept: some hundred kilobytes each.
_KEPT = 4096
# As long as there are fewer, none is shown again: they would be learnt by heart.
_FIRST = 64


class Source(Protocol):
    """Where new examples come from."""

    def next(self) -> Example: ...


class Replay:
    """``next()`` gives a new example of ``source``, then ``again`` earlier ones drawn at random, and so on.

    What it gives depends on the numbers of the examples and on ``seed`` alone.
    """

    def __init__(self, source: Source, *, again: int, seed: int = 0) -> None:
        self._source = source
        self._again = again
        self._rng = np.random.default_rng([seed, 17])
        self._kept: list[Example] = []
        self._turn = 0

    def next(self) -> Example:
        """The next example, new or not."""
        turn = self._turn
        self._turn += 1
        if turn % (self._again + 1) and len(self._kept) >= _FIRST:
            return self._kept[int(self._rng.integers(len(self._kept)))]
        example = self._source.next()
        if self._again:
            if len(self._kept) < _KEPT:
                self._kept.append(example)
            else:
                self._kept[int(self._rng.integers(_KEPT))] = example
        return example
