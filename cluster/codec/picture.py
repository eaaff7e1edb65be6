"""Scales pictures to the patch grid, draws zone outlines, and measures the luma difference between samples.

Zones are regions of a camera's picture outlined for the model, so that a question can say "the red zone". Drawing a
mark points a model without region input at a region (Shtedritski et al. 2023, "What does CLIP know about a red
circle?"; Yang et al. 2023, "Set-of-Mark Prompting"). Outlines are drawn on samples at model resolution, in RGB only:
luma, from which change is measured, has none, nor have clips and the live view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from cluster.codec.privacy import Polygon, covered_pixels, fill
from cluster.types import BoolGrid, FloatGrid, PatchGrid, UInt8Array, cell_means


class PictureScaler:
    """Scales pictures to the grid's resolution in YUV, then converts the small picture to RGB.

    Compared with scaling straight to RGB, this is three times as fast, yields the luma plane for free, and is closer to
    an exact area average (48 against 44 dB at 768 x 432, 52 against 43 at 1080p). AREA, since FAST_BILINEAR would save
    only 5 % of a sample's time and alias (20 dB on a textured 1080p picture).
    """

    def __init__(self, grid: PatchGrid) -> None:
        self._grid = grid
        # A reformatter reuses its scaler only while the parameters stay the same: one for each step.
        self._scale = VideoReformatter()
        self._colour = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> tuple[UInt8Array, UInt8Array]:
        """``rgb [height, width, 3]`` and ``luma [height, width]``, uint8."""
        height, width = self._grid.scaled
        small = self._scale.reformat(frame, width, height, "yuv420p", interpolation=Interpolation.AREA, threads=1)
        plane = small.planes[0]
        # PyAV's stubs do not declare the buffer protocol. Rows may be padded.
        memory: Any = plane
        luma: UInt8Array = np.frombuffer(memory, np.uint8).reshape(-1, plane.line_size)[:height, :width].copy()
        rgb: Any = self._colour.reformat(small, format="rgb24", interpolation=Interpolation.FAST_BILINEAR, threads=1)
        return self._grid.shown(rgb.to_ndarray()), self._grid.shown(luma)


class LumaDifference:
    """Mean absolute luma difference per patch between consecutive samples, less the global gain (median difference).

    Pixels under a privacy mask (``masked``, at the camera's resolution) have difference zero and do not enter the gain.
    """

    def __init__(self, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self._grid = grid
        self._black = None if masked is None else covered_pixels(masked, grid)
        self._seen = None if self._black is None else ~self._black[::8, ::8].ravel()
        self._last: UInt8Array | None = None
        # Reused between samples: page faults on a new buffer of this size would cost more than the arithmetic.
        self._difference: npt.NDArray[np.int16] = np.empty((grid.height, grid.width), np.int16)

    def reset(self) -> None:
        self._last = None

    def __call__(self, luma: UInt8Array) -> FloatGrid:
        """Difference ``[rows, cols]`` in grey levels; zeros for the first sample after a reset."""
        grid = self._grid
        last, self._last = self._last, luma
        if last is None:
            return np.zeros((grid.rows, grid.cols), np.float32)
        difference = self._difference
        np.subtract(luma, last, out=difference, dtype=np.int16)
        # Exposure and flicker shift the whole picture. The median of every 8th row and column is accurate enough.
        subset = difference[::8, ::8].ravel()
        if self._seen is not None and self._seen.any():
            subset = subset[self._seen]
        difference -= np.partition(subset, subset.size // 2)[subset.size // 2]
        np.abs(difference, out=difference)
        if self._black is not None:
            np.copyto(difference, np.int16(0), where=self._black)
        return cell_means(difference.view(np.uint16), grid)


COLOURS = {"red": (255, 40, 40), "yellow": (255, 220, 0), "blue": (40, 110, 255), "green": (0, 220, 90)}
"""Outline colours of a camera's first, second, … zone: name, as used in questions, and RGB."""

_LINES = 120


@dataclass(frozen=True, slots=True, eq=False)
class Outlines:
    """Zone outlines on one grid: the mask ``drawn`` ``[height, width]``, and ``colours`` ``[height, width, 3]``."""

    drawn: BoolGrid
    colours: UInt8Array

    def draw(self, rgb: UInt8Array) -> UInt8Array:
        """The picture ``[height, width, 3]`` with the outlines drawn."""
        return np.where(self.drawn[..., None], self.colours, rgb)


def outline_zones(zones: Sequence[Polygon], grid: PatchGrid) -> Outlines | None:
    """Outlines along the inside of each polygon, 1/120 of the picture's height and at least two pixels wide; None
    without zones. Where zones overlap, the later one is drawn on top.
    """
    if not zones:
        return None
    height, width = grid.scaled
    drawn, colours = np.zeros((height, width), np.bool_), np.zeros((height, width, 3), np.uint8)
    for zone, colour in zip(zones, COLOURS.values(), strict=False):
        edge = _edge(fill(zone, width, height), max(2, round(height / _LINES)))
        drawn |= edge
        colours[edge] = colour
    return Outlines(grid.shown(drawn), grid.shown(colours))


def _edge(inside: BoolGrid, pixels: int) -> BoolGrid:
    """Inside pixels at most ``pixels`` steps from an outside one; beyond the picture's border is outside."""
    inner = np.pad(inside, 1)
    for _ in range(pixels):
        core = inner[1:-1, 1:-1] & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
        inner = np.pad(core, 1)
    edge: BoolGrid = inside & ~inner[1:-1, 1:-1]
    return edge
