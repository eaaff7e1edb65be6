"""Combines codec and picture evidence of change between two samples."""

from typing import Literal

import numpy as np
from av.video.frame import PictureType, VideoFrame

from cluster.codec.motion import MotionField, frame_vectors
from cluster.codec.picture import LumaDifference
from cluster.types import BoolGrid, ChangeGrid, PatchGrid, UInt8Array

Cue = Literal["vectors+luma", "luma"]


def no_change(grid: PatchGrid, cue: Cue) -> ChangeGrid:
    """Of a sample that repeats the one before."""
    still = np.zeros((grid.rows, grid.cols), np.float32)
    return ChangeGrid(still, still, still, luma=still, cue=cue, frames=0)


class ChangeAccumulator:
    """Accumulates every shown picture since the last sample into one ChangeGrid; for one picture size.

    ``cue`` is derived from the decoder's output: an inter picture without vectors is either all new content or comes
    from a decoder that exports none. It counts as new content if another inter picture since the sample before last had
    vectors; otherwise only luma is used. I-frames never have vectors and decide nothing. ``masked`` ``[height,
    width]``: pixels whose motion is ignored.
    """

    def __init__(self, width: int, height: int, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self.cue: Cue = "luma"
        self._motion = MotionField(width, height, grid, masked)
        self._luma = LumaDifference(grid, masked)
        self._shape = (grid.rows, grid.cols)
        self._gave = False
        self.reset()

    def reset(self) -> None:
        """Clear everything except whether there are vectors; the last sample's luma too."""
        self._motion.reset()
        self._luma.reset()
        self._frames = self._inter = self._with_vectors = 0

    def add_picture(self, frame: VideoFrame, past: float, future: float) -> None:
        """Accumulate one picture. An I-frame has no vectors; the samples' luma covers it."""
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
        """The change up to a sample with this luma ``[height, width]``; starts the next interval."""
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
