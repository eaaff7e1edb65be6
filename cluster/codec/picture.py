"""Sample pixels on the patch grid, and luma difference between samples."""

from typing import Any

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from cluster.codec.privacy import covered
from cluster.types import BoolGrid, FloatGrid, PatchGrid, UInt8Array


class PictureScaler:
    """Scales pictures to the grid's pixels: planar first, then to RGB at the small size.

    Against scaling straight to RGB this is three times as fast, gives the luma plane for nothing, and is nearer to an
    exact area average (48 against 44 dB at 768 x 432, 52 against 43 at 1080p). AREA, since FAST_BILINEAR saves 5 % of a
    sample there and none of its aliasing (20 dB on a textured 1080p picture).
    """

    def __init__(self, grid: PatchGrid) -> None:
        self._grid = grid
        # A reformatter keeps its scaler between calls only while the parameters stay the same.
        self._scale = VideoReformatter()
        self._colour = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> tuple[UInt8Array, UInt8Array]:
        """``rgb [height, width, 3]`` and ``luma [height, width]``, uint8."""
        height, width = self._grid.scaled
        small = self._scale.reformat(frame, width, height, "yuv420p", interpolation=Interpolation.AREA, threads=1)
        plane = small.planes[0]
        # Typed as an object without a buffer; a row may be padded.
        memory: Any = plane
        luma: UInt8Array = np.frombuffer(memory, np.uint8).reshape(-1, plane.line_size)[:height, :width].copy()
        rgb = self._colour.reformat(small, format="rgb24", interpolation=Interpolation.FAST_BILINEAR, threads=1)
        pixels: Any = rgb.to_ndarray()
        if self._grid.overlap:
            shown = np.ix_(self._grid.pixel_sources, self._grid.pixel_sources)
            return pixels[shown], luma[shown]
        return pixels, luma


class LumaDifference:
    """Mean absolute luma difference per patch between consecutive samples, without the global gain (median).

    Pixels that are black by a privacy mask (``masked``, of the camera's own picture) differ by nothing, and say nothing
    of the gain.
    """

    def __init__(self, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        self._grid = grid
        self._black = None if masked is None else covered(masked, grid.height, grid.width)
        self._seen = None if self._black is None else ~self._black[::8, ::8].ravel()
        self._last: UInt8Array | None = None
        # Kept between samples: fresh memory of this size costs more in page faults than the arithmetic on it.
        self._difference: npt.NDArray[np.int16] = np.empty((grid.height, grid.width), np.int16)

    def reset(self) -> None:
        self._last = None

    def __call__(self, luma: UInt8Array) -> FloatGrid:
        """``[rows, cols]`` grey levels; zeros for the first sample after a reset."""
        grid = self._grid
        last, self._last = self._last, luma
        if last is None:
            return np.zeros((grid.rows, grid.cols), np.float32)
        difference = self._difference
        np.subtract(luma, last, out=difference, dtype=np.int16)
        # Exposure and flicker shift the whole picture; a median over every 8th pixel each way is as good as over all.
        some = difference[::8, ::8].ravel()
        if self._seen is not None and self._seen.any():
            some = some[self._seen]
        difference -= np.partition(some, some.size // 2)[some.size // 2]
        np.abs(difference, out=difference)
        if self._black is not None:
            np.copyto(difference, np.int16(0), where=self._black)
        # 16 bits hold the sum of a patch's column (patch <= 64), and add four times as many at once.
        columns = np.add.reduce(difference.reshape(grid.rows, grid.patch, grid.width), axis=1, dtype=np.int16)
        sums = np.add.reduce(columns.reshape(grid.rows, grid.cols, grid.patch), axis=2, dtype=np.int32)
        mean: FloatGrid = sums.astype(np.float32) / np.float32(grid.patch**2)
        return mean
