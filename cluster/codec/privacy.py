"""Privacy masks: regions of a camera's picture painted black right after decoding.

A mask is a polygon in fractions of the picture, valid at every resolution. Every pixel it touches is black, by the
nonzero winding rule, which covers a superset of the even-odd rule: an unintended hole is worse than a covered corner.

Masks are applied at native resolution before scaling, so nothing derived from the picture depends on masked pixels;
clips use the same code.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from cluster.types import BoolGrid, PatchGrid

Point: TypeAlias = tuple[float, float]
Polygon: TypeAlias = tuple[Point, ...]

_PLANAR = frozenset(
    [f"yuv{j}{form}p" for form in ("410", "411", "420", "422", "440", "444") for j in ("", "j")] + ["gray"]
)
"""Planar 8-bit formats, masked in place; others are converted first."""

_FULL_RANGE = 2
_NEUTRAL = 128


class PrivacyMasks:
    """All masks of one camera, for pictures of any size and format; used from one thread. ``polygons``: each of at
    least three points ``(x, y)``, as fractions of width and height from the top left."""

    def __init__(self, polygons: Sequence[Polygon]) -> None:
        self.polygons = tuple(polygons)
        self._size = (0, 0, "")
        self._areas: list[_Area] = []

    def __bool__(self) -> bool:
        return bool(self.polygons)

    def apply(self, frame: VideoFrame) -> VideoFrame:
        """Paint masked pixels black; returns the frame unchanged without masks.

        Works in place where possible (do not use the given frame afterwards); copies pictures that the decoder still
        references.
        """
        if not self.polygons:
            return frame
        if frame.format.name not in _PLANAR:
            frame = frame.reformat(format=_planar(frame))
        frame.make_writable()
        if any(plane.line_size <= 0 for plane in frame.planes):
            raise ValueError("a picture stored bottom-up cannot be masked")
        size = (frame.width, frame.height, frame.format.name)
        if size != self._size:
            self._areas, self._size = _areas(self.polygons, frame), size
        black = 0 if frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj") else 16
        for area in self._areas:
            plane = frame.planes[area.plane]
            memory: Any = plane
            pixels = np.frombuffer(memory, np.uint8).reshape(-1, plane.line_size)[area.rows, area.columns]
            level = _NEUTRAL if area.plane else black
            if area.inside is None:
                pixels[:] = level
            else:
                np.copyto(pixels, np.uint8(level), where=area.inside)
        return frame

    def raster(self, width: int, height: int) -> BoolGrid:
        """Mask of the hidden pixels, bool ``[height, width]``."""
        found = np.zeros((height, width), np.bool_)
        for polygon in self.polygons:
            found |= fill(polygon, width, height)
        return found


class _Area:
    """One mask on one plane: its bounding rectangle, and the mask within it (None: the whole rectangle)."""

    def __init__(self, plane: int, raster: BoolGrid) -> None:
        rows, columns = np.flatnonzero(raster.any(axis=1)), np.flatnonzero(raster.any(axis=0))
        self.plane = plane
        self.rows = slice(int(rows[0]), int(rows[-1]) + 1)
        self.columns = slice(int(columns[0]), int(columns[-1]) + 1)
        part = raster[self.rows, self.columns]
        self.inside: BoolGrid | None = None if part.all() else part.copy()


def _planar(frame: VideoFrame) -> str:
    """Planar format to convert to, with chroma no coarser, so that masked colours do not bleed."""
    chroma = [component for component in frame.format.components if component.is_chroma]
    if not chroma or chroma[0].width == frame.width:
        return "yuv444p"
    return "yuv422p" if chroma[0].height == frame.height else "yuv420p"


def _areas(polygons: Sequence[Polygon], frame: VideoFrame) -> list[_Area]:
    found = []
    for polygon in polygons:
        raster = fill(polygon, frame.width, frame.height)
        for component in frame.format.components:
            found.append(_Area(component.plane, shrink(raster, component.width, component.height)))
    return found


def shrink(raster: BoolGrid, width: int, height: int) -> BoolGrid:
    """Mask of a subsampled plane: samples of which any part is masked."""
    if raster.shape == (height, width):
        return raster
    # Subsampling factors are powers of two; the last sample may cover fewer pixels.
    rows, cols = (
        np.arange(samples) << ((pixels - 1) // samples).bit_length()
        for pixels, samples in zip(raster.shape, (height, width), strict=True)
    )
    small: BoolGrid = np.logical_or.reduceat(np.logical_or.reduceat(raster, rows, axis=0), cols, axis=1)
    return small


def fill(polygon: Polygon, width: int, height: int) -> BoolGrid:
    """Mask ``[height, width]`` of all pixels that the polygon covers or touches.

    A pixel that no edge crosses is entirely inside or outside: its centre decides.
    """
    # Restricted to the bounding rectangle: a picture of millions of pixels may have many small masks.
    top, bottom = _around([y for _, y in polygon], height)
    left, right = _around([x for x, _ in polygon], width)
    corners = [(x * width - left, y * height - top) for x, y in polygon]
    crossings = np.zeros((bottom - top, right - left + 1), np.int16)
    touched = np.zeros_like(crossings)
    for start, end in zip(corners, corners[1:] + corners[:1], strict=True):
        _cross(crossings, start, end)
        _touch(touched, start, end)
    inside = np.cumsum(crossings, axis=1, dtype=np.int16) != 0
    inside |= np.cumsum(touched, axis=1, dtype=np.int16) > 0
    filled = np.zeros((height, width), np.bool_)
    filled[top:bottom, left:right] = inside[:, :-1]
    return filled


def _around(shares: Sequence[float], pixels: int) -> tuple[int, int]:
    """Range of pixels, end exclusive, that a polygon touches along one axis."""
    return min(int(min(shares) * pixels), pixels - 1), min(int(max(shares) * pixels), pixels - 1) + 1


def _cross(crossings: npt.NDArray[np.int16], start: Point, end: Point) -> None:
    """Count where an edge crosses the rows' centre lines: +1 downwards, -1 upwards, for all pixels to its right."""
    (x0, y0), (x1, y1), sign = (start, end, 1) if start[1] < end[1] else (end, start, -1)
    rows = np.arange(max(0, int(np.ceil(y0 - 0.5))), min(len(crossings), int(np.ceil(y1 - 0.5))))
    if rows.size:
        x = x0 + (rows + 0.5 - y0) * (x1 - x0) / (y1 - y0)
        columns = np.clip(np.ceil(x - 0.5).astype(np.intp), 0, crossings.shape[1] - 1)
        crossings[rows, columns] += sign


def _touch(touched: npt.NDArray[np.int16], start: Point, end: Point) -> None:
    """Mark the pixels an edge passes through: +1 at the first one of each row, -1 after the last."""
    height, width = len(touched), touched.shape[1] - 1
    (x0, y0), (x1, y1) = (start, end) if start[1] <= end[1] else (end, start)
    rows = np.arange(min(max(int(y0), 0), height - 1), min(int(y1), height - 1) + 1)
    if y1 > y0:
        slope = (x1 - x0) / (y1 - y0)
        top, bottom = np.clip(rows, y0, y1), np.clip(rows + 1, y0, y1)
        one, other = x0 + (top - y0) * slope, x0 + (bottom - y0) * slope
    else:
        one, other = np.full(rows.size, x0), np.full(rows.size, x1)
    first = np.clip(np.floor(np.minimum(one, other)).astype(np.intp), 0, width - 1)
    last = np.clip(np.floor(np.maximum(one, other)).astype(np.intp), 0, width - 1)
    touched[rows, first] += 1
    touched[rows, last + 1] -= 1


def covered(raster: BoolGrid, rows: int, cols: int) -> BoolGrid:
    """Mask ``[rows, cols]`` of the cells, out of ``rows x cols`` equal ones, that are fully masked."""
    down: BoolGrid = np.logical_and.reduceat(_padded(raster), _edges(raster.shape[0], rows), axis=0)[::2]
    across: BoolGrid = np.logical_and.reduceat(_padded(down.T), _edges(raster.shape[1], cols), axis=0)[::2]
    return across.T.copy()


def covered_cells(raster: BoolGrid, grid: PatchGrid) -> BoolGrid:
    """Mask ``[rows, cols]`` of the cells of ``grid`` that are fully masked."""
    found = covered(raster, grid.rows - grid.overlap, grid.cols - grid.overlap)
    return found[np.ix_(grid.sources, grid.sources)] if grid.overlap else found


def covered_pixels(raster: BoolGrid, grid: PatchGrid) -> BoolGrid:
    """Mask ``[height, width]`` of the grid's pixels that are fully masked."""
    return grid.shown(covered(raster, *grid.scaled))


def _padded(raster: BoolGrid) -> BoolGrid:
    """Append a row that no cell covers: reduceat needs an index past the last cell."""
    return np.concatenate([raster, np.ones((1, raster.shape[1]), np.bool_)])


def _edges(pixels: int, cells: int) -> npt.NDArray[np.intp]:
    """Pixel range of each cell, end exclusive, interleaved as ``ufunc.reduceat`` expects."""
    number = np.arange(cells)
    return np.stack([number * pixels // cells, -(-(number + 1) * pixels // cells)], axis=1).ravel().astype(np.intp)
