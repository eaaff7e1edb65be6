"""The codec's and the picture's account of what changed between two samples, brought together."""

from __future__ import annotations

from typing import Literal

import numpy as np
from av.video.frame import PictureType, VideoFrame

from cluster.codec.motion import MotionField, frame_vectors
from cluster.codec.picture import LumaDifference
from cluster.types import BoolGrid, ChangeGrid, PatchGrid, UInt8Array

Cue = Literal["vectors+luma", "luma"]


class ChangeAccumulator:
    """Folds every shown picture since the last sample into one ChangeGrid; for pictures of one size.

    ``cue`` follows from what the decoder gives, since neither a codec's name nor a single picture tells it: an inter
    picture without vectors is all new content, or comes from a decoder that exports none. It counts as new content
    where another inter picture since the sample before the last had vectors; else luma alone is to be believed.
    I-frames have none anywhere and decide nothing. ``masked`` ``[height, width]``: pixels of which nothing may be
    told; what moves there is left out.
    """

    def __init__(self, width: int, height: int, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self.cue: Cue = "luma"
        self._motion = MotionField(width, height, grid, masked)
        self._luma = LumaDifference(grid, masked)
        self._shape = (grid.rows, grid.cols)
        self._gave = False
        self.reset()

    def reset(self) -> None:
        """Forget everything but whether there are vectors; the last sample's luma too."""
        self._motion.reset()
        self._luma.reset()
        self._frames = self._inter = self._with_vectors = 0

    def add_picture(self, frame: VideoFrame, past: float, future: float) -> None:
        """Fold one picture. An I-frame has no vectors; the samples' luma bridges it."""
        self._frames += 1
        if frame.pict_type == PictureType.I:
            return
        self._inter += 1
        vectors = frame_vectors(frame)
        if vectors is None:
            self._motion.add_uncovered()
        else:
            self._with_vectors += 1
            self._motion.add_vectors(vectors, past, future)

    def pop_change(self, luma: UInt8Array) -> ChangeGrid:
        """Close the span at a sample with this luma ``[height, width]``."""
        if self._inter:
            given = self._with_vectors > 0
            self.cue = "vectors+luma" if given or self._gave else "luma"
            self._gave = given
        planes = self._motion.pop_planes()
        if self.cue == "luma":
            zero = np.zeros(self._shape, np.float32)
            planes = zero, zero, zero
        frames = self._frames
        self._frames = self._inter = self._with_vectors = 0
        return ChangeGrid(*planes, luma=self._luma(luma), cue=self.cue, frames=frames)
