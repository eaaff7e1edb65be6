"""State of one camera's stream: counters, decoder trust, and what depends on the picture size.

Combines the codec's and the picture's evidence of change between two samples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import Literal

import numpy as np
from av.video.frame import PictureType, VideoFrame

from cluster.codec.motion import MotionField, frame_vectors
from cluster.codec.picture import LumaDifference, Outlines, PictureScaler, outline_zones
from cluster.codec.privacy import Polygon, PrivacyMasks, covered_cells
from cluster.types import BoolGrid, ChangeGrid, PatchGrid, UInt8Array

Cue = Literal["vectors+luma", "luma"]


@dataclass(slots=True)
class CodecStats:
    """Counters of one stream since its start.

    ``resyncs`` is by reason: ``gap`` (hole in the sequence numbers), ``lost_reference`` (found in the bitstream),
    ``corrupt``, ``timestamps``, ``resolution``, ``codec``, ``too_large``, or one given by callers of ``resync``.
    ``gaps`` counts the first two. ``refusal``: a sentence on why nothing is being decoded, cleared by the next picture.
    ``frames_spared``: dropped undecoded as quiet (see LazyDecode).
    """

    frames_decoded: int = 0
    frames_spared: int = 0
    frames_sampled: int = 0
    decode_errors: int = 0
    gaps: int = 0
    resyncs: Counter[str] = field(default_factory=Counter)
    codec: str = ""
    width: int = 0
    height: int = 0
    cue: str = ""
    refusal: str = ""


class Trust(Enum):
    """Whether decoded pictures may depend on lost ones."""

    LOST = auto()
    """Packets are skipped until a keyframe."""
    RECOVERING = auto()
    """The keyframe was fed; no picture independent of earlier ones has been output yet."""
    SKIPPED = auto()
    """Like RECOVERING, but the pictures before the keyframe were skipped as quiet, not lost."""
    TRUSTED = auto()


def no_change(grid: PatchGrid, cue: Cue) -> ChangeGrid:
    """Change grid of a sample that repeats the previous one."""
    still = np.zeros((grid.rows, grid.cols), np.float32)
    return ChangeGrid(still, still, still, luma=still, cue=cue, frames=0)


class ChangeAccumulator:
    """Accumulates every picture shown since the last sample into one ChangeGrid; for one picture size.

    ``cue`` is derived from the decoder's output: an inter picture without vectors is either all new content or from a
    decoder that exports none. It counts as new content if another inter picture since the last sample but one had
    vectors; otherwise only luma is used. I-frames never have vectors and are ignored here. ``masked`` ``[height,
    width]``: pixels whose motion is ignored.
    """

    def __init__(self, width: int, height: int, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self.cue: Cue = "luma"
        self._motion = MotionField(width, height, grid, masked)
        self._luma = LumaDifference(grid, masked)
        self._shape = (grid.rows, grid.cols)
        self._had_vectors = False
        self.reset()

    def reset(self) -> None:
        """Clear everything, the last sample's luma included, except whether the decoder exports vectors."""
        self._motion.reset()
        self._luma.reset()
        self._frames = self._inter = self._with_vectors = 0

    def add_picture(self, frame: VideoFrame, past: float, future: float) -> None:
        """Accumulate one picture. I-frames have no vectors; the luma difference covers them."""
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
        """Change from the previous sample to the one with this luma ``[height, width]``; starts the next interval."""
        if self._inter:
            has_vectors = self._with_vectors > 0
            self.cue = "vectors+luma" if has_vectors or self._had_vectors else "luma"
            self._had_vectors = has_vectors
        planes = self._motion.pop_planes()
        if self.cue == "luma":
            zero = np.zeros(self._shape, np.float32)
            planes = zero, zero, zero
        frames = self._frames
        self._frames = self._inter = self._with_vectors = 0
        return ChangeGrid(*planes, luma=self._luma(luma), cue=self.cue, frames=frames)


class PictureView:
    """State that depends on the picture size: grid, scaler, accumulated change, masks, zone outlines.

    ``size``: width and height in pixels; ``aspect``: pixel width over height (the model's pixels are square).
    """

    def __init__(
        self, size: tuple[int, int], aspect: Fraction, grid: PatchGrid, masks: PrivacyMasks, zones: Sequence[Polygon]
    ) -> None:
        width, height = self.width, self.height = size
        self.aspect, self.grid, self.scaler = aspect, grid, PictureScaler(grid)
        self.masked: BoolGrid | None = masks.raster(width, height) if masks else None
        self.hidden = None if self.masked is None else covered_cells(self.masked, self.grid)
        self.outlines: Outlines | None = outline_zones(zones, self.grid)
        self.change = ChangeAccumulator(width, height, self.grid, self.masked)
