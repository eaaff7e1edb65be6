"""Content-free baselines: keep all, sliding window, uniform frame sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.memory.compress import Compressor, all_tokens, top_tokens
from cluster.memory.head_memory import LayerKV


class Full(Compressor):
    """Keeps everything, ignoring the budget: the reference."""

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        del budget
        return [all_tokens(layer) for layer in layers]


class Sliding(Compressor):
    """Keeps the newest tokens."""

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        return [all_tokens(layer)[:, max(0, layer.tokens - budget) :] for layer in layers]


class Uniform(Compressor):
    """Keeps whole frames at even distances in time, the newest among them, and of one more frame what still fits."""

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        return [all_tokens(layer) if budget >= layer.tokens else self._spread(layer, budget) for layer in layers]

    def _spread(self, layer: LayerKV, budget: int) -> Tensor:
        return torch.stack([self._of_head(frame, budget) for frame in layer.frame])

    def _of_head(self, frame: Tensor, budget: int) -> Tensor:
        numbers, index = torch.unique_consecutive(frame, return_inverse=True)
        rank = torch.empty(len(numbers), dtype=torch.int64, device=frame.device)
        rank[_halving(len(numbers)).to(frame.device)] = torch.arange(len(numbers), device=frame.device)
        return top_tokens(-rank[index].float()[None], budget)[0]


def _halving(count: int) -> Tensor:
    """``0 .. count - 1`` in an order whose every prefix is evenly spread: last, first, then ever finer halves."""
    order = [count - 1]
    gaps = [(0, count - 1)]
    if count > 1:
        order.append(0)
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return torch.tensor(order)
