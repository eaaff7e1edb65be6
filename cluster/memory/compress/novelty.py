"""Novelty: what a cell seldom shows, spread over time (ours)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_slots, rank_in_frame, top_tokens
from cluster.memory.compress.cords import cell_groups
from cluster.memory.head_memory import LayerKV

STRETCHES = (4, 32)
"""Frames that share the budget evenly."""

_SHALLOW = 4
"""The first of so many parts of the layers decides for all (CoRDS takes the same quarter)."""
_SCORED = 2.0
"""A token's weight, less its novelty; those not scored yet weigh 1."""


class Novelty(Compressor):
    """Ranks tokens by novelty, divided by their rank among those of the same stretch of time.

    A fixed camera sees the same background for hours and an object for seconds. A token is as new as its key is unlike
    those of its cell: one minus the cosine that ``familiar`` of the cell's other tokens reach, in the mean of the 3 x 3
    cells around it in its frame, of which those without a token count 0. So a change of one cell counts less than an
    object, and an object's middle more than its edge. Tokens are scored once, when they first compete and the
    background is still there to compare with; the score is kept as their weight.

    Alone it would fill the memory with the many tokens of whoever stayed longest; so of 4 frames the best token counts
    whole, the second half, the third a third, and likewise of 32. Frames in which nothing changed have no tokens and
    take no room. Keys of the shallow layers show what a cell looks like, those of deep ones what the model makes of the
    scene; so the first quarter of the layers, all heads together, decides for all. Where heads do not hold the same
    tokens, each layer's head decides for itself.

    Args:
        columns: cells of one row.
        familiar: share of a cell's other tokens that must be like a token for it not to be new.
    """

    def __init__(self, columns: int, *, familiar: float = 0.1) -> None:
        super().__init__(columns)
        if not 0 < familiar <= 1:
            raise ValueError(f"familiar is a share above 0 and at most 1, not {familiar:g}")
        self.familiar = familiar
        self._scores: list[Tensor] = []

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        if budget >= max(layer.tokens for layer in layers):
            self._scores = []
            return [all_tokens(layer) for layer in layers]
        if not _same_tokens(layers):
            self._scores = [
                torch.cat([self._scored(layer, h, [layer.key[h]]) for h in range(layer.heads)]) for layer in layers
            ]
            return [_chosen(*pair, budget) for pair in zip(layers, self._scores, strict=True)]
        shallow = layers[: -(-len(layers) // _SHALLOW)]
        scores = self._scored(layers[0], 0, [key for layer in shallow for key in layer.key])
        self._scores = [scores.expand(layer.heads, -1) for layer in layers]
        one = LayerKV(*(getattr(layers[0], name)[:1] for name in ("key", "value", "frame", "cell")))
        stays = _chosen(one, scores, budget)
        return [stays.expand(layer.heads, -1) for layer in layers]

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        if not self._scores:
            return super().weigh(layers, chosen)
        return [_SCORED + scores.gather(1, stays) for scores, stays in zip(self._scores, chosen, strict=True)]

    def _scored(self, layer: LayerKV, h: int, keys: Sequence[Tensor]) -> Tensor:
        """Novelty ``[1, n]`` of one head's tokens by their ``keys [n, D]``, of those that were scored before the
        same."""
        weight = layer.weights[h]
        fresh = weight < _SCORED
        scores = (weight - _SCORED).clamp(min=0)
        if bool(fresh.any()):
            found = novelty(keys, layer.cell[h], self.familiar, fresh)
            scores[fresh] = pooled(found[fresh], layer.frame[h, fresh], layer.cell[h, fresh], self.columns)
        return scores[None]


def _chosen(layer: LayerKV, scores: Tensor, budget: int) -> Tensor:
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


def novelty(keys: Sequence[Tensor], cell: Tensor, familiar: float, fresh: Tensor) -> Tensor:
    """Novelty ``[n]`` of tokens, 0 to 2: one minus the cosine that the share ``familiar`` of the other tokens of their
    ``cell [n]`` reach, at least one of them; 1 for a cell's only token.

    Args:
        keys: of each head ``[n, D]``; a cosine is the mean of those of all heads.
        cell: in time order.
        familiar: above 0, at most 1.
        fresh: the tokens to score ``[n]`` bool, of each cell the newest; 0 for the others.
    """
    unit = torch.cat([F.normalize(key.float(), dim=1) for key in keys], dim=1) / len(keys) ** 0.5
    scores = unit.new_zeros(len(unit))
    for at, there in cell_groups(cell[None]):
        wanted = fresh[at] & there
        rows = int(wanted.sum(dim=1).max())
        if not rows:
            continue
        points = unit[at]
        others = there[:, None] & ~torch.eye(at.shape[1], dtype=torch.bool, device=at.device)[-rows:]
        cosine = (points[:, -rows:] @ points.mT).masked_fill_(~others, -torch.inf)
        reach = (others.sum(dim=2) * familiar).ceil().long().clamp(min=1)
        best = cosine.topk(min(int(reach.max()), at.shape[1]), dim=2).values.gather(2, reach[:, :, None] - 1)[:, :, 0]
        mine = wanted[:, -rows:]
        scores[at[:, -rows:][mine]] = torch.where(best.isfinite(), 1 - best, 1.0).clamp(min=0)[mine]
    return scores


def pooled(scores: Tensor, frame: Tensor, cell: Tensor, columns: int) -> Tensor:
    """Mean ``[n]`` of the ``scores [n]`` of the 3 x 3 cells around each token in its ``frame [n]``; 0 where there is no
    token. ``columns``: of the grid."""
    slot = frame_slots(frame[None])[0]
    rows = int(cell.max()) // columns + 1
    grid = scores.new_zeros(int(slot[-1]) + 1, rows, columns)
    place = (slot, cell // columns, cell % columns)
    grid[place] = scores
    return F.avg_pool2d(grid[:, None], 3, stride=1, padding=1)[:, 0][place]
