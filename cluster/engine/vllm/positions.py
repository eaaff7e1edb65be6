"""Positions of a prompt's tokens, from those of its items. Does not import vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def prompt_positions(length: int, items: Sequence[tuple[int, Tensor, int]]) -> tuple[Tensor, int]:
    """Positions ``[3, length]`` int64 of a prompt, and the difference between the next token's position and its index.

    Args:
        length: tokens of the prompt.
        items: (index of its first token, positions ``[3, n]``, position of the text after it), ascending; text before
            the first item starts at 0.

    Raises:
        ValueError: items overlap or exceed the prompt, or text follows an item without a position for it.
    """
    positions = torch.empty(3, length, dtype=torch.int64)
    written, following = 0, 0
    for offset, given, after in items:
        count = given.shape[1]
        if offset < written or offset + count > length:
            raise ValueError(f"an item of {count} tokens at {offset} does not fit between {written} and {length}")
        _text(positions, written, offset, following)
        positions[:, offset : offset + count] = given
        written, following = offset + count, after
    _text(positions, written, length, following)
    last = following + length - written if written < length else following
    return positions, last - length


def feature_positions(length: int, features: Sequence[Any]) -> tuple[Tensor, int]:
    """:func:`prompt_positions` of vLLM's ``MultiModalFeatureSpec``s, whose data has our ``positions`` and ``after``."""
    items = []
    for feature in sorted(features, key=lambda feature: int(feature.mm_position.offset)):
        data = feature.data
        assert data is not None, "positions travel with every request"
        items.append((feature.mm_position.offset, data["positions"].data, int(data["after"].data)))
    return prompt_positions(length, items)


def _text(positions: Tensor, first: int, stop: int, at: int) -> None:
    if stop > first:
        if at < 0:
            raise ValueError(f"text at token {first} follows an item without a position for the text after it")
        positions[:, first:stop] = torch.arange(at, at + stop - first)
