"""What the compressors share that keep what is attended to: who asks, and how much each token gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cluster.memory.compress.base import Compressor, best, every, sizes
from cluster.memory.layer import LayerKV


class AttentionCompressor(Compressor):
    """Ranks the tokens of a head by the attention that the rows which asked last pay to them.

    Until rows were observed, the keys of the newest tokens (``stand_in``, 32: SnapKV's observation window) ask.

    Deviation from all papers ranked this way: a memory holds keys before rotary and does not know at which positions
    they will be read, so attention is by content alone; and where keys stand in for queries, they see later tokens too.

    Args:
        columns: cells of one row; unused.
        stand_in: newest tokens whose keys ask where no rows were observed.
    """

    wants_queries: ClassVar[bool] = True

    def __init__(self, columns: int, *, stand_in: int = 32) -> None:
        super().__init__(columns)
        if stand_in < 1:
            raise ValueError(f"at least one token asks, not {stand_in}")
        self.stand_in = stand_in
        self._queries: list[Tensor] = []

    def observe(self, queries: Sequence[Tensor]) -> None:
        self._queries = list(queries)

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        """See :class:`Compressor`.

        Raises:
            ValueError: rows were observed of another number of layers, or of heads of another shape.
        """
        if self._queries and len(self._queries) != len(layers):
            raise ValueError(f"rows of {len(self._queries)} layers were observed, the memory has {len(layers)}")
        return [
            every(layer)
            if budget >= layer.tokens
            else best(self.scores(layer, self._attention(index, layer), budget), budget)
            for index, layer in enumerate(layers)
        ]

    @abstractmethod
    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        """Scores ``[H, n]`` of which the ``budget`` highest stay; ``attention [H, n]``: mean of all rows, sum 1."""

    def _attention(self, index: int, layer: LayerKV) -> Tensor:
        asked = self._queries[index] if self._queries and self._queries[index].shape[1] else None
        return attention(layer.key, layer.key[:, -self.stand_in :] if asked is None else asked)


def attention(key: Tensor, queries: Tensor) -> Tensor:
    """Mean attention ``[H, n]`` of the rows ``queries [H, r, D]`` to the tokens ``key [H, n, D]``.

    Raises:
        ValueError: rows of another number of heads or another width than the keys have.
    """
    heads, _, width = key.shape
    if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (heads, width):
        raise ValueError(f"rows {tuple(queries.shape)} do not ask {heads} key heads of width {width}")
    scores: Tensor = queries.to(key.device).float() @ key.float().transpose(1, 2) * width**-0.5
    return scores.softmax(dim=2).mean(dim=1)


def rank_in_frame(scores: Tensor, slot: Tensor) -> Tensor:
    """Place ``[H, n]`` of each token among those of its frame ``slot [H, n]``: 0 has the highest of ``scores [H, n]``,
    the earlier of two equals."""
    falling = scores.argsort(dim=1, descending=True, stable=True)
    order = falling.gather(1, slot.gather(1, falling).argsort(dim=1, stable=True))
    count = sizes(slot)
    first = (count.cumsum(dim=1) - count).gather(1, slot)
    place = torch.arange(slot.shape[1], device=slot.device) - first
    return torch.empty_like(slot).scatter_(1, order, place)
