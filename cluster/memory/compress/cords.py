"""CoRDS (papers: eq. 2, 4, 6-10): frames that cover what there was, in keys and values, and point in new directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_sizes, frame_slots, top_tokens
from cluster.memory.head_memory import LayerKV

_CELLS = 1 << 24
"""More than a grid has: a frame and a cell are then one number."""
_PART = 1024
"""Points whose distances to all are looked at together."""


class TokenWeights:
    """Weights of one layer's tokens, from one compression to the next.

    A token weighs one until others are left out for it, so that together those of a head weigh as much as all tokens
    that it ever held, less those that went another way (forgotten, lost). Tokens are known by frame and cell.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor] | None = None

    def of(self, layer: LayerKV) -> Tensor:
        """Weights ``[H, n]`` float32 of a layer's tokens; one for those that no compression chose before."""
        if self._known is None or len(self._known[0]) != layer.heads or not self._known[0].shape[1]:
            return torch.ones(layer.frame.shape, device=layer.key.device)
        names, weights = (each.to(layer.key.device) for each in self._known)
        asked = _names(layer.frame, layer.cell)
        place = torch.searchsorted(names, asked).clamp_(max=names.shape[1] - 1)
        return weights.gather(1, place).where(names.gather(1, place) == asked, 1.0)

    def keep(self, layer: LayerKV, chosen: Tensor, weights: Tensor) -> None:
        """From here on the tokens ``chosen [H, m]`` of a layer weigh ``weights [H, m]``."""
        names, order = _names(layer.frame, layer.cell).gather(1, chosen).sort(dim=1)
        self._known = names, weights.gather(1, order)


def handed_on(points: Tensor, weight: Tensor, stays: Tensor) -> Tensor:
    """Weights ``[H, u]`` once each point ``[H, u, D]`` gave its ``weight [H, u]`` to the nearest that ``stays [H, u]``.

    At least one stays in each head.
    """
    given = torch.zeros_like(weight)
    # Not all at once: distances of all to all can be larger than what is compressed.
    for part, whose in zip(torch.split(points, _PART, dim=1), torch.split(weight, _PART, dim=1), strict=True):
        nearest = torch.cdist(part, points).masked_fill_(~stays[:, None], torch.inf).argmin(dim=2)
        given.scatter_add_(1, nearest, whose)
    return given


def _names(frame: Tensor, cell: Tensor) -> Tensor:
    return frame * _CELLS + cell


class CoRDS(Compressor):
    """Greedy farthest-first choice of frames, with a bonus for what the chosen ones do not span.

    A frame is the centroid of its keys and that of its values, in each head. Chosen frames keep their tokens; of the
    last one chosen, as many as the budget allows, spread evenly over it (its first ones would be the top of the
    picture; the paper does not say). The choice is made at anchor layers of the lowest quarter; every other layer takes
    that of the nearest anchor below.

    Two readings of what the paper leaves open, for a memory that is compressed again and again and whose frames are
    pruned to few tokens or to none of them:

    * A coreset is weighted (eq. 2): what was chosen stands for what was left out near it and counts for as much when
      there is less room the next time, or else what was seen last would count most. D^2 selection multiplies a
      candidate's distance (eq. 4) by its weight; here by the root of it (``standing``), since what came once must not
      drown in what came a thousand times. Weights are not written to the tiers: after a restart all that is held
      counts alike.
    * Frames of more than a ``pieces``-th of the budget are candidates in pieces of neighbouring tokens (the paper
      chooses tokens, and frames where a budget holds hundreds of them).

    Args:
        columns: cells of one row; unused.
        key_weight: of keys against values in the distance (lambda).
        bonus: weight of novelty (gamma); ``bonus_key_weight``: of keys in it (beta).
        recent: share of the budget for the newest tokens.
        active: share of the layers, from the lowest, among which every second one is an anchor.
        pieces: as many as the budget holds at least, where frames are large; 1 leaves frames whole.
        standing: power of the weights: 1 is k-means, 0 is as published, where all that is held counts alike.
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
        pieces: int = 64,
        standing: float = 0.5,
    ) -> None:
        super().__init__(columns)
        if not all(0 <= share <= 1 for share in (key_weight, bonus_key_weight, recent, active, standing)) or bonus < 0:
            raise ValueError("weights and shares of CoRDS lie between 0 and 1, its bonus is not negative")
        if pieces < 1:
            raise ValueError(f"a budget holds one piece of a frame at least, not {pieces}")
        self.key_weight, self.bonus, self.bonus_key_weight = key_weight, bonus, bonus_key_weight
        self.recent, self.active, self.pieces, self.standing = recent, active, pieces, standing
        self._standing: dict[int, TokenWeights] = {}

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
                chosen.append(all_tokens(layer))
            elif follows:
                chosen.append(chosen[-1])
            else:
                chosen.append(self._select(index, layer, budget))
        return chosen

    def standing_of(self, number: int, layer: LayerKV) -> Tensor:
        """For how many tokens each of an anchor layer stands ``[H, n]``: itself, and those left out for it."""
        return self._standing.setdefault(number, TokenWeights()).of(layer)

    def _select(self, number: int, layer: LayerKV, budget: int) -> Tensor:
        slot = cut(frame_slots(layer.frame), max(1, budget // self.pieces))
        keys, values, tokens = (*(centroids(x, slot) for x in (layer.key, layer.value)), frame_sizes(slot))
        each = self.standing_of(number, layer)
        weight = each.new_zeros(tokens.shape).scatter_add_(1, slot, each)
        rank = greedy_cover(
            keys,
            values,
            tokens,
            budget,
            weight**self.standing,
            key_weight=self.key_weight,
            bonus=self.bonus,
            bonus_key_weight=self.bonus_key_weight,
        )
        scores = -rank.gather(1, slot).float()
        newest = int(self.recent * budget)
        if newest:
            scores[:, -newest:] = 1.0
        chosen = top_tokens(scores, budget, evenly=True)
        place = slot.gather(1, chosen)
        inside = torch.zeros_like(tokens).scatter_add_(1, place, torch.ones_like(place))
        weight = handed_on(self._joint(keys, values), weight, inside > 0)
        self._standing[number].keep(layer, chosen, (weight / inside.clamp(min=1)).gather(1, place))
        return chosen

    def _joint(self, keys: Tensor, values: Tensor) -> Tensor:
        """Points whose squared distances are those of eq. 4."""
        return torch.cat([keys * self.key_weight**0.5, values * (1 - self.key_weight) ** 0.5], dim=-1)


def cut(slot: Tensor, most: int) -> Tensor:
    """Pieces ``[H, n]``, numbered in order, of at most ``most`` neighbouring tokens of the frames ``slot [H, n]``."""
    count = frame_sizes(slot)
    inside = torch.arange(slot.shape[1], device=slot.device) - (count.cumsum(dim=1) - count).gather(1, slot)
    # Of a frame of t tokens ceil(t / most) pieces, as equal as can be.
    parts = (-(-count // most)).clamp_(min=1)
    before = (parts.cumsum(dim=1) - parts).gather(1, slot)
    return before + inside * parts.gather(1, slot) // count.gather(1, slot)


def centroids(tokens: Tensor, slot: Tensor) -> Tensor:
    """Means ``[H, f, D]`` of the tokens ``[H, n, D]`` of each frame; ``slot [H, n]``: whose they are."""
    count = frame_sizes(slot)
    heads, frames = count.shape
    place = slot + torch.arange(heads, device=slot.device)[:, None] * frames
    total = torch.zeros(heads * frames, tokens.shape[2], device=slot.device)
    total.index_add_(0, place.view(-1), tokens.flatten(0, 1).float())
    return total.view(heads, frames, -1) / count.clamp(min=1)[..., None]


def greedy_cover(
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    budget: int,
    weight: Tensor | None = None,
    /,
    *,
    key_weight: float,
    bonus: float,
    bonus_key_weight: float,
) -> Tensor:
    """Ranks ``[H, f]``, 0 the first, in which eq. 10 chooses among frames ``keys, values [H, f, D]``, in each head.

    It begins with the newest frame and ends when what was chosen has ``budget`` of the ``tokens [H, f]`` in every head;
    frames that were not chosen by then have the rank ``f``. The novelty is the surrogate ``1 - max cos`` against the
    chosen ones. ``weight [H, f]`` multiplies the distances of frames that count for more. One distance and one cosine
    update per step: ``O(f * steps * D)`` for each head, all heads at once.
    """
    heads, frames = tokens.shape
    row = torch.arange(heads, device=keys.device)
    joint = torch.cat([keys * key_weight**0.5, values * (1 - key_weight) ** 0.5], dim=-1)
    units = F.normalize(torch.stack([keys, values]), dim=-1)
    shares = keys.new_tensor([bonus_key_weight, 1 - bonus_key_weight])[:, None, None]
    # In each head: the distance of every frame to the chosen ones, and beside it the novelty.
    measures = keys.new_full((2, heads, frames), torch.inf)
    resembles = keys.new_full((2, heads, frames), -1.0)
    closed = tokens == 0
    last = (frames - 1) - closed.sum(dim=1)
    order = [last]
    while True:
        closed[row, last] = True
        if len(order) == frames or bool((tokens * closed).sum(dim=1).min() >= budget):
            break
        apart = (joint - joint[row, last][:, None]).square_().sum(dim=-1)
        torch.minimum(measures[0], apart if weight is None else apart.mul_(weight), out=measures[0])
        torch.maximum(resembles, (units @ units[:, row, last][..., None])[..., 0], out=resembles)
        torch.sub(1, (shares * resembles).sum(dim=0), out=measures[1])
        # Min-max over the open frames: 0 to 1, all 0 where they are equal.
        low = measures.masked_fill(closed, torch.inf).amin(dim=2, keepdim=True)
        high = measures.masked_fill(closed, -torch.inf).amax(dim=2, keepdim=True)
        spread = (measures - low) / (high - low).clamp_(min=1e-12)
        last = torch.add(spread[0], spread[1], alpha=bonus).masked_fill_(closed, -torch.inf).argmax(dim=1)
        order.append(last)
    # A head that had no open frame left named one that already has a rank: it keeps the lower one.
    steps = torch.arange(len(order), device=keys.device).expand(heads, -1)
    return tokens.new_full((heads, frames), frames).scatter_reduce_(1, torch.stack(order, dim=1), steps, "amin")


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
