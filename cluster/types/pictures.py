"""Packets, patch grids, codec change and sampled frames."""

from __future__ import annotations

import hashlib
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
    """Message from a decoder to the stream's replica: the kept patches of one frame.

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
        """Complete and independent of earlier frames: a receiver that missed some resumes here."""
        return self.fresh or self.gap

    @property
    def tokens(self) -> int:
        return len(self.patches) // (self.grid.merge**2)

    @property
    def complete(self) -> bool:
        """Whether nothing is pruned, so that a window may open here."""
        return len(self.patches) == self.grid.rows * self.grid.cols

    @property
    def end(self) -> int:
        return self.pts + self.duration


def mask_digest(mask: BoolGrid, index: int, pts: int) -> str:
    """Digest of one frame's kept cells, so that values cached under another mask never match."""
    hasher = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=12)
    hasher.update(f"{mask.shape}{index}:{pts}".encode())
    return hasher.hexdigest()


BoolGrid = npt.NDArray[np.bool_]
FloatGrid = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

Scalar = TypeVar("Scalar", bound=np.generic)

MICROSECONDS = 1_000_000

THUMBNAIL_STRIDE = 4
"""Pixels from one to the next of those that picture statistics are made of, both ways."""


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Patch grid of one camera's frames: ``rows x cols`` patches of ``patch`` pixels.

    ``merge x merge`` patches make one visual token (a *group*); ``temporal`` samples make one frame. ``overlap``: the
    middle row and column of the picture's patches stand in the grid that many times more, as groups on both sides of
    them need them (see :attr:`sources`).
    """

    rows: int
    cols: int
    patch: int
    merge: int
    temporal: int
    overlap: int = field(default=0, compare=False, metadata={"wire": ""})

    @property
    def sources(self) -> npt.NDArray[np.int64]:
        """Row of the picture's patches that each row of the grid shows ``[rows]``; columns are the same."""
        rows = np.arange(self.rows)
        return rows - self.overlap * (rows >= -(-self.group_rows // 2) * 2)

    @property
    def pixel_sources(self) -> npt.NDArray[np.int64]:
        """Row of the scaled picture's pixels that each row of pixels shows ``[height]``; columns are the same."""
        pixels: npt.NDArray[np.int64] = (self.sources[:, None] * self.patch + np.arange(self.patch)).ravel()
        return pixels

    def shown(self, pixels: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Pixels of the scaled picture ``[scaled height, scaled width, ...]`` as the grid shows them."""
        return pixels[np.ix_(self.pixel_sources, self.pixel_sources)] if self.overlap else pixels

    @property
    def scaled(self) -> tuple[int, int]:
        """Height and width in pixels to scale pictures to, the grid's without its overlap."""
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

    Columns of a patch are summed in 16 bits first (255 x patch fits for any patch up to 257 pixels): several times
    faster than one reduction over two axes.
    """
    patch = grid.patch
    strips = np.add.reduce(plane.reshape(grid.rows, patch, grid.width), axis=1, dtype=np.uint16)
    # Sums of whole numbers are exact in any order, so that every implementation rounds a mean alike.
    sums: FloatGrid = strips.astype(np.float32).reshape(-1, patch) @ np.ones(patch, dtype=np.float32)
    means: FloatGrid = (sums / np.float32(patch * patch)).reshape(grid.rows, grid.cols)
    return means


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """A model family's patch geometry for decoders.

    ``square`` set: every camera is resized to ``square x square`` pixels (InternVL's tile), whose groups overlap in the
    middle where it has an odd number of patches (LLaVA-OneVision's). Otherwise the grid follows
    the camera's shape within ``max_pixels`` (Qwen's native resolution).
    """

    patch: int
    merge: int
    temporal: int
    max_pixels: int = 448 * 448
    min_pixels: int = 56 * 56
    square: int | None = None

    @property
    def largest(self) -> PatchGrid:
        """The patch grid for a square picture of the most pixels."""
        side = self.square or math.isqrt(self.max_pixels)
        return self.grid(side, side)

    def grid(self, width: int, height: int) -> PatchGrid:
        """The patch grid for a camera of ``width x height`` native pixels. Raises ``ValueError``: a side is not
        positive."""
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
    """One encoded packet from a source. ``data``: Annex-B for H.264/HEVC, else the container's own framing.

    ``sequence`` counts packets of one session from 0 without holes; a hole is a gap in transport. ``discard``: its
    picture is decoded for others that refer to it, and not shown: a trimmed recording leaves it out.
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
        """``dts``, or ``pts`` without one. Of a camera with B-frames only ``dts`` ascends from packet to packet."""
        return self.dts if self.dts is not None else self.pts


@dataclass(frozen=True, slots=True)
class ChangeGrid:
    """Codec change since the last sample, on the patch grid.

    All planes are ``[rows, cols]`` float32.

    * ``max_motion``: largest single displacement of any block over the cell, native pixels per frame
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
    """Where a sampled picture stands in its stream, and on which grid it is seen.

    ``fresh``: a scene begins here, and nothing before this sample is of it: stream start, another grid, a clock that
    jumped. ``gap``: video before this sample is missing, and what came before that is still true; never with ``fresh``.
    ``hidden`` ``[rows, cols]``: cells that privacy masks cover as a whole and that are black; ``None`` where there are
    none. ``repeated``: the picture is that of the sample before, as nothing happened in the undecoded video since.
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
        """It needs no sample before it: what it shows is not to be compared with what was seen last."""
        return self.fresh or self.gap


@dataclass(frozen=True, slots=True)
class SampledPicture(PictureHeader):
    """One sampled picture, resized to the patch grid, with what changed since the last one (codec -> vision).

    ``rgb`` is ``[height, width, 3]`` uint8, ``luma`` ``[height, width]`` uint8, both on the grid's pixels.
    """

    rgb: UInt8Array
    luma: UInt8Array
    change: ChangeGrid

    def host_rgb(self) -> UInt8Array:
        """``rgb``; other samples have it elsewhere."""
        return self.rgb


class ShownPicture(Protocol):
    """A sample that can be shown to people, wherever its pixels are."""

    @property
    def index(self) -> int: ...

    @property
    def pts(self) -> int: ...

    @property
    def grid(self) -> PatchGrid: ...

    def host_rgb(self) -> UInt8Array:
        """``[height, width, 3]`` uint8; may have to fetch it."""
        ...
