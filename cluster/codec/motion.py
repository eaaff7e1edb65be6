"""Motion vector planes on the patch grid (step 2).

Every block lies inside one 16 x 16 macroblock, so vectors are averaged per macroblock, weighted by block area, and
macroblocks are distributed over patches by shared area: ``Ry @ plane @ Rx``. This equals the mean of a full
rasterisation to within a macroblock, at a few dozen numpy calls per picture.
"""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame

from cluster.types import BoolGrid, FloatGrid, PatchGrid

_BLOCK = 16

_MOST_WAITING = 1 << 14
"""Vectors buffered per camera before they are processed: 640 KiB."""

# More than any decoder's reference and reorder depth (H.264: 16 + 16).
_DEPTH = 33

# The fields read of struct AVMotionVector (libavutil/motion_vector.h).
VECTOR = np.dtype(
    {
        "names": ["source", "w", "h", "dst_x", "dst_y", "motion_x", "motion_y", "motion_scale"],
        "formats": ["<i4", "u1", "u1", "<i2", "<i2", "<i4", "<i4", "<u2"],
        "offsets": [0, 4, 5, 10, 12, 24, 28, 32],
        "itemsize": 40,
    }
)

# PyAV's stubs declare neither the container's constructor nor that side data is a buffer.
_container: Any = SideDataContainer

Vectors = npt.NDArray[np.void]
Plane = npt.NDArray[np.float64]


def frame_vectors(frame: VideoFrame) -> Vectors | None:
    """A picture's vectors ``[n]`` (see VECTOR), None if it carries none. The array is valid as long as the frame.

    ``frame.side_data`` would create a reference cycle, and pictures would pile up until garbage collection; a container
    made here avoids it. That saves 0.15 to 0.5 ms a frame at 768 x 432.
    """
    try:
        data = _container(frame)[SideDataType.MOTION_VECTORS]
    except KeyError:
        return None
    vectors: Vectors = np.frombuffer(data, VECTOR)
    return vectors


def overlap(pixels: int, source: int, cells: int) -> FloatGrid:
    """Share ``[cells, source]`` of each of ``cells`` equal cells over ``pixels`` that each block covers."""
    edges = np.linspace(0.0, pixels, cells + 1)
    starts = np.arange(source) * float(_BLOCK)
    low = np.maximum(edges[:-1, None], starts[None, :])
    high = np.minimum(edges[1:, None], starts[None, :] + _BLOCK)
    shared: FloatGrid = (np.clip(high - low, 0.0, None) * (cells / pixels)).astype(np.float32)
    return shared


class MotionField:
    """Accumulates the vectors of all pictures since the last sample, for one picture size and grid.

    Pictures are processed in batches, as numpy's call overhead would dominate otherwise. Macroblocks touched by
    ``masked`` ``[height, width]`` count as motionless.
    """

    def __init__(self, width: int, height: int, grid: PatchGrid, masked: BoolGrid | None = None) -> None:
        blocks_down, blocks_across = -(-height // _BLOCK), -(-width // _BLOCK)
        # One extra row and column that no patch covers, for blocks that cropping hides.
        self._rows, self._cols = blocks_down + 1, blocks_across + 1
        self._count = self._rows * self._cols
        down = overlap(height, self._rows, grid.rows - grid.overlap)
        across = overlap(width, self._cols, grid.cols - grid.overlap)
        if grid.overlap:
            down, across = down[grid.sources], across[grid.sources]
        self._down, self._across = down, across.T.copy()
        self._shape = (grid.rows, grid.cols)
        self._seen = None if masked is None else self._without(masked)
        self.reset()

    def reset(self) -> None:
        self._x: Plane = np.zeros(self._count)
        self._y: Plane = np.zeros(self._count)
        self._fastest: FloatGrid = np.zeros(self._shape, np.float32)
        self._intra: FloatGrid = np.zeros(self._shape, np.float32)
        self._pictures: list[bytes] = []
        self._reach: list[tuple[float, float]] = []
        self._waiting = 0
        self._moved = False

    def add_uncovered(self) -> None:
        """Add an inter picture without vectors: all of it is new content."""
        self._add_uncovered(np.ones((1, self._count), np.bool_))

    def add_vectors(self, vectors: Vectors, past: float, future: float) -> None:
        """Add one inter picture. ``past`` and ``future`` scale its vectors (see ReferenceDistance)."""
        self._pictures.append(vectors.tobytes())
        self._reach.append((-past, future))
        self._waiting += vectors.size
        if self._waiting >= _MOST_WAITING:
            self._fold()

    def _fold(self) -> None:
        sizes = [len(each) // VECTOR.itemsize for each in self._pictures]
        vectors: Vectors = np.frombuffer(b"".join(self._pictures), VECTOR)
        picture = np.repeat(np.arange(len(sizes)), sizes)
        reach = np.array(self._reach)
        self._pictures, self._reach, self._waiting = [], [], 0
        block = np.multiply(vectors["dst_y"] >> 4, self._cols, dtype=np.intp)
        block += vectors["dst_x"] >> 4
        if block.size and block.max() >= self._count:
            # Blocks in coded rows that are cropped.
            inside = block < self._count
            vectors, block, picture = vectors[inside], block[inside], picture[inside]
        area = np.multiply(vectors["w"], vectors["h"], dtype=np.float64)
        own = picture * self._count + block
        covered = np.bincount(own, area, len(sizes) * self._count)
        bare = covered.reshape(len(sizes), self._rows, self._cols) == 0.0
        if bare[:, :-1, :-1].any():
            self._add_uncovered(bare.reshape(len(sizes), self._count))
        x, y = vectors["motion_x"], vectors["motion_y"]
        moving = np.flatnonzero((x | y) != 0)
        if self._seen is not None:
            moving = moving[self._seen[block[moving]]]
        if moving.size == 0:
            return
        self._moved = True
        # A vector points from the block to its reference, so motion over time is reversed for past references.
        ahead = (vectors["source"][moving] >= 0).astype(np.intp)
        factor = reach[picture[moving], ahead] / float(vectors["motion_scale"][0])
        x, y = x[moving] * factor, y[moving] * factor
        own, block = own[moving], block[moving]
        share = area[moving] / covered[own]
        self._x += np.bincount(block, share * x, self._count)
        self._y += np.bincount(block, share * y, self._count)
        speed = np.bincount(own, share * np.hypot(x, y), len(sizes) * self._count)
        self._raise(self._fastest, speed.reshape(len(sizes), self._count))

    def _add_uncovered(self, blocks: BoolGrid) -> None:
        """Add uncovered macroblocks ``[pictures, count]``."""
        if self._seen is not None:
            blocks = blocks & self._seen
        self._raise(self._intra, blocks)

    def _raise(self, cells: FloatGrid, blocks: npt.NDArray[Any]) -> None:
        """Raise ``cells`` to the largest mean over each of ``blocks [pictures, count]``."""
        planes = blocks.reshape(-1, self._rows, self._cols).astype(np.float32)
        np.maximum(cells, (self._down @ planes @ self._across).max(axis=0), out=cells)

    def _without(self, masked: BoolGrid) -> BoolGrid:
        """Mask ``[count]`` of macroblocks without a masked pixel."""
        height, width = masked.shape
        padded = np.zeros((self._rows * _BLOCK, self._cols * _BLOCK), np.bool_)
        padded[:height, :width] = masked
        seen: BoolGrid = ~padded.reshape(self._rows, _BLOCK, self._cols, _BLOCK).any(axis=(1, 3)).ravel()
        return seen

    def pop_planes(self) -> tuple[FloatGrid, FloatGrid, FloatGrid]:
        """Planes ``max_motion, net_motion, intra``, each ``[rows, cols]`` (see ChangeGrid); resets the accumulator."""
        if self._pictures:
            self._fold()
        if not self._moved:
            still = np.zeros(self._shape, np.float32)
            planes = still, still, self._intra
            self.reset()
            return planes
        shape = (self._rows, self._cols)
        x = self._down @ self._x.reshape(shape).astype(np.float32) @ self._across
        y = self._down @ self._y.reshape(shape).astype(np.float32) @ self._across
        planes = self._fastest, np.hypot(x, y), self._intra
        self.reset()
        return planes


class ReferenceDistance:
    """Temporal distance of motion vectors, of which FFmpeg exports only the sign.

    Scales a picture's vectors to the motion since the previously displayed picture. With B-frames or temporal layers
    (SVC-T), a P-frame's vector spans several pictures, and a B-frame's points both ways; adding unscaled vectors would
    count motion twice. Encoders nearly always use the nearest reference, so vectors are scaled by ``(pts - shown) /
    (pts - nearest past reference)`` and ``(pts - shown) / (nearest future reference - pts)``.
    """

    def __init__(self) -> None:
        self._decoded: deque[tuple[int, bool]] = deque(maxlen=_DEPTH)
        self._shown: int | None = None

    def reset(self) -> None:
        self._decoded.clear()
        self._shown = None

    def record_decoded(self, pts: int | None, reference: bool) -> None:
        if pts is not None:
            self._decoded.append((pts, reference))

    def scale_factors(self, pts: int | None) -> tuple[float, float]:
        """Factors for vectors to past and future references; (1, 1) if times are unknown."""
        before, self._shown = self._shown, pts
        if pts is None or before is None or before >= pts:
            return 1.0, 1.0
        past: int | None = None
        future: int | None = None
        for time, reference in self._decoded:
            if time == pts:
                break
            if not reference:
                continue
            if time < pts:
                past = time if past is None else max(past, time)
            else:
                future = time if future is None else min(future, time)
        step = pts - before
        return (
            1.0 if past is None else min(1.0, step / (pts - past)),
            1.0 if future is None else min(1.0, step / (future - pts)),
        )
