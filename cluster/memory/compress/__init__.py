"""Compressors: which tokens a memory keeps when it exceeds its budget (:meth:`Compressor.select`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.head_memory import LayerKV

_STACKED = 1 << 20
"""Maximum number of key elements stacked in one call: small layers are call-bound, large ones memory-bound."""


class Compressor(ABC):
    """Selects the tokens that a memory keeps. ``columns``: cells per row of the grid.

    ``wants_queries``: whether selection uses the latest question rows (:meth:`observe`), which are costly to record.
    """

    wants_queries: ClassVar[bool] = False

    def __init__(self, columns: int) -> None:
        self.columns = columns

    @abstractmethod
    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        """Tokens to keep, per layer ``[H, m]`` int64 with ``m <= budget``, ascending in each head. ``layers`` are in
        the model's order. A budget of at least all tokens keeps all."""

    def weigh(self, layers: Sequence[LayerKV], chosen: Sequence[Tensor]) -> list[Tensor | None]:
        """Per layer, new weights ``[H, m]`` float32 of the tokens just ``chosen`` by :meth:`select`: the compressor's
        state per token. None leaves them unchanged; new tokens have weight 1."""
        del chosen
        return [None] * len(layers)

    def observe(self, queries: Sequence[Tensor]) -> None:
        """Record the latest question rows for the next :meth:`select`, replacing earlier ones. ``queries``: per layer
        ``[H, r, D]``, before rotary, with the query heads that share a key head concatenated along ``r``."""
        del queries

    def state(self) -> dict[str, Tensor]:
        """State kept between compressions and across restarts, in addition to the tokens' weights."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        del state


def all_tokens(layer: LayerKV) -> Tensor:
    """Selection of all tokens of a layer."""
    return torch.arange(layer.tokens, device=layer.key.device).expand(layer.heads, -1)


def top_mask(scores: Tensor, count: int, *, evenly: bool = False) -> Tensor:
    """Mask ``[H, n]`` of the ``count`` highest of ``scores [H, n]`` in each head. Of ties at the threshold the earliest
    are taken, or with ``evenly`` ones spread evenly over them. NaN ranks lowest."""
    if count <= 0 or count >= scores.shape[1]:
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    ranked = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # No sort, which would dominate at thousands of tokens.
    edge = ranked.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = ranked > edge, ranked == edge
    left = count - above.sum(dim=1, keepdim=True)
    place = level.cumsum(dim=1)
    if not evenly:
        return above | (level & (place <= left))
    # Of t ties, take the k at (j + 1/2) t / k: ceil(k i / t - 1/2) of them are among the first i.
    equals = place[:, -1:]
    upto = (2 * left * place + equals - 1) // (2 * equals)
    return above | (level & (upto > (2 * left * (place - 1) + equals - 1) // (2 * equals)))


def top_tokens(scores: Tensor, count: int, *, evenly: bool = False) -> Tensor:
    """Indices ``[H, count]`` of :func:`top_mask`, ascending in each head."""
    return top_mask(scores, count, evenly=evenly).nonzero()[:, 1].view(len(scores), -1)


def frame_slots(frame: Tensor) -> Tensor:
    """Renumber ``frame [H, n]`` densely in each head: 0, 1, 2 ..."""
    return F.pad((frame[:, 1:] != frame[:, :-1]).cumsum(dim=1), (1, 0))


def frame_sizes(slot: Tensor) -> Tensor:
    """Token counts ``[H, f]`` of the frames in ``slot [H, n]``; 0 beyond a head's last frame."""
    count = slot.new_zeros(len(slot), int(slot[:, -1].max()) + 1)
    return count.scatter_add_(1, slot, torch.ones_like(slot))


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat``, without a copy for a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def group_layers(layers: Sequence[LayerKV]) -> Iterator[list[LayerKV]]:
    """Group consecutive layers of equal shape, up to a size at which stacking is cheap."""
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
    """Rank ``[H, n]`` of each token within its frame ``slot [H, n]``, by descending ``scores [H, n]``; ties go to the
    earlier."""
    falling = scores.argsort(dim=1, descending=True, stable=True)
    order = falling.gather(1, slot.gather(1, falling).argsort(dim=1, stable=True))
    count = frame_sizes(slot)
    first = (count.cumsum(dim=1) - count).gather(1, slot)
    place = torch.arange(slot.shape[1], device=slot.device) - first
    return torch.empty_like(slot).scatter_(1, order, place)
