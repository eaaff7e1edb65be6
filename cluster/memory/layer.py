"""One frame's KV as it leaves its window, and one layer's remembered KV: ragged tokens per frame and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVChunk:
    """One frame's KV of all layers.

    * ``key``, ``value`` ``[L, Hkv, t, D]``, keys before rotary; their own memory, no views
    * ``cell`` ``[t]`` int64: places in a grid of ``rows`` x ``columns`` cells, row-major; those after the last are text
      around the frame
    * ``index``, ``pts`` (microseconds) of the frame
    * ``look`` ``[W]`` float32: mean of the frame's visual embeddings, for those that sort frames by what they show
    """

    stream: str
    index: int
    pts: int
    key: Tensor
    value: Tensor
    cell: Tensor
    rows: int
    columns: int
    look: Tensor

    @property
    def tokens(self) -> int:
        return self.key.shape[2]

    def layers(self) -> list[LayerKV]:
        """The same, layer by layer."""
        parts = zip(self.key, self.value, strict=True)
        return [LayerKV.of_frame(key, value, self.index, self.cell) for key, value in parts]


Leave = Callable[[KVChunk], None]
"""Takes what leaves; called in the engine's thread, in time order for each stream."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """``n`` tokens of each of ``H`` key heads, in time order.

    * ``key``, ``value`` ``[H, n, D]``; keys before rotary, so that what stood at one cell at two times is comparable
    * ``frame`` ``[H, n]`` int64: the number of the frame a token was seen in, ascending
    * ``cell`` ``[H, n]`` int64: its place in the frame's grid, row-major

    Raises:
        ValueError: shapes do not fit, or frames do not ascend.
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor

    def __post_init__(self) -> None:
        if self.key.ndim != 3 or self.key.shape != self.value.shape:
            raise ValueError(
                f"keys {tuple(self.key.shape)} and values {tuple(self.value.shape)} must both be [H, n, D]"
            )
        if self.frame.shape != self.key.shape[:2] or self.cell.shape != self.key.shape[:2]:
            raise ValueError(f"every one of the {tuple(self.key.shape[:2])} tokens needs a frame and a cell")
        if self.tokens > 1 and bool((self.frame[:, 1:] < self.frame[:, :-1]).any()):
            raise ValueError("tokens must stand in time order")

    @property
    def heads(self) -> int:
        return self.key.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of each head."""
        return self.key.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.key.nbytes + self.value.nbytes

    @classmethod
    def of_frame(cls, key: Tensor, value: Tensor, frame: int, cell: Tensor) -> LayerKV:
        """One frame's tokens ``[H, t, D]`` as the engine made them; ``cell [t]`` is that of all heads."""
        heads, tokens = key.shape[:2]
        number = torch.full((heads, tokens), frame, dtype=torch.int64, device=key.device)
        return cls(key, value, number, cell.to(torch.int64).expand(heads, tokens))

    @classmethod
    def joined(cls, parts: Sequence[LayerKV]) -> LayerKV:
        """The tokens of several, one after the other; ``parts`` has one at least."""
        if len(parts) == 1:
            return parts[0]
        names = ("key", "value", "frame", "cell")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names))

    def then(self, later: LayerKV) -> LayerKV:
        """These tokens and, after them, ``later`` ones."""
        return LayerKV.joined([self, later])

    def take(self, kept: Tensor) -> LayerKV:
        """The tokens ``kept [H, m]`` int64, ascending in each head."""
        wide = kept[..., None].expand(-1, -1, self.key.shape[2])
        return LayerKV(
            self.key.gather(1, wide), self.value.gather(1, wide), self.frame.gather(1, kept), self.cell.gather(1, kept)
        )
