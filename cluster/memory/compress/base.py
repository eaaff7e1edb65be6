"""What a compressor is: it names the tokens that stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.memory.layer import LayerKV
from cluster.registry import Registry


class Compressor(ABC):
    """Chooses what a memory keeps. ``columns``: cells of one row of the grid, for those that look at neighbours."""

    def __init__(self, columns: int) -> None:
        if columns < 1:
            raise ValueError(f"a grid has at least one column, not {columns}")
        self.columns = columns

    @abstractmethod
    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        """Tokens that stay, per layer ``[H, m]`` int64 with ``m <= budget``, ascending in each head.

        ``layers`` are in the model's order. A budget of all tokens or more keeps all.
        """


compressors: Registry[type[Compressor]] = Registry("compressor")


def every(layer: LayerKV) -> Tensor:
    """All tokens of a layer, as a choice."""
    return torch.arange(layer.tokens, device=layer.key.device).expand(layer.heads, -1)


def best(scores: Tensor, count: int) -> Tensor:
    """The ``count`` tokens of the highest ``scores [H, n]`` in each head, ascending; the earlier of two equals."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    return order[:, : max(0, count)].sort(dim=1).values
