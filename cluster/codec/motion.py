"""Motion vectors to planes on the patch grid (step 2).

Every block lies inside one 16 x 16 macroblock, so vectors are gathered per macroblock, weighted by their whole
rectangle's area, and macroblocks are spread over patches by the area they share: ``Ry @ plane @ Rx``. That is the mean
of a full rasterisation to within a macroblock, for a few dozen numpy calls a picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame

from cluster.types import FloatGrid, PatchGrid

_BLOCK = 16

# struct AVMotionVector (libavutil/motion_vector.h), of which these fields are read.
VECTOR = np.dtype(
    {
        "names": ["source", "w", "h", "dst_x", "dst_y", "motion_x", "motion_y", "motion_scale"],
        "formats": ["<i4", "u1", "u1", "<i2", "<i2", "<i4", "<i4", "<u2"],
        "offsets": [0, 4, 5, 10, 12, 24, 28, 32],
        "itemsize": 40,
    }
)

# PyAV's stubs tell neither the container's constructor nor that side data is a buffer.
_container: Any = SideDataContainer

Vectors = npt.NDArray[np.void]
Plane = npt.NDArray[np.float64]


def frame_vectors(frame: VideoFrame) -> Vectors | None:
    """A picture's vectors ``[n]`` (see VECTOR), None when it carries none. The array lives no longer than the frame.

    ``frame.side_data`` would tie the frame into a reference cycle, so that pictures pile up until the garbage collector
    comes; a container of our own has none. That is worth 0.15 to 0.5 ms a frame at 768 x 432.
    """
    try:
        data = _container(frame)[SideDataType.MOTION_VECTORS]
    except KeyError:
        return None
    vectors: Vectors = np.frombuffer(data, VECTOR)
    return vectors


def overlap(pixels: int, source: int, cells: int) -> FloatGrid:
    """``[cells, source]``: the share of each of ``cells`` equal cells over ``pixels`` that lies on each block."""
    edges = np.linspace(0.0, pixels, cells + 1)
    starts = np.arange(source) * float(_BLOCK)
    low = np.maximum(edges[:-1, None], starts[None, :])
    high = np.minimum(edges[1:, None], starts[None, :] + _BLOCK)
    shared: FloatGrid = (np.clip(high - low, 0.0, None) * (cells / pixels)).astype(np.float32)
    return shared


class MotionField:
    """Folds the vectors of every picture since the last sample, for pictures of one size on one grid."""

    def __init__(self, width: int, height: int, grid: PatchGrid) -> None:
        blocks_down, blocks_across = -(-height // _BLOCK), -(-width // _BLOCK)
        self._blocks = blocks_down * blocks_across
        # One row and column more than there are blocks, which no patch lies on: reduceat needs them after the edge.
        self._rows, self._cols = blocks_down + 1, blocks_across + 1
        self._count = self._rows * self._cols
        self._down = overlap(height, self._rows, grid.rows)
        self._across = overlap(width, self._cols, grid.cols).T.copy()
        self._row_spans = _spans(self._down)
        self._col_spans = _spans(self._across.T)
        self._shape = (grid.rows, grid.cols)
        self.reset()

    def reset(self) -> None:
        self._x: Plane = np.zeros(self._count)
        self._y: Plane = np.zeros(self._count)
        self._fastest: Plane = np.zeros(self._count)
        self._intra: FloatGrid = np.zeros(self._shape, np.float32)

    def add_uncovered(self) -> None:
        """An inter picture without a single vector: all of it is new content."""
        self._intra[:] = 1.0

    def add(self, vectors: Vectors, past: float, future: float) -> None:
        """Fold one inter picture. ``past`` and ``future`` scale its vectors (see ReferenceDistance)."""
        block = np.multiply(vectors["dst_y"] >> 4, self._cols, dtype=np.intp)
        block += vectors["dst_x"] >> 4
        area = np.multiply(vectors["w"], vectors["h"], dtype=np.float64)
        covered = np.bincount(block, area, self._count)
        if covered.size > self._count:
            # Blocks of coded rows that cropping hides.
            inside = block < self._count
            vectors, block, area, covered = vectors[inside], block[inside], area[inside], covered[: self._count]
        if np.count_nonzero(covered) < self._blocks:
            plane = (covered == 0.0).reshape(self._rows, self._cols).astype(np.float32)
            np.maximum(self._intra, self._down @ plane @ self._across, out=self._intra)
        x, y = vectors["motion_x"], vectors["motion_y"]
        moving = np.flatnonzero(x | y)
        if moving.size == 0:
            return
        block = block[moving]
        # A vector points from the block to its reference: content came from a past one, goes to a future one.
        scale = float(vectors["motion_scale"][0])
        factor = np.where(vectors["source"][moving] < 0, -past / scale, future / scale)
        x, y = x[moving] * factor, y[moving] * factor
        share = area[moving] / covered[block]
        self._x += np.bincount(block, share * x, self._count)
        self._y += np.bincount(block, share * y, self._count)
        np.maximum.at(self._fastest, block, np.hypot(x, y))

    def take(self) -> tuple[FloatGrid, FloatGrid, FloatGrid]:
        """``max_motion, net_motion, intra``, each ``[rows, cols]`` (see ChangeGrid); starts anew."""
        shape = (self._rows, self._cols)
        x = self._down @ self._x.reshape(shape).astype(np.float32) @ self._across
        y = self._down @ self._y.reshape(shape).astype(np.float32) @ self._across
        fastest = np.maximum.reduceat(self._fastest.reshape(shape), self._row_spans, axis=0)[::2]
        fastest = np.maximum.reduceat(fastest, self._col_spans, axis=1)[:, ::2]
        planes = fastest.astype(np.float32), np.hypot(x, y), self._intra
        self.reset()
        return planes


def _spans(shares: FloatGrid) -> npt.NDArray[np.intp]:
    """Start and end of each cell's non-zero blocks, interleaved as ``ufunc.reduceat`` wants them."""
    touched = shares > 1e-6
    starts = touched.argmax(axis=1)
    ends = touched.shape[1] - touched[:, ::-1].argmax(axis=1)
    return np.stack([starts, ends], axis=1).ravel()
