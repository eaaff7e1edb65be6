"""The codec's and the picture's account of what changed between two samples, brought together."""

from __future__ import annotations

from typing import Literal

import numpy as np
from av.video.frame import PictureType, VideoFrame

from cluster.codec.decoder import VECTOR_CODECS
from cluster.codec.motion import MotionField, frame_vectors
from cluster.codec.picture import LumaDifference
from cluster.types import BoolGrid, ChangeGrid, PatchGrid, UInt8Array

Cue = Literal["vectors+luma", "luma"]


def cue_of(codec: str) -> Cue:
    """What a codec's streams can tell: FFmpeg exports no vectors of HEVC, AV1, VP9 or MJPEG."""
    return "vectors+luma" if codec in VECTOR_CODECS else "luma"


class ChangeAccumulator:
    """Folds every shown picture since the last sample into one ChangeGrid; for pictures of one size.

    ``masked`` ``[height, width]``: pixels of which nothing may be told; what moves there is left out.
    """

    def __init__(self, codec: str, width: int, height: int, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self.cue = cue_of(codec)
        self._motion = MotionField(width, height, grid, masked)
        self._luma = LumaDifference(grid, masked)
        self._shape = (grid.rows, grid.cols)
        self._frames = 0

    def reset(self) -> None:
        """Forget everything, the last sample's luma too."""
        self._motion.reset()
        self._luma.reset()
        self._frames = 0

    def add(self, frame: VideoFrame, past: float, future: float) -> None:
        """Fold one picture. An I-frame has no vectors; the samples' luma bridges it."""
        self._frames += 1
        if self.cue == "luma" or frame.pict_type == PictureType.I:
            return
        vectors = frame_vectors(frame)
        if vectors is None:
            self._motion.add_uncovered()
        else:
            self._motion.add(vectors, past, future)

    def take(self, luma: UInt8Array) -> ChangeGrid:
        """Close the span at a sample with this luma ``[height, width]``."""
        difference = self._luma(luma)
        if self.cue == "luma":
            zero = np.zeros(self._shape, np.float32)
            planes = zero, zero, zero
        else:
            planes = self._motion.take()
        frames, self._frames = self._frames, 0
        return ChangeGrid(*planes, luma=difference, cue=self.cue, frames=frames)
