"""Rotary positions put on keys and taken off again, with the very cosines the serving engine uses (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import ConfigError, ModelError


class Rotary:
    """Rotary of half-split heads, one axis of positions or three (M-RoPE in sections, as Qwen2.5-VL has it).

    Cosines and sines are read from the engine's own table, rounded as it rounds them, and everything else is float32:
    a key that the engine rotated comes back to what it was but for the rounding of the rotated key itself.

    Args:
        table: ``[positions, size]``, cosines in the first half of a row and sines in the second.
        sections: how many of the ``size / 2`` frequencies follow each of the three axes; None for one axis.

    Raises:
        ModelError: sections that do not fit the table.
    """

    def __init__(self, table: Tensor, sections: Sequence[int] | None = None) -> None:
        self.table = table
        self._axis: Tensor | None = None
        half = table.shape[1] // 2
        if sections is not None:
            if len(sections) != 3 or sum(sections) != half:
                raise ModelError(f"rotary sections {list(sections)} do not add up to the {half} frequencies of a head")
            counts = torch.tensor(sections, device=table.device)
            self._axis = torch.repeat_interleave(torch.arange(3, device=table.device), counts)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [n, 1, size / 2]`` float32 at positions ``[1 or 3, n]``.

        Raises:
            ConfigError: a position outside the table.
        """
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.table):
            raise ConfigError(f"positions must lie in 0 to {len(self.table) - 1}, where the model has rotary for them")
        positions = positions.to(self.table.device)
        if self._axis is None:
            rows = self.table[positions[0]].float()
            cos, sin = rows.chunk(2, dim=-1)
        else:
            # One axis stands for all three where a model's text has no other.
            rows = self.table[positions.expand(3, -1)].float()
            cosines, sines = rows.chunk(2, dim=-1)
            pick = self._axis.expand(1, cosines.shape[1], -1)
            cos, sin = cosines.gather(0, pick)[0], sines.gather(0, pick)[0]
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Raw keys ``[n, heads, size]`` -> rotated, in their own type."""
    first, second = keys.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(keys.dtype)


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of :func:`rotate`, in float32, then in the keys' own type.

    A rounded cosine and sine are not quite of length one, so the inverse divides by their squared length.
    """
    first, second = keys.float().chunk(2, dim=-1)
    scale = (cos.square() + sin.square()).reciprocal()
    return torch.cat(((first * cos + second * sin) * scale, (second * cos - first * sin) * scale), dim=-1).to(
        keys.dtype
    )
