"""CoRDS (papers: eq. 2, 4, 6-10): a coreset of the tokens in key and value space, of frames or of rare tokens."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_sizes, frame_slots, top_tokens
from cluster.memory.head_memory import LayerKV

_GROUP = 512
"""Most tokens whose distances to each other are looked at: older ones of a cell are another group."""
_DISTANCES = 1 << 22
"""Distances held at a time."""

Objective = Literal["rare", "paper"]


class CoRDS(Compressor):
    """Greedy farthest-first choice (eq. 4 and 6) of what the newest tokens, which stay, do not cover.

    Objectives:

    * ``paper``: candidates are frames, each the centroid of its keys and of its values, with a bonus for what the
      chosen ones do not span (eq. 10). Chosen frames keep their tokens; of the last one, as many as the budget allows,
      spread evenly over it (the paper says neither this nor what comes first: here the newest tokens).
    * ``rare``, ours for a camera that does not move, where a small object hardly moves a frame's centroid: candidates
      are tokens, covered by the newest ones and by those chosen of their cell, and a token's distance to these is
      multiplied by that to the mean of its cell, to the power of ``rarity``. The mean is weighted (eq. 2): a token
      stands for those dropped in its favour (:meth:`weigh`), so that what was common at a cell stays so after most of
      it was dropped.

    The choice is made at anchor layers of the lowest quarter; every other layer takes that of the nearest anchor below
    (B.1; section 3 leaves layers above that quarter whole, which a cap in bytes does not allow).

    Args:
        columns: cells of one row; unused.
        objective: see above.
        key_weight: of keys against values in the distance (lambda).
        recent: share of the budget for the newest tokens (InfiniPot-V's; the paper's own is not known).
        active: share of the layers, from the lowest, among which every second one is an anchor.
        rarity: of ``rare``: 0 counts all tokens alike.
        bonus: of ``paper``: weight of novelty (gamma); ``bonus_key_weight``: of keys in it (beta).
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
            raise ValueError("key weights and shares of CoRDS lie between 0 and 1")
        if bonus < 0 or rarity < 0:
            raise ValueError("bonus and rarity of CoRDS are not negative")
        self.objective, self.key_weight, self.recent, self.active = objective, key_weight, recent, active
        self.rarity, self.bonus, self.bonus_key_weight = rarity, bonus, bonus_key_weight

    def anchors(self, layers: int) -> list[int]:
        """Layers that select for themselves: 0, 2, 4 of 28."""
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
        # A follower holds the anchor's tokens: compressed together from the first frame on, they stay aligned.
        return (
            index not in self.anchors(len(layers))
            and index > 0
            and layers[index - 1].frame.shape == layers[index].frame.shape
        )

    def _frames(self, layer: LayerKV, budget: int, newest: int) -> Tensor:
        # Of a frame of which some tokens are among the newest, those and the others are frames of their own.
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
        """Points ``[H, n, 2 D]`` whose squared Euclidean distances equal eq. 4."""
        parts = (layer.key.float() * self.key_weight**0.5, layer.value.float() * (1 - self.key_weight) ** 0.5)
        return torch.cat(parts, dim=-1)


def cell_groups(cell: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens of each cell of each head, in time order, at most 512 of them a group; groups of about as many
    tokens are named together.

    Yields:
        ``[g, l]`` int64: numbers of the tokens among all of ``cell [H, n]``; and which of them are there, ``[g, l]``
        bool: the others stand for none.
    """
    heads, tokens = cell.shape
    grid = int(cell.max()) + 1
    owner = (cell + torch.arange(heads, device=cell.device)[:, None] * grid).view(-1)
    order = owner.argsort(stable=True)
    _, count = torch.unique_consecutive(owner[order], return_counts=True)
    # From the newest back, so that the newest are together.
    until = count.cumsum(0)
    parts = -(-count // _GROUP)
    whose = torch.repeat_interleave(torch.arange(len(count), device=cell.device), parts)
    back = torch.arange(len(whose), device=cell.device) - (parts.cumsum(0) - parts)[whose]
    end = until[whose] - back * _GROUP
    size = torch.minimum(count[whose] - back * _GROUP, count.new_tensor(_GROUP))
    step = 1
    while step // 2 < min(_GROUP, tokens):
        # Sizes above half of the largest: little is wasted.
        same = ((size > step // 2) & (size <= step)).nonzero()[:, 0]
        for some in torch.split(same, max(1, _DISTANCES // step**2)):
            if len(some):
                longest = int(size[some].max())
                at = end[some, None] - longest + torch.arange(longest, device=cell.device)
                there = at >= (end - size)[some, None]
                yield order[at.clamp(min=0)], there
        step *= 2


def rarities(points: Tensor, weight: Tensor) -> Tensor:
    """Squared distances ``[g, l]`` of points ``[g, l, D]`` to the mean of their group, weighted by ``weight``."""
    mean = (weight[:, None] @ points) / weight.sum(dim=1)[:, None, None].clamp(min=1e-12)
    return (points - mean).square_().sum(dim=-1)


def tail_distances(points: Tensor, newest: int) -> Tensor:
    """Squared distances ``[H, n]`` of points ``[H, n, D]`` to the nearest of the ``newest`` last ones."""
    # Centred: less is lost to rounding where points are much alike.
    centred = points - points.mean(dim=1, keepdim=True)
    parts = torch.split(centred, max(1, _DISTANCES // (len(points) * newest)), dim=1)
    return torch.cat([torch.cdist(part, centred[:, -newest:]).amin(dim=2) for part in parts], dim=1).square_()


def insertion_scores(points: Tensor, factor: Tensor, apart: Tensor, candidate: Tensor) -> Tensor:
    """Scores ``[g, l]`` with which greedy farthest-first takes the points ``[g, l, D]`` of each group.

    A score is the squared distance to the nearest taken before, times the point's own ``factor [g, l]``. They fall
    from one taken to the next, so that the highest scores of several groups are what one greedy choice among all
    takes where distances to those taken of other groups do not count. ``apart [g, l]``: squared distance to what was
    taken at the start; ``candidate [g, l]`` bool: which points can be taken; others score 0.
    """
    row = torch.arange(len(points), device=points.device)
    centred = points - points.mean(dim=1, keepdim=True)
    # [g, j, i]: from i to j.
    distances = torch.cdist(centred, centred).square_().mul_(factor[:, None])
    # Taken ones stay below all others.
    nearest = (apart * factor).masked_fill_(~candidate, -1.0)
    scores = torch.zeros_like(factor)
    for _ in range(int(candidate.sum(dim=1).max())):
        best, last = nearest.max(dim=1)
        # Groups without open points name one that was taken: its score stays.
        scores[row, last] = torch.where(best >= 0, best, scores[row, last])
        nearest[row, last] = -1.0
        torch.minimum(nearest, distances[row, last], out=nearest)
    return scores


def reassign_weights(points: Tensor, weight: Tensor, stays: Tensor) -> Tensor:
    """Weights ``[g, l]`` after each point ``[g, l, D]`` gave its ``weight`` to the nearest that ``stays [g, l]``; of a
    group where none stays they are lost."""
    centred = points - points.mean(dim=1, keepdim=True)
    nearest = torch.cdist(centred, centred).masked_fill_(~stays[:, None], torch.inf).argmin(dim=2)
    return torch.zeros_like(weight).scatter_add_(1, nearest, weight) * stays


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
    stays: Tensor,
    budget: int,
    *,
    key_weight: float,
    bonus: float,
    bonus_key_weight: float,
) -> Tensor:
    """Ranks ``[H, f]``, 1 the first, in which eq. 10 chooses among frames ``keys, values [H, f, D]``, in each head.

    It begins with the frames that stay (``[H, f]`` bool, some in every head), whose rank is 0, and ends when what was
    chosen has ``budget`` of the ``tokens [H, f]`` in every head; frames that were not chosen by then have the rank
    ``f``. The novelty is the surrogate ``1 - max cos`` against the chosen ones. One distance and one cosine update per
    step: ``O(f * steps * D)`` for each head, all heads at once.
    """
    heads, frames = tokens.shape
    row = torch.arange(heads, device=keys.device)
    joint = torch.cat([keys * key_weight**0.5, values * (1 - key_weight) ** 0.5], dim=-1)
    units = F.normalize(torch.stack([keys, values]), dim=-1)
    shares = keys.new_tensor([bonus_key_weight, 1 - bonus_key_weight])[:, None, None]
    # In each head: the distance of every frame to the chosen ones, and beside it the novelty.
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
        # Min-max over the open frames: 0 to 1, all 0 where they are equal.
        low = measures.masked_fill(closed, torch.inf).amin(dim=2, keepdim=True)
        high = measures.masked_fill(closed, -torch.inf).amax(dim=2, keepdim=True)
        spread = (measures - low) / (high - low).clamp_(min=1e-12)
        last = torch.add(spread[0], spread[1], alpha=bonus).masked_fill_(closed, -torch.inf).argmax(dim=1)
        # A head that has no open frame left names one that has a rank: it keeps the lower one.
        rank[row, last] = rank[row, last].clamp(max=step)
        closed[row, last] = True
        torch.minimum(measures[0], (joint - joint[row, last][:, None]).square_().sum(dim=-1), out=measures[0])
        torch.maximum(resembles, (units @ units[:, row, last][..., None])[..., 0], out=resembles)
    return rank
