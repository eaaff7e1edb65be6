"""Compressors: which tokens a memory keeps when it reaches its budget.

A compressor implements :meth:`Compressor.select`, which returns the tokens to keep.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.head_memory import LayerKV

_STACKED = 1 << 20
"""Most key elements stacked in one call: small layers are call-bound, large ones memory-bound."""


class Compressor(ABC):
    """Selects the tokens that a memory keeps. ``columns``: cells per row of the grid.

    ``wants_queries``: selection uses the latest question rows (:meth:`observe`), which cost something to record.
    """

    wants_queries: ClassVar[bool] = False

    def __init__(self, columns: int) -> None:
        if columns < 1:
            raise ValueError(f"a grid has at least one column, not {columns}")
        self.columns = columns

    @abstractmethod
    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        """Tokens to keep, per layer ``[H, m]`` int64 with ``m <= budget``, ascending in each head.

        ``layers`` are in the model's order. A budget of all tokens or more keeps all.
        """

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        """New weights ``[H, m]`` float32 of the tokens that ``select`` has just chosen, per layer: what a compressor
        keeps about each of them. None leaves them as they are; a new token weighs 1."""
        del chosen
        return [None] * len(layers)

    def observe(self, queries: Sequence[Tensor]) -> None:
        """Record the latest question rows, used by the next ``select``; each call replaces what the one before it said.
        ``queries``: per layer ``[H, r, D]``, before rotary: of the rows that asked last, the query heads that share a
        key head side by side in ``r``."""
        del queries

    def state(self) -> dict[str, Tensor]:
        """What is kept between compressions beside the tokens' weights, by name; survives a restart."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        del state


def all_tokens(layer: LayerKV) -> Tensor:
    """Selection of all tokens of a layer."""
    return torch.arange(layer.tokens, device=layer.key.device).expand(layer.heads, -1)


def top_mask(scores: Tensor, count: int, *, evenly: bool = False) -> Tensor:
    """``[H, n]`` bool: the ``count`` highest of ``scores [H, n]`` in each head.

    Ties at the threshold: the earliest, or with ``evenly`` spread over all of them. NaN ranks lowest.
    """
    if count <= 0 or count >= scores.shape[1]:
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    ranked = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # Without a sort, which dominates at thousands of tokens.
    edge = ranked.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = ranked > edge, ranked == edge
    left = count - above.sum(dim=1, keepdim=True)
    place = level.cumsum(dim=1)
    if not evenly:
        return above | (level & (place <= left))
    # Of t equals, the k at (j + 1/2) t / k: up to the i-th there are ceil(k i / t - 1/2) of them.
    equals = place[:, -1:]
    upto = (2 * left * place + equals - 1) // (2 * equals)
    return above | (level & (upto > (2 * left * (place - 1) + equals - 1) // (2 * equals)))


def top_tokens(scores: Tensor, count: int, *, evenly: bool = False) -> Tensor:
    """The ``count`` tokens ``[H, count]`` that :func:`top_mask` names, ascending in each head."""
    return top_mask(scores, count, evenly=evenly).nonzero()[:, 1].view(len(scores), -1)


def frame_slots(frame: Tensor) -> Tensor:
    """Consecutive frame numbers of ``frame [H, n]`` in each head: 0, 1, 2 ..."""
    return F.pad((frame[:, 1:] != frame[:, :-1]).cumsum(dim=1), (1, 0))


def frame_sizes(slot: Tensor) -> Tensor:
    """Token counts ``[H, f]`` of the frames in ``slot [H, n]``; 0 where a head has fewer frames than others."""
    count = slot.new_zeros(len(slot), int(slot[:, -1].max()) + 1)
    return count.scatter_add_(1, slot, torch.ones_like(slot))


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat``, without a copy for a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def group_layers(layers: Sequence[LayerKV]) -> Iterator[list[LayerKV]]:
    """Groups of neighbouring layers of one shape, as long as stacking them is cheap."""
    group: list[LayerKV] = []
    for layer in layers:
        full = group and (len(group) + 1) * layer.key.numel() > _STACKED
        if group and (full or group[0].key.shape != layer.key.shape):
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


def rank_in_frame(scores: Tensor, slot: Tensor) -> Tensor:
    """Place ``[H, n]`` of each token among those of its frame ``slot [H, n]``: 0 has the highest of ``scores [H, n]``,
    the earlier of two equals."""
    falling = scores.argsort(dim=1, descending=True, stable=True)
    order = falling.gather(1, slot.gather(1, falling).argsort(dim=1, stable=True))
    count = frame_sizes(slot)
    first = (count.cumsum(dim=1) - count).gather(1, slot)
    place = torch.arange(slot.shape[1], device=slot.device) - first
    return torch.empty_like(slot).scatter_(1, order, place)
