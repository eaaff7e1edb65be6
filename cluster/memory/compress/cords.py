"""CoRDS (papers: eq. 2, 4, 6-10): a coreset in key and value space, of frames or of rare tokens."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_sizes, frame_slots, top_tokens
from cluster.memory.head_memory import LayerKV

_GROUP = 512
"""Maximum number of tokens with pairwise distances; a cell's older tokens form further groups."""
_DISTANCES = 1 << 22
"""Maximum number of distances in memory at a time."""

Objective = Literal["rare", "paper"]


class CoRDS(Compressor):
    """Keeps the newest tokens, and by greedy farthest-first selection (eq. 4 and 6) those they do not cover.

    Objectives:

    * ``paper``: candidates are frames, represented by the centroids of their keys and values, with a bonus for what
      the selected ones do not span (eq. 10). Selected frames keep their tokens; the last one as many as the budget
      allows, evenly spread (the paper specifies neither this nor the start, here the newest tokens).
    * ``rare`` (ours), for fixed cameras, where a small object hardly moves a frame's centroid: candidates are tokens,
      covered by the newest ones and the selected ones of their cell. A token's distance to these is multiplied by its
      distance to its cell's mean, to the power of ``rarity``. The mean is weighted (eq. 2): a token represents those
      dropped in its favour (:meth:`weigh`), so that what was common at a cell remains so after most of it is dropped.

    Anchor layers in the lowest quarter select; each other layer follows the nearest anchor below (B.1; section 3 leaves
    layers above that quarter uncompressed, which a byte cap does not allow).

    Args:
        columns: cells per row of the grid; unused.
        objective: see above.
        key_weight: of keys against values in the distance (lambda).
        recent: share of the budget for the newest tokens (InfiniPot-V's; the paper's is not known).
        active: share of the layers, from the lowest, in which every second one is an anchor.
        rarity: exponent for ``rare``; 0 treats all tokens alike.
        bonus, bonus_key_weight: for ``paper``: weight of novelty (gamma), and of keys in it (beta).
    """

    def __init__(
        self,
        columns: int,
        *,
        objective: Objective = "rare",
        key_weight: float = 0.25,
        recent: float = 0.125,
        active: float = 0.25,
        rarity: float = 2.0,
        bonus: float = 0.25,
        bonus_key_weight: float = 0.25,
    ) -> None:
        super().__init__(columns)
        if objective not in ("rare", "paper"):
            raise ValueError(f"the objective of CoRDS is rare or paper, not {objective!r}")
        if not all(0 <= share <= 1 for share in (key_weight, bonus_key_weight, recent, active)):
            raise ValueError("key weights and shares of CoRDS must be between 0 and 1")
        if bonus < 0 or rarity < 0:
            raise ValueError("bonus and rarity of CoRDS must not be negative")
        self.objective, self.key_weight, self.recent, self.active = objective, key_weight, recent, active
        self.rarity, self.bonus, self.bonus_key_weight = rarity, bonus, bonus_key_weight

    def anchors(self, layers: int) -> list[int]:
        """Layers that select for themselves, such as 0, 2, 4 of 28."""
        return list(range(0, max(1, int(self.active * layers) - 1), 2))

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        choose = self._rare if self.objective == "rare" else self._frames
        chosen: list[Tensor] = []
        for index, layer in enumerate(layers):
            if budget >= layer.tokens:
                chosen.append(all_tokens(layer))
            elif self._follows(layers, index):
                chosen.append(chosen[-1])
            else:
                newest = min(layer.tokens, max(1, int(self.recent * budget)))
                chosen.append(choose(layer, budget, newest))
        return chosen

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        if self.objective == "paper":
            return super().weigh(layers, chosen)
        return [
            None if self._follows(layers, index) else self._weigh(layer, stays)
            for index, (layer, stays) in enumerate(zip(layers, chosen, strict=True))
        ]

    def _follows(self, layers: Sequence[LayerKV], index: int) -> bool:
        # A follower holds its anchor's tokens: compressed together from the first frame on, they stay aligned.
        return (
            index not in self.anchors(len(layers))
            and index > 0
            and layers[index - 1].frame.shape == layers[index].frame.shape
        )

    def _frames(self, layer: LayerKV, budget: int, newest: int) -> Tensor:
        # A frame that is partly among the newest tokens counts as two frames.
        tail = torch.arange(layer.tokens, device=layer.key.device) >= layer.tokens - newest
        slot = frame_slots(2 * layer.frame + tail)
        stays = torch.zeros_like(frame_sizes(slot), dtype=torch.bool).scatter_(1, slot[:, -newest:], True)
        rank = greedy_cover(
            centroids(layer.key, slot),
            centroids(layer.value, slot),
            frame_sizes(slot),
            stays,
            budget,
            key_weight=self.key_weight,
            bonus=self.bonus,
            bonus_key_weight=self.bonus_key_weight,
        )
        return top_tokens(-rank.gather(1, slot).float(), budget, evenly=True)

    def _rare(self, layer: LayerKV, budget: int, newest: int) -> Tensor:
        points, weight = self._points(layer), layer.weights
        apart = tail_distances(points, newest)
        tail = torch.arange(layer.tokens, device=points.device) >= layer.tokens - newest
        scores = torch.empty_like(weight)
        for at, there in cell_groups(layer.cell):
            near = points.flatten(0, 1)[at]
            rarity = rarities(near, weight.view(-1)[at] * there) ** self.rarity
            found = insertion_scores(near, rarity, apart.view(-1)[at], there & ~tail[at % layer.tokens])
            scores.view(-1)[at[there]] = found[there]
        return top_tokens(scores.masked_fill_(tail, torch.inf), budget, evenly=True)

    def _weigh(self, layer: LayerKV, stays: Tensor) -> Tensor:
        points, weight = self._points(layer), layer.weights
        kept = torch.zeros_like(layer.frame, dtype=torch.bool).scatter_(1, stays, True)
        given = torch.zeros_like(weight)
        for at, there in cell_groups(layer.cell):
            held = reassign_weights(points.flatten(0, 1)[at], weight.view(-1)[at] * there, kept.view(-1)[at] & there)
            given.view(-1)[at[there]] = held[there]
        return given.gather(1, stays)

    def _points(self, layer: LayerKV) -> Tensor:
        """Points ``[H, n, 2 D]`` whose squared Euclidean distances are those of eq. 4."""
        parts = (layer.key.float() * self.key_weight**0.5, layer.value.float() * (1 - self.key_weight) ** 0.5)
        return torch.cat(parts, dim=-1)


def cell_groups(cell: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens of each head's cells, in time order, in groups of at most 512; groups of similar size are batched.

    Yields:
        ``[g, l]`` int64: flat indices of the tokens in ``cell [H, n]``; and ``[g, l]`` bool: False for padding.
    """
    heads, tokens = cell.shape
    grid = int(cell.max()) + 1
    owner = (cell + torch.arange(heads, device=cell.device)[:, None] * grid).view(-1)
    order = owner.argsort(stable=True)
    _, count = torch.unique_consecutive(owner[order], return_counts=True)
    # Split from the newest backwards, so that the newest tokens share a group.
    until = count.cumsum(0)
    parts = -(-count // _GROUP)
    whose = torch.repeat_interleave(torch.arange(len(count), device=cell.device), parts)
    back = torch.arange(len(whose), device=cell.device) - (parts.cumsum(0) - parts)[whose]
    end = until[whose] - back * _GROUP
    size = torch.minimum(count[whose] - back * _GROUP, count.new_tensor(_GROUP))
    step = 1
    while step // 2 < min(_GROUP, tokens):
        # Sizes within a factor of two: little padding.
        same = ((size > step // 2) & (size <= step)).nonzero()[:, 0]
        for some in torch.split(same, max(1, _DISTANCES // step**2)):
            if len(some):
                longest = int(size[some].max())
                at = end[some, None] - longest + torch.arange(longest, device=cell.device)
                there = at >= (end - size)[some, None]
                yield order[at.clamp(min=0)], there
        step *= 2


def rarities(points: Tensor, weight: Tensor) -> Tensor:
    """Squared distances ``[g, l]`` of points ``[g, l, D]`` to their group's mean, weighted by ``weight [g, l]``."""
    mean = (weight[:, None] @ points) / weight.sum(dim=1)[:, None, None].clamp(min=1e-12)
    return (points - mean).square_().sum(dim=-1)


def tail_distances(points: Tensor, newest: int) -> Tensor:
    """Squared distances ``[H, n]`` of points ``[H, n, D]`` to the nearest of the last ``newest`` ones."""
    # Centred, to reduce cancellation between similar points.
    centred = points - points.mean(dim=1, keepdim=True)
    parts = torch.split(centred, max(1, _DISTANCES // (len(points) * newest)), dim=1)
    return torch.cat([torch.cdist(part, centred[:, -newest:]).amin(dim=2) for part in parts], dim=1).square_()


def insertion_scores(points: Tensor, factor: Tensor, apart: Tensor, candidate: Tensor) -> Tensor:
    """Scores ``[g, l]`` at which greedy farthest-first selection takes the points ``[g, l, D]`` of each group.

    A score is the squared distance to the nearest point taken before, times the point's ``factor [g, l]``. Scores
    decrease in the order of selection, so the highest scores over several groups are what a single greedy selection
    would take if groups did not cover each other. ``apart [g, l]``: squared distance to the points taken at the start;
    ``candidate [g, l]`` bool: which points can be taken; others score 0.
    """
    row = torch.arange(len(points), device=points.device)
    centred = points - points.mean(dim=1, keepdim=True)
    # [g, j, i]: from i to j, times the factor of i.
    distances = torch.cdist(centred, centred).square_().mul_(factor[:, None])
    # Taken points stay below all others.
    nearest = (apart * factor).masked_fill_(~candidate, -1.0)
    scores = torch.zeros_like(factor)
    for _ in range(int(candidate.sum(dim=1).max())):
        best, last = nearest.max(dim=1)
        # The maximum of a group without open points is one already taken, whose score stays.
        scores[row, last] = torch.where(best >= 0, best, scores[row, last])
        nearest[row, last] = -1.0
        torch.minimum(nearest, distances[row, last], out=nearest)
    return scores


def reassign_weights(points: Tensor, weight: Tensor, stays: Tensor) -> Tensor:
    """Weights ``[g, l]`` after each point ``[g, l, D]`` passes its ``weight`` to the nearest one that ``stays
    [g, l]``; groups in which none stays lose theirs."""
    centred = points - points.mean(dim=1, keepdim=True)
    nearest = torch.cdist(centred, centred).masked_fill_(~stays[:, None], torch.inf).argmin(dim=2)
    return torch.zeros_like(weight).scatter_add_(1, nearest, weight) * stays


def centroids(tokens: Tensor, slot: Tensor) -> Tensor:
    """Means ``[H, f, D]`` of the tokens ``[H, n, D]`` of each frame; ``slot [H, n]``: frame of each token."""
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
    stays: Tensor,
    budget: int,
    *,
    key_weight: float,
    bonus: float,
    bonus_key_weight: float,
) -> Tensor:
    """Order ``[H, f]``, from 1, in which eq. 10 selects among frames ``keys, values [H, f, D]`` in each head.

    Starts with the frames of ``stays`` (``[H, f]`` bool, at least one per head), at rank 0, and ends when the selected
    frames have ``budget`` of the ``tokens [H, f]`` in every head; the rest get rank ``f``. Novelty is the surrogate
    ``1 - max cos`` against the selected frames. One distance and one cosine update per step: ``O(f * steps * D)`` per
    head, all heads at once.
    """
    heads, frames = tokens.shape
    row = torch.arange(heads, device=keys.device)
    joint = torch.cat([keys * key_weight**0.5, values * (1 - key_weight) ** 0.5], dim=-1)
    units = F.normalize(torch.stack([keys, values]), dim=-1)
    shares = keys.new_tensor([bonus_key_weight, 1 - bonus_key_weight])[:, None, None]
    # Per head: each frame's distance to the selected ones, and its novelty.
    measures = keys.new_full((2, heads, frames), torch.inf)
    some = stays.any(dim=0)
    others = ~stays[:, None, some]
    measures[0] = torch.cdist(joint, joint[:, some]).square_().masked_fill_(others, torch.inf).amin(dim=2)
    resembles = (units @ units[:, :, some].transpose(2, 3)).masked_fill_(others, -1.0).amax(dim=3)
    closed = stays | (tokens == 0)
    rank = torch.full_like(tokens, frames).masked_fill_(stays, 0)
    for step in range(1, frames):
        if bool((((tokens * closed).sum(dim=1) >= budget) | closed.all(dim=1)).all()):
            break
        torch.sub(1, (shares * resembles).sum(dim=0), out=measures[1])
        # Min-max normalised over the open frames; all 0 if they are equal.
        low = measures.masked_fill(closed, torch.inf).amin(dim=2, keepdim=True)
        high = measures.masked_fill(closed, -torch.inf).amax(dim=2, keepdim=True)
        spread = (measures - low) / (high - low).clamp_(min=1e-12)
        last = torch.add(spread[0], spread[1], alpha=bonus).masked_fill_(closed, -torch.inf).argmax(dim=1)
        # The maximum of a head without open frames is already ranked, and keeps its lower rank.
        rank[row, last] = rank[row, last].clamp(max=step)
        closed[row, last] = True
        torch.minimum(measures[0], (joint - joint[row, last][:, None]).square_().sum(dim=-1), out=measures[0])
        torch.maximum(resembles, (units @ units[:, row, last][..., None])[..., 0], out=resembles)
    return rank
