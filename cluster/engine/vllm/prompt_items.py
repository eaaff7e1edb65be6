"""Rendered prompts for vLLM: token ids, plus embeddings with positions as multimodal items."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

# vLLM knows three modalities; ours is none of them, and is passed as this one.
MODALITY = "image"


@dataclass(frozen=True, slots=True)
class WindowItem:
    """Consecutive prompt tokens given by their embeddings.

    * ``embeds`` ``[n, W]``, on the CPU, in the model's dtype
    * ``positions`` ``[3, n]`` int64, independent of the order in the prompt
    * ``after``: position of the first text token after the item; required only before text
    * ``digest``: of content *and* positions; the key in vLLM's caches
    """

    embeds: Tensor
    positions: Tensor
    after: int | None
    digest: str

    @classmethod
    def of(cls, embeds: Tensor, positions: Tensor, content: str, *, after: int | None = None) -> Self:
        """Create an item; ``content``: its :func:`content_digest`."""
        hasher = hashlib.blake2b(f"{content}:{after}:".encode(), digest_size=16)
        hasher.update(positions.contiguous().numpy().tobytes())
        return cls(embeds, positions, after, hasher.hexdigest())

    def __len__(self) -> int:
        return int(self.embeds.shape[0])


def content_digest(embeds: Tensor) -> str:
    """Digest of embeddings ``[n, W]`` on the CPU."""
    flat = embeds.contiguous().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def check_items(items: Sequence[WindowItem], width: int, dtype: torch.dtype) -> None:
    """Check for errors that vLLM would not detect. Raises ``ValueError``: shape or dtype of embeddings differs from the
    model's, positions do not match them, or the last item has no ``after``."""
    for number, item in enumerate(items):
        shape = (len(item), width)
        if item.embeds.ndim != 2 or tuple(item.embeds.shape) != shape or not len(item) or item.embeds.dtype != dtype:
            raise ValueError(
                f"item {number} must be embeddings [n, {width}] of {dtype}, at least one, "
                f"not {item.embeds.dtype} {list(item.embeds.shape)}"
            )
        if tuple(item.positions.shape) != (3, len(item)) or item.positions.dtype != torch.int64:
            raise ValueError(
                f"item {number} has {len(item)} embeddings and must have int64 positions [3, {len(item)}], "
                f"not {item.positions.dtype} {list(item.positions.shape)}"
            )
        if len(item) and int(item.positions.min()) < 0:
            raise ValueError(f"item {number} has the position {int(item.positions.min())}; positions begin at 0")
    if items and items[-1].after is None:
        raise ValueError("the last item must have `after`, the position of the text after it")


def window_prompt(before: Sequence[int], items: Sequence[WindowItem], behind: Sequence[int]) -> MultiModalInput:
    """Render ``[before | items | behind]`` for ``AsyncLLM.generate``.

    Args:
        before: token ids of the system prompt, at positions 0, 1, …
        items: in prompt order; see :func:`check_items`.
        behind: token ids of the question, at positions from the last item's ``after`` on.
    """
    ids = list(before)
    places = []
    for item in items:
        places.append(PlaceholderRange(offset=len(ids), length=len(item)))
        # Any id can stand for embeddings.
        ids += [0] * len(item)
    ids += behind
    return mm_input(
        ids,
        MultiModalKwargsItems({MODALITY: [item_kwargs(item) for item in items]}),
        {MODALITY: [item.digest for item in items]},
        {MODALITY: places},
    )


def item_kwargs(item: WindowItem) -> MultiModalKwargsItem:
    """Keyword arguments of the registered model for an item."""
    here, host = MultiModalBatchedField(), MultiModalBatchedField(keep_on_cpu=True)
    after = torch.tensor(-1 if item.after is None else item.after)
    return MultiModalKwargsItem(
        {
            "embeds": MultiModalFieldElem(item.embeds, here),
            "positions": MultiModalFieldElem(item.positions, host),
            "after": MultiModalFieldElem(after, host),
        }
    )
