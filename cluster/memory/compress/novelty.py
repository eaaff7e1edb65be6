"""Novelty: what the newest tokens of a cell do not show, spread over time (ours)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_slots, rank_in_frame, top_tokens
from cluster.memory.head_memory import LayerKV

STRETCHES = (4, 32)
"""Frames that share the budget evenly."""

_SHALLOW = 4
"""The first of so many parts of the layers decides for all (CoRDS takes the same quarter)."""


class Novelty(Compressor):
    """Ranks tokens by novelty, divided by their rank among those of the same stretch of time.

    A fixed camera sees the same background for hours and an object for seconds. Novelty is one minus the largest
    cosine of a token's key with those of the ``recent`` newest other tokens of its cell: a background that is still
    there has none. Alone it would fill the memory with the many tokens of whoever stayed longest; so of 4 frames the
    best token counts whole, the second half, the third a third, and likewise of 32. Frames in which nothing changed
    have no tokens and take no room. Keys of the shallow layers show what a cell looks like, those of deep ones what
    the model makes of the scene; so the first quarter of the layers, all heads together, decides for all. Where heads
    do not hold the same tokens, each layer's head decides for itself.

    Args:
        columns: unused.
        recent: newest tokens of a cell that a token is compared with.
    """

    def __init__(self, columns: int, *, recent: int = 2) -> None:
        super().__init__(columns)
        if recent < 1:
            raise ValueError(f"tokens are compared with at least one of their cell, not {recent}")
        self.recent = recent

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        if not _same_tokens(layers):
            return [self._of_layer(layer, novelty(layer, self.recent), budget) for layer in layers]
        shallow = layers[: -(-len(layers) // _SHALLOW)]
        scores = torch.stack([novelty(layer, self.recent).mean(dim=0) for layer in shallow]).mean(dim=0)
        one = LayerKV(*(getattr(layers[0], name)[:1] for name in ("key", "value", "frame", "cell")))
        stays = self._of_layer(one, scores[None], budget)
        return [stays.expand(layer.heads, -1) for layer in layers]

    @staticmethod
    def _of_layer(layer: LayerKV, scores: Tensor, budget: int) -> Tensor:
        if budget >= layer.tokens:
            return all_tokens(layer)
        for frames in STRETCHES:
            scores = scores / (1 + rank_in_frame(scores, frame_slots(layer.frame // frames)))
        return top_tokens(scores, budget)


def _same_tokens(layers: Sequence[LayerKV]) -> bool:
    first = layers[0]
    return all(
        layer.tokens == first.tokens
        and bool((layer.frame == first.frame[:1]).all())
        and bool((layer.cell == first.cell[:1]).all())
        for layer in layers
    )


def novelty(layer: LayerKV, recent: int) -> Tensor:
    """Novelty ``[H, n]`` of a layer's keys: 0 to 2, and 2 for a cell's only token."""
    ordered, order = layer.cell.sort(dim=1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    here = torch.arange(layer.tokens, device=order.device)
    unit = F.normalize(layer.key.float(), dim=2).gather(1, order[:, :, None].expand_as(layer.key))
    nearest = torch.full_like(unit[:, :, 0], -1.0)
    for back in range(recent):
        other = last - back
        cosine = (unit * unit.gather(1, other.clamp(min=0)[:, :, None].expand_as(unit))).sum(dim=2)
        nearest = torch.where((other >= first) & (other != here), nearest.maximum(cosine), nearest)
    return torch.empty_like(nearest).scatter_(1, order, 1 - nearest)
