"""What an engine hands on when a frame leaves its stream's window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cluster.memory.layer import LayerKV


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
