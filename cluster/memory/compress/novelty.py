"""Novelty: keeps what differs from a cell's background, spread over time (ours)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_slots, rank_in_frame, top_tokens
from cluster.memory.head_memory import LayerKV

STRETCHES = (4, 32)
"""Lengths, in frames, of the stretches of time over which the budget is spread."""

_SHALLOW = 4
"""The first 1/4 of the layers decides for all (as in CoRDS)."""
_SCORED = 2.0
"""Offset of a scored token's weight from its novelty; unscored tokens have weight 1."""


class Novelty(Compressor):
    """Ranks tokens by novelty, divided by their rank within the same stretch of time.

    A fixed camera sees the same background for hours and an object for seconds. A token's novelty is one minus the
    cosine of its key and its cell's background, a moving average of the directions of all keys seen there. It is then
    averaged over the 3 x 3 cells around the token in its frame, where cells without a token count 0: a change of a
    single cell scores lower than an object, and an object's edge lower than its middle. Tokens are scored once, when
    they first compete; the score is kept as their weight. The background, one vector per cell, is compressor state,
    stored in half precision across restarts.

    Novelty alone would fill the memory with whoever stayed longest. So within each 4 frames the best token's score
    counts in full, the second's half, the third's a third, and again within each 32. Frames without change have no
    tokens and take no room. Shallow keys reflect a cell's appearance, deep ones the model's interpretation of the
    scene, so the first quarter of the layers decides for all, its heads together. If heads hold different tokens, each
    head of each layer decides for itself.

    Args:
        columns: cells per row of the grid.
        rate: of the moving average, per token.
    """

    def __init__(self, columns: int, *, rate: float = 0.05) -> None:
        super().__init__(columns)
        if not 0 < rate <= 1:
            raise ValueError(f"the rate of novelty's background must be above 0 and at most 1, not {rate:g}")
        self.rate = rate
        self._scores: list[Tensor] = []
        # For all layers and heads together (""), or per head that decides for itself ("layer.head").
        self._backgrounds: dict[str, Tensor] = {}

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        if budget >= max(layer.tokens for layer in layers):
            self._scores = []
            return [all_tokens(layer) for layer in layers]
        if not _same_tokens(layers):
            self._scores = [
                torch.cat([self._scored(layer, h, [layer.key[h]], f"{number}.{h}") for h in range(layer.heads)])
                for number, layer in enumerate(layers)
            ]
            return [_chosen(*pair, budget) for pair in zip(layers, self._scores, strict=True)]
        shallow = layers[: -(-len(layers) // _SHALLOW)]
        scores = self._scored(layers[0], 0, [key for layer in shallow for key in layer.key], "")
        self._scores = [scores.expand(layer.heads, -1) for layer in layers]
        one = LayerKV(*(getattr(layers[0], name)[:1] for name in ("key", "value", "frame", "cell")))
        stays = _chosen(one, scores, budget)
        return [stays.expand(layer.heads, -1) for layer in layers]

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        if not self._scores:
            return super().weigh(layers, chosen)
        return [_SCORED + scores.gather(1, stays) for scores, stays in zip(self._scores, chosen, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return {whose: background.half() for whose, background in self._backgrounds.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._backgrounds = {whose: background.float() for whose, background in state.items()}

    def _scored(self, layer: LayerKV, h: int, keys: Sequence[Tensor], whose: str) -> Tensor:
        """Novelty ``[1, n]`` of one head's tokens by their ``keys [n, D]``, reusing earlier scores; ``whose``: name of
        the background."""
        weight = layer.weights[h]
        scores, fresh = (weight - _SCORED).clamp(min=0), (weight < _SCORED).nonzero()[:, 0]
        if len(fresh):
            unit = torch.cat([F.normalize(key[fresh].float(), dim=1) for key in keys], dim=1) / len(keys) ** 0.5
            frame, cell = layer.frame[h, fresh], layer.cell[h, fresh]
            # A restored background is on the host.
            background = grown(self._backgrounds.get(whose, unit[:0]).to(unit.device), int(cell.max()) + 1)
            self._backgrounds[whose] = background
            scores[fresh] = pooled(novelty(unit, frame, cell, background, self.rate), frame, cell, self.columns)
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


def grown(background: Tensor, cells: int) -> Tensor:
    """Pad ``background [c, D]`` with zeros to at least ``cells`` cells."""
    return F.pad(background, (0, 0, 0, max(0, cells - len(background))))


def novelty(unit: Tensor, frame: Tensor, cell: Tensor, background: Tensor, rate: float) -> Tensor:
    """Novelty ``[n]``, 0 to 2, of tokens in time order: one minus the cosine of their directions ``unit [n, D]`` and
    the ``background [c, D]`` of their ``cell [n]`` before their ``frame [n]``; 0 for the first token of a cell. Each
    token moves the background towards itself by ``rate``, in place."""
    scores = unit.new_zeros(len(unit))
    _, sizes = torch.unique_consecutive(frame, return_counts=True)
    for rows in torch.split(torch.arange(len(unit), device=unit.device), sizes.tolist()):
        here, there = unit[rows], background[cell[rows]]
        known = there.square().sum(dim=1) > 0
        scores[rows] = torch.where(known, 1 - F.cosine_similarity(here, there, dim=1), 0.0).clamp(min=0)
        background[cell[rows]] = torch.where(known[:, None], torch.lerp(there, here, rate), here)
    return scores


def pooled(scores: Tensor, frame: Tensor, cell: Tensor, columns: int) -> Tensor:
    """Mean ``[n]`` of ``scores [n]`` over the 3 x 3 cells around each token in its ``frame [n]``; cells without a token
    count 0. ``columns``: of the grid."""
    slot = frame_slots(frame[None])[0]
    rows = int(cell.max()) // columns + 1
    grid = scores.new_zeros(int(slot[-1]) + 1, rows, columns)
    place = (slot, cell // columns, cell % columns)
    grid[place] = scores
    return F.avg_pool2d(grid[:, None], 3, stride=1, padding=1)[:, 0][place]
