"""Packets, patch grids, codec change and sampled frames."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class FrameTrace:
    """Trace context of a frame: ``parent`` as W3C ``traceparent``, ``sent_s`` Unix time of sending."""

    parent: str
    sent_s: float


@dataclass(frozen=True, slots=True)
class FrameSample:
    """The kept patches of one frame, sent by a decoder to the stream's replica.

    * ``mask`` ``[rows, cols]`` bool, whole merge groups
    * ``patches`` ``[n, T, C, p, p]`` uint8 (RGB), ``n = mask.sum()``, in **group order**: groups row-major over the
      merged grid, then the ``merge x merge`` patches of a group row-major; none until they are cut
    * ``pts``: of the first of its ``T`` samples; ``duration``: microseconds the frame covers (T / fps)
    * ``activity``: share of groups in which the codec saw change, before anchors and dilation, 0..1
    * ``fresh``, ``gap``: see :class:`PictureHeader`. A fresh frame restarts the stream's window; after a gap the window
      continues with a hole if the grid is the same and the clock plausible
    * ``windows_dropped``: running total of windows that decoders did not send, but counted as dropped
    * ``trace``: ``None`` unless this frame is traced
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
    windows_dropped: int = 0
    trace: FrameTrace | None = None
    gap: bool = False

    @property
    def random_access(self) -> bool:
        """Whether a receiver that missed frames can resume here, as the frame depends on no earlier one."""
        return self.fresh or self.gap

    @property
    def tokens(self) -> int:
        return int(np.count_nonzero(self.mask)) // self.grid.merge**2

    @property
    def complete(self) -> bool:
        """Whether nothing is pruned, so that a window may open here."""
        return bool(self.mask.all())

    @property
    def end(self) -> int:
        return self.pts + self.duration


BoolGrid = npt.NDArray[np.bool_]
FloatGrid = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

Scalar = TypeVar("Scalar", bound=np.generic)

MICROSECONDS = 1_000_000

THUMBNAIL_STRIDE = 4
"""Subsampling step, in pixels of both axes, of the thumbnails that picture statistics use."""


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Patch grid of one camera's frames: ``rows x cols`` patches of ``patch`` pixels.

    ``merge x merge`` patches make one visual token (a *group*); ``temporal`` samples make one frame. ``overlap``: extra
    copies of the picture's middle patch row and column in the grid, needed by the groups on both sides (see
    :attr:`sources`).
    """

    rows: int
    cols: int
    patch: int
    merge: int
    temporal: int
    overlap: int = field(default=0, compare=False, metadata={"wire": ""})

    @property
    def sources(self) -> npt.NDArray[np.int64]:
        """Patch row of the picture shown by each grid row, ``[rows]``; likewise for columns."""
        rows = np.arange(self.rows)
        return rows - self.overlap * (rows >= -(-self.group_rows // 2) * 2)

    @property
    def pixel_sources(self) -> npt.NDArray[np.int64]:
        """Pixel row of the scaled picture shown by each pixel row of the grid, ``[height]``; likewise for columns."""
        pixels: npt.NDArray[np.int64] = (self.sources[:, None] * self.patch + np.arange(self.patch)).ravel()
        return pixels

    def shown(self, pixels: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Expand the scaled picture ``[scaled height, scaled width, ...]`` to the grid's pixels."""
        return pixels[np.ix_(self.pixel_sources, self.pixel_sources)] if self.overlap else pixels

    @property
    def scaled(self) -> tuple[int, int]:
        """Height and width in pixels to which pictures are scaled: the grid's without the overlap."""
        return self.height - self.overlap * self.patch, self.width - self.overlap * self.patch

    @property
    def height(self) -> int:
        return self.rows * self.patch

    @property
    def width(self) -> int:
        return self.cols * self.patch

    @property
    def group_rows(self) -> int:
        return self.rows // self.merge

    @property
    def group_cols(self) -> int:
        return self.cols // self.merge

    @property
    def tokens(self) -> int:
        """Visual tokens of one frame with nothing pruned."""
        return self.group_rows * self.group_cols


def cell_means(plane: UInt8Array | npt.NDArray[np.uint16], grid: PatchGrid) -> FloatGrid:
    """Mean of a plane ``[height, width]`` of grey levels over each patch, ``[rows, cols]`` float32.

    Each patch column is summed in 16 bits first (``255 * patch`` fits up to 257 pixels), which is several times faster
    than one reduction over two axes.
    """
    patch = grid.patch
    strips = np.add.reduce(plane.reshape(grid.rows, patch, grid.width), axis=1, dtype=np.uint16)
    # Integer sums are exact in any order, so all implementations round a mean alike.
    sums: FloatGrid = strips.astype(np.float32).reshape(-1, patch) @ np.ones(patch, dtype=np.float32)
    means: FloatGrid = (sums / np.float32(patch * patch)).reshape(grid.rows, grid.cols)
    return means


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """A model family's patch geometry, as decoders need it.

    With ``square``, pictures are resized to ``square x square`` pixels (InternVL's tile); where its patches per side do
    not divide into groups, the groups overlap in the middle (LLaVA-OneVision). Otherwise the grid follows the camera's
    aspect ratio within ``min_pixels`` and ``max_pixels`` (Qwen's native resolution).
    """

    patch: int
    merge: int
    temporal: int
    max_pixels: int = 448 * 448
    min_pixels: int = 56 * 56
    square: int | None = None

    @property
    def largest(self) -> PatchGrid:
        """The patch grid for a square picture of maximum size."""
        side = self.square or math.isqrt(self.max_pixels)
        return self.grid(side, side)

    def grid(self, width: int, height: int) -> PatchGrid:
        """The patch grid for a camera of ``width x height`` native pixels; ``ValueError`` if a side is not positive."""
        if width <= 0 or height <= 0:
            raise ValueError(f"a camera's picture must have positive sides, not {width}x{height}")
        unit = self.patch * self.merge
        if self.square is not None:
            side = self.square // self.patch
            rows = -(-side // self.merge) * self.merge
            return PatchGrid(rows, rows, self.patch, self.merge, self.temporal, overlap=rows - side)
        scale = 1.0
        if width * height > self.max_pixels:
            scale = math.sqrt(self.max_pixels / (width * height))
        elif width * height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
        rows = max(1, math.floor(height * scale / unit + 1e-6)) * self.merge
        cols = max(1, math.floor(width * scale / unit + 1e-6)) * self.merge
        return PatchGrid(rows, cols, self.patch, self.merge, self.temporal)


@dataclass(frozen=True, slots=True)
class EncodedPacket:
    """One encoded packet from a source. ``data``: Annex-B for H.264/HEVC, else the container's framing.

    ``sequence`` counts a session's packets from 0; a missing number is a transport gap. ``discard``: the picture is
    decoded as a reference but not shown, as in trimmed recordings.
    """

    codec: str
    data: bytes
    pts: int | None
    dts: int | None
    keyframe: bool
    sequence: int
    discard: bool = False

    @property
    def decoding_time(self) -> int | None:
        """``dts``, or ``pts`` if it is missing. With B-frames only ``dts`` ascends from packet to packet."""
        return self.dts if self.dts is not None else self.pts


@dataclass(frozen=True, slots=True)
class ChangeGrid:
    """Change since the last sample, from the codec and luma, on the patch grid; planes are ``[rows, cols]`` float32.

    * ``max_motion``: mean displacement over the cell in the frame where it is largest, native pixels per frame
    * ``net_motion``: length of the displacement summed over the skipped frames, native pixels
    * ``intra``: largest fraction of the cell covered by intra or uncovered blocks in any inter frame, 0..1
    * ``luma``: mean absolute luma difference to the previous sample, grey levels, global gain removed
    """

    max_motion: FloatGrid
    net_motion: FloatGrid
    intra: FloatGrid
    luma: FloatGrid
    cue: Literal["vectors+luma", "luma"]
    frames: int


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Position of a sampled picture in its stream, and its patch grid.

    ``fresh``: a new scene, unrelated to earlier samples: stream start, another grid, or a clock jump. ``gap``: video
    before this sample is missing, but earlier samples remain valid; never with ``fresh``. ``hidden`` ``[rows, cols]``:
    cells fully covered by privacy masks, which are black; ``None`` if there are none. ``repeated``: the picture is the
    previous sample's, as nothing changed in the video skipped by lazy decoding.
    """

    index: int
    pts: int
    anchor: bool
    fresh: bool
    grid: PatchGrid
    hidden: BoolGrid | None = field(default=None, kw_only=True)
    gap: bool = field(default=False, kw_only=True)
    repeated: bool = field(default=False, kw_only=True)

    @property
    def random_access(self) -> bool:
        """Whether the sample stands alone: its change from the previous one is unknown."""
        return self.fresh or self.gap


@dataclass(frozen=True, slots=True)
class SampledPicture(PictureHeader):
    """One sampled picture, resized to the patch grid, with its change since the last one (codec -> vision).

    ``rgb`` ``[height, width, 3]`` and ``luma`` ``[height, width]`` are uint8, on the grid's pixels.
    """

    rgb: UInt8Array
    luma: UInt8Array
    change: ChangeGrid

    def host_rgb(self) -> UInt8Array:
        """``rgb``, already in host memory."""
        return self.rgb


class ShownPicture(Protocol):
    """A sample that can be displayed, with its pixels in host or device memory."""

    @property
    def index(self) -> int: ...

    @property
    def pts(self) -> int: ...

    @property
    def grid(self) -> PatchGrid: ...

    def host_rgb(self) -> UInt8Array:
        """``[height, width, 3]`` uint8; may copy from the device."""
        ...
