"""Thumbnails of what cameras saw, shown as evidence of answers about the past."""

import bisect
import io
import threading
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from cluster.types import MICROSECONDS, FrameSample, PatchGrid, UInt8Array


@dataclass(slots=True, eq=False)
class _Stream:
    """``canvas``: the current picture as the model sees it; ``times`` (ascending), ``files``: of the thumbnails."""

    grid: PatchGrid
    canvas: UInt8Array
    latest: int | None = None
    times: list[int] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)
    nbytes: int = 0

    def remove(self, places: slice) -> int:
        """Delete thumbnails by index; returns how many."""
        gone = self.files[places]
        self.nbytes -= sum(map(len, gone))
        del self.times[places], self.files[places]
        return len(gone)


class ThumbnailStore:
    """Small JPEGs of every stream, at most one per ``every_s`` of the memory's time. Thread-safe.

    A stream's thumbnails take at most ``cap_bytes``. When another does not fit, every second one of the older half is
    deleted, which thins out old ones evenly. Each stream also has a canvas onto which the patches of each frame are
    drawn, shrunk by the largest integer factor that keeps it as wide as the thumbnails, usually to half the model's
    resolution.

    Args:
        width: of the thumbnails in pixels; smaller pictures keep their size.
        every_s: seconds between two thumbnails, below the memory's ``RESTART_GAP``.
        cap_bytes: of one stream's thumbnails.
        quality: of the JPEGs, 1 to 95.
    """

    def __init__(
        self, width: int = 160, every_s: float = 8.0, cap_bytes: int = 4 * 2**20, *, quality: int = 70
    ) -> None:
        self.width, self.cap_bytes, self.quality = width, cap_bytes, quality
        self._every = max(1, round(every_s * MICROSECONDS))
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def add_frame(self, sample: FrameSample) -> None:
        """Draw a frame's patches onto the canvas, and store a thumbnail if one is due; ``pts`` is the memory's time.

        It goes back only when the memory restarts, which deletes the thumbnails of that time and later.
        """
        with self._lock:
            stream = self._streams.get(sample.stream)
            if stream is None:
                stream = self._streams[sample.stream] = _Stream(sample.grid, _canvas(sample.grid, self.width))
            elif stream.grid != sample.grid:
                stream.grid, stream.canvas = sample.grid, _canvas(sample.grid, self.width)
            if len(sample.patches):
                _draw(sample, stream.canvas)
            stream.latest = sample.pts
            stream.remove(slice(bisect.bisect_left(stream.times, sample.pts), None))
            if not stream.times or sample.pts - stream.times[-1] >= self._every:
                self._encode(stream, sample.pts)

    def nearest(self, stream: str, pts: int) -> bytes | None:
        """JPEG nearest to ``pts`` (microseconds); None if none is within ``every_s``."""
        with self._lock:
            held = self._streams.get(stream)
            if held is None or not held.times:
                return None
            after = bisect.bisect_left(held.times, pts)
            around = range(max(0, after - 1), min(len(held.times), after + 1))
            nearest = min(around, key=lambda place: abs(held.times[place] - pts))
            return held.files[nearest] if abs(held.times[nearest] - pts) <= self._every else None

    def newest_pts(self, stream: str) -> int | None:
        """Time of the latest frame; None before the first."""
        with self._lock:
            held = self._streams.get(stream)
            return None if held is None else held.latest

    def delete(self, stream: str, before_pts: int | None = None) -> int:
        """Delete a stream's thumbnails before a time, or all of its state; returns how many."""
        with self._lock:
            held = self._streams.get(stream)
            if held is None:
                return 0
            if before_pts is None:
                del self._streams[stream]
                return len(held.times)
            return held.remove(slice(0, bisect.bisect_left(held.times, before_pts)))

    def _encode(self, stream: _Stream, time: int) -> None:
        file = _jpeg(stream.canvas, self.width, self.quality)
        if len(file) > self.cap_bytes:
            return
        while stream.nbytes + len(file) > self.cap_bytes:
            half = len(stream.times) // 2
            # Too few to thin out: evict the oldest.
            stream.remove(slice(1, half, 2) if half > 1 else slice(0, 1))
        stream.times.append(time)
        stream.files.append(file)
        stream.nbytes += len(file)


def _side(grid: PatchGrid, width: int) -> int:
    """Pixels per drawn patch: the smallest divisor of its own size that leaves the picture as wide as ``width``."""
    divisors = (side for side in range(1, grid.patch) if grid.patch % side == 0)
    return next((side for side in divisors if side * grid.cols >= width), grid.patch)


def _canvas(grid: PatchGrid, width: int) -> UInt8Array:
    """Grey canvas ``[height, width, 3]`` of a scene not seen yet."""
    side = _side(grid, width)
    return np.full((grid.rows * side, grid.cols * side, 3), 128, dtype=np.uint8)


def _draw(sample: FrameSample, canvas: UInt8Array) -> None:
    """Draw the kept patches of the newest of the frame's ``T`` samples onto the canvas, at its scale.

    Patches are ordered as in :class:`~cluster.types.FrameSample`.
    """
    grid = sample.grid
    merge, side = grid.merge, canvas.shape[0] // grid.rows
    shrunk = _shrink(sample.patches[:, -1], side).reshape(-1, merge, merge, 3, side, side)
    cells = canvas.reshape(grid.group_rows, merge, side, grid.group_cols, merge, side, 3)
    # Masks are constant within groups, so one cell of each suffices.
    cells.transpose(0, 3, 1, 4, 6, 2, 5)[sample.mask[::merge, ::merge]] = shrunk


def _shrink(patches: UInt8Array, side: int) -> UInt8Array:
    """``[n, 3, p, p]`` -> ``[n, 3, side, side]``: means of squares; ``side`` divides ``p``."""
    factor = patches.shape[-1] // side
    if factor == 1:
        return patches
    # Sums of slices: several times faster than a mean over two short axes.
    total = np.full((*patches.shape[:2], side, side), factor**2 // 2, dtype=np.uint32)
    for down in range(factor):
        for across in range(factor):
            total += patches[:, :, down::factor, across::factor]
    means: UInt8Array = (total // factor**2).astype(np.uint8)
    return means


def _jpeg(canvas: UInt8Array, width: int, quality: int) -> bytes:
    picture = Image.fromarray(canvas)
    if picture.width > width:
        height = max(1, round(picture.height * width / picture.width))
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()
