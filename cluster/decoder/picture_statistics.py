"""Image statistics per sampled picture, for detecting frozen, covered and turned cameras."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.types import (
    MICROSECONDS,
    THUMBNAIL_STRIDE,
    FloatGrid,
    PictureHeader,
    PictureHealth,
    SampledPicture,
    UInt8Array,
)

STILL_LEVELS = 0.2
"""Luma difference, in grey levels, below which a cell counts as frozen: sensor noise is larger."""

CHANGED_LEVELS = 5.0
"""Luma difference above which a cell has visibly changed: the best threshold of the luma cue."""

FLAT_SPREAD = 6.0
"""Standard deviation of luma below which there is no scene to compare."""

ROWS, COLS = 9, 16
STRANGE_LEVELS, STRANGE_SPREAD = 10.0, 0.5
MOST = 0.5
ADAPT_S = 60.0
SETTLE_S = 300.0
LONGEST_GAP_S = 10.0
"""Longest gap between samples that counts as time in which the scene was seen: longer than between two keyframes, each
of which follows a gap while only keyframes are decoded."""


class PictureStatistics:
    """Statistics of one camera's samples; :attr:`health` is the last sample's, None before the first.

    The *reference scene* is a slow average (time constant ``ADAPT_S``) of block means. ``strangeness`` is the share of
    its blocks that differ from the picture's by both ``STRANGE_LEVELS`` grey levels and ``STRANGE_SPREAD`` of the
    reference's spread, after removing the median difference: neither exposure nor moving objects make most blocks
    strange. A picture with a share of ``MOST`` or more does not update the reference; after ``SETTLE_S`` of only such
    pictures the camera has been turned, and the newest becomes the reference.
    """

    def __init__(self) -> None:
        self.health: PictureHealth | None = None
        self._reference: npt.NDArray[np.float32] | None = None
        self._last_pts: int | None = None
        self._familiar_pts = 0
        self._still_since = 0

    def add_sample(self, frame: SampledPicture) -> None:
        """Process one sample. Samples are in order of ``pts``, except that the clock may restart at a ``fresh`` one."""
        self.add(frame, frame.luma[::THUMBNAIL_STRIDE, ::THUMBNAIL_STRIDE], frame.change.luma)

    def add(self, frame: PictureHeader, thumbnail: UInt8Array, difference: FloatGrid) -> None:
        """Process a sample given as its luma at every ``THUMBNAIL_STRIDE`` pixels, and its ``ChangeGrid.luma``."""
        seen, scene = thumbnail, block_means(thumbnail)
        if frame.hidden is not None and not frame.hidden.all():
            # Exclude privacy masks: they are not part of the scene, and a covered lens changes only the rest.
            sides = frame.grid.height, frame.grid.width
            rows, cols = (np.arange(0, side, THUMBNAIL_STRIDE) // frame.grid.patch for side in sides)
            shown = ~frame.hidden[np.ix_(rows, cols)]
            blocks = block_means(shown.view(np.uint8)) > 0.5
            seen, difference = thumbnail[shown], difference[~frame.hidden]
            scene = scene[blocks] if blocks.any() else scene
        luma, spread = _moments(seen)
        if self._last_pts is None or frame.pts <= self._last_pts:
            self._last_pts = self._familiar_pts = frame.pts
        elif frame.random_access:
            unseen = max(0, frame.pts - self._last_pts - round(LONGEST_GAP_S * MICROSECONDS))
            self._last_pts += unseen
            self._familiar_pts += unseen
        if frame.random_access or float(difference.max()) >= STILL_LEVELS:
            # What happened in a gap is unknown: restart the stillness count.
            self._still_since = frame.pts
        self.health = PictureHealth(
            pts=frame.pts,
            changed=np.count_nonzero(difference > CHANGED_LEVELS) / difference.size,
            still_s=(frame.pts - self._still_since) / MICROSECONDS,
            luma=luma,
            spread=spread,
            strangeness=self._strangeness(scene, spread, frame.pts),
        )
        self._last_pts = frame.pts

    def _strangeness(self, scene: npt.NDArray[np.float32], spread: float, pts: int) -> float:
        elapsed = pts - (self._last_pts or pts)
        if spread < FLAT_SPREAD:
            # A covered lens must not become the reference scene.
            self._familiar_pts += elapsed
            return 0.0
        if self._reference is None or self._reference.shape != scene.shape:
            # Blocks of a picture of another shape are not comparable.
            self._reference, self._familiar_pts = scene, pts
            return 0.0
        difference = scene - self._reference
        difference -= _median(difference)
        limit = max(STRANGE_LEVELS, STRANGE_SPREAD * _moments(self._reference)[1])
        strangeness = np.count_nonzero(np.abs(difference) > limit) / difference.size
        if strangeness < MOST:
            self._familiar_pts = pts
            weight = np.float32(min(1.0, elapsed / MICROSECONDS / ADAPT_S))
            self._reference += weight * (scene - self._reference)
        elif pts - self._familiar_pts > SETTLE_S * MICROSECONDS:
            self._reference, self._familiar_pts = scene, pts
        return strangeness


def _moments(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Mean and standard deviation in single precision; faster than numpy's methods on small arrays."""
    centred = values.astype(np.float32).ravel()
    mean = float(np.add.reduce(centred)) / centred.size
    centred -= np.float32(mean)
    return mean, math.sqrt(float(centred @ centred) / centred.size)


def _median(values: npt.NDArray[np.float32]) -> np.float32:
    """``np.median`` without its overhead."""
    half = values.size // 2
    low = half if values.size % 2 else half - 1
    ordered = values.ravel().copy()
    ordered.partition((low, half))
    middle: np.float32 = (ordered[low] + ordered[half]) / np.float32(2)
    return middle


def block_means(luma: UInt8Array) -> npt.NDArray[np.float32]:
    """Block means, about ``[ROWS, COLS]`` or fewer for a smaller picture ``[height, width]``, in grey levels."""
    tall, wide = max(1, luma.shape[0] // ROWS), max(1, luma.shape[1] // COLS)
    rows, cols = luma.shape[0] // tall, luma.shape[1] // wide
    part = luma[: rows * tall, : cols * wide].reshape(rows, tall, cols, wide)
    sums = np.add.reduce(np.add.reduce(part, axis=1, dtype=np.int32), axis=2)
    means: npt.NDArray[np.float32] = sums.astype(np.float32) / np.float32(tall * wide)
    return means
