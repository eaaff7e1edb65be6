"""What travels from a decoder to a replica."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cluster.types.pictures import BoolGrid, PatchGrid, UInt8Array


@dataclass(frozen=True, slots=True)
class FrameTrace:
    """The trace that a frame belongs to: ``parent`` as W3C's ``traceparent``, ``sent_s`` Unix seconds when it left."""

    parent: str
    sent_s: float


@dataclass(frozen=True, slots=True)
class FrameSample:
    """What travels from a decoder to the replica that owns the stream: the kept patches and nothing else.

    * ``mask`` ``[rows, cols]`` bool, whole merge groups
    * ``patches`` ``[n, T, C, p, p]`` uint8 (RGB), ``n = mask.sum()``, in **group order**: groups row-major over the
      merged grid, then the ``merge x merge`` patches of a group row-major
    * ``pts``: of the first of its ``T`` samples; ``duration``: microseconds it stands for (T / fps)
    * ``activity``: share of groups the codec saw change, before anchors and dilation, 0..1
    * ``fresh``, ``gap``: see :class:`SampledPicture`. At a fresh frame the stream's window begins anew; after a gap it
      goes on, with a hole in it, where the frame follows the one before on the same grid and a credible clock
    * ``windows_dropped``: windows that the decoder has counted as dropped until this frame, which it did not send
    * ``trace``: ``None`` for all but the few that are traced
    """

    stream: str
    index: int
    pts: int
    duration: int
    anchor: bool
    fresh: bool
    grid: PatchGrid
    mask: BoolGrid
    patches: UInt8Array
    activity: float
    digest: str
    windows_dropped: int = 0
    trace: FrameTrace | None = None
    gap: bool = False

    @property
    def random_access(self) -> bool:
        """Complete, and needs no frame before it: a receiver that missed some goes on here."""
        return self.fresh or self.gap

    @property
    def tokens(self) -> int:
        """Visual tokens this frame costs."""
        return len(self.patches) // (self.grid.merge**2)

    @property
    def complete(self) -> bool:
        """Nothing pruned: a window may open here, since every cell of the scene is present."""
        return len(self.patches) == self.grid.rows * self.grid.cols

    @property
    def end(self) -> int:
        return self.pts + self.duration


def mask_digest(mask: BoolGrid, index: int, pts: int) -> str:
    """Content key of one frame's kept cells: a cached value made under another mask must never match."""
    hasher = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=12)
    hasher.update(f"{mask.shape}{index}:{pts}".encode())
    return hasher.hexdigest()
