"""CoRDS (papers: eq. 4, 6-10): the frames that cover all frames, in keys and in values, and point in new directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress.base import Compressor, best, compressors, every
from cluster.memory.layer import LayerKV


@compressors.register("cords")
class CoRDS(Compressor):
    """Greedy farthest-first choice of frames, with a bonus for what the chosen ones do not span.

    A frame is the centroid of its keys and that of its values, in each head. Chosen frames keep their tokens; of the
    last one chosen, as many as the budget allows. The choice is made at anchor layers of the lowest quarter; every
    other layer takes that of the nearest anchor below.

    Args:
        columns: cells of one row; unused.
        key_weight: of keys against values in the distance (lambda).
        bonus: weight of novelty (gamma); ``bonus_key_weight``: of keys in it (beta).
        recent: share of the budget for the newest tokens.
        active: share of the layers, from the lowest, among which every second one is an anchor.
    """

    def __init__(
        self,
        columns: int,
        *,
        key_weight: float = 0.25,
        bonus: float = 0.25,
        bonus_key_weight: float = 0.25,
        recent: float = 0.125,
        active: float = 0.25,
    ) -> None:
        super().__init__(columns)
        if not all(0 <= share <= 1 for share in (key_weight, bonus_key_weight, recent, active)) or bonus < 0:
            raise ValueError("weights and shares of CoRDS lie between 0 and 1, its bonus is not negative")
        self.key_weight, self.bonus, self.bonus_key_weight = key_weight, bonus, bonus_key_weight
        self.recent, self.active = recent, active

    def anchors(self, layers: int) -> list[int]:
        """Layers that choose for themselves: 0, 2, 4 of 28."""
        return list(range(0, max(1, int(self.active * layers) - 1), 2))

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        anchors = set(self.anchors(len(layers)))
        chosen: list[Tensor] = []
        for index, layer in enumerate(layers):
            # A follower holds the anchor's tokens: compressed together from the first frame on, they stay aligned.
            follows = index not in anchors and index > 0 and layers[index - 1].frame.shape == layer.frame.shape
            if budget >= layer.tokens:
                chosen.append(every(layer))
            elif follows:
                chosen.append(chosen[-1])
            else:
                chosen.append(torch.stack([self._of_head(layer, head, budget) for head in range(layer.heads)]))
        return chosen

    def _of_head(self, layer: LayerKV, head: int, budget: int) -> Tensor:
        numbers, index = torch.unique_consecutive(layer.frame[head], return_inverse=True)
        keys, values = (centroids(x[head].float(), index, len(numbers)) for x in (layer.key, layer.value))
        order = greedy_cover(
            keys, values, key_weight=self.key_weight, bonus=self.bonus, bonus_key_weight=self.bonus_key_weight
        )
        rank = torch.empty(len(numbers), dtype=torch.float32, device=keys.device)
        rank[order] = torch.arange(len(numbers), dtype=torch.float32, device=keys.device)
        scores = -rank[index]
        newest = int(self.recent * budget)
        if newest:
            scores[-newest:] = 1.0
        return best(scores[None], budget)[0]


def centroids(tokens: Tensor, index: Tensor, count: int) -> Tensor:
    """Means ``[count, D]`` of the tokens ``[n, D]`` of each frame; ``index [n]``: whose they are."""
    total = tokens.new_zeros(count, tokens.shape[1]).index_add_(0, index, tokens)
    return total / torch.bincount(index, minlength=count).clamp(min=1)[:, None]


def greedy_cover(
    keys: Tensor, values: Tensor, *, key_weight: float, bonus: float, bonus_key_weight: float, count: int | None = None
) -> Tensor:
    """The order ``[count]`` in which eq. 10 chooses frames ``keys, values [f, D]``; all of them unless ``count`` says.

    It begins with the newest frame. The novelty is the surrogate ``1 - max cos`` against the chosen ones. One distance
    and one cosine update per step: ``O(f * count * D)``.
    """
    frames = len(keys)
    count = frames if count is None else min(count, frames)
    unit_keys, unit_values = F.normalize(keys, dim=-1), F.normalize(values, dim=-1)
    distance = keys.new_full((frames,), float("inf"))
    alike_keys, alike_values = keys.new_full((frames,), -1.0), keys.new_full((frames,), -1.0)
    open_frames = torch.ones(frames, dtype=torch.bool, device=keys.device)
    order = [frames - 1]
    while len(order) < count:
        last = order[-1]
        open_frames[last] = False
        apart = key_weight * (keys - keys[last]).square().sum(-1)
        apart = apart + (1 - key_weight) * (values - values[last]).square().sum(-1)
        distance = torch.minimum(distance, apart)
        alike_keys = torch.maximum(alike_keys, unit_keys @ unit_keys[last])
        alike_values = torch.maximum(alike_values, unit_values @ unit_values[last])
        novelty = bonus_key_weight * (1 - alike_keys) + (1 - bonus_key_weight) * (1 - alike_values)
        score = _spread(distance, open_frames) + bonus * _spread(novelty, open_frames)
        order.append(int(score.masked_fill(~open_frames, float("-inf")).argmax()))
    return torch.tensor(order[:count], dtype=torch.int64, device=keys.device)


def _spread(values: Tensor, among: Tensor) -> Tensor:
    """Min-max over the open candidates: 0 to 1, all 0 where they are equal."""
    low, high = values[among].min(), values[among].max()
    return (values - low) / (high - low).clamp(min=1e-12)


def log_det_greedy(vectors: Tensor, count: int, epsilon: float = 1e-6) -> Tensor:
    """The order ``[count]`` in which exact log-det greedy (pivoted Cholesky of the Gram matrix, theorem 2) chooses
    among ``vectors [f, D]``: what the surrogate stands for, and the measure it is tested by."""
    left = vectors.double().clone()
    order: list[int] = []
    for _ in range(min(count, len(vectors))):
        residual = left.square().sum(-1)
        residual[order] = -1.0
        pivot = int(residual.argmax())
        order.append(pivot)
        direction = left[pivot] / (residual[pivot].sqrt() + epsilon)
        left = left - (left @ direction)[:, None] * direction
    return torch.tensor(order, dtype=torch.int64)
