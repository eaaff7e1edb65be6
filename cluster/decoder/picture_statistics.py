"""Image statistics per sampled picture, from which frozen, covered and turned cameras are detected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.types import MICROSECONDS, PictureHealth, SampledPicture, UInt8Array

STILL_LEVELS = 0.2
"""A cell whose mean luma differs by less, in grey levels, has not changed at all: a sensor's noise moves more."""

CHANGED_LEVELS = 5.0
"""A cell that differs by more has changed visibly: the threshold at which the luma cue is best."""

FLAT_SPREAD = 6.0
"""With less spread of luma there is no scene to compare."""

ROWS, COLS = 9, 16
STRIDE = 4
STRANGE_LEVELS, STRANGE_SPREAD = 10.0, 0.5
MOST = 0.5
ADAPT_S = 60.0
SETTLE_S = 300.0


class PictureStatistics:
    """Feed it every sample of one camera; :attr:`health` is what it saw last, None before the first sample.

    The *reference scene* is a slow average (``ADAPT_S``) of block means. ``strangeness`` is the share of its cells
    from which the picture differs by ``STRANGE_LEVELS`` grey levels and by ``STRANGE_SPREAD`` of the reference's
    spread, once the median difference is taken out: neither exposure nor what moves in the scene makes most cells
    strange. A picture of which ``MOST`` is strange does not enter the reference; after ``SETTLE_S`` of nothing else
    the camera looks elsewhere for good, and what it sees then is the reference.
    """

    def __init__(self) -> None:
        self.health: PictureHealth | None = None
        self._reference: npt.NDArray[np.float32] | None = None
        self._last_pts: int | None = None
        self._familiar_pts = 0
        self._still_since = 0

    def add_sample(self, frame: SampledPicture) -> None:
        """Take one sample. They come in order of ``pts``; after a ``fresh`` one the clock may have started anew."""
        some = frame.luma[::STRIDE, ::STRIDE]
        difference = frame.change.luma
        seen = some
        if frame.hidden is not None and not frame.hidden.all():
            # A privacy mask is no part of the scene: a covered lens is one beside it, too.
            rows, cols = (np.arange(0, side, STRIDE) // frame.grid.patch for side in frame.luma.shape)
            seen = some[~frame.hidden[np.ix_(rows, cols)]]
            difference = difference[~frame.hidden]
        luma, spread = _moments(seen)
        if self._last_pts is None or frame.pts <= self._last_pts:
            self._last_pts = self._familiar_pts = frame.pts
        if frame.random_access or float(difference.max()) >= STILL_LEVELS:
            # After a gap nothing is known of the time in between: stillness is counted anew.
            self._still_since = frame.pts
        self.health = PictureHealth(
            pts=frame.pts,
            changed=np.count_nonzero(difference > CHANGED_LEVELS) / difference.size,
            still_s=(frame.pts - self._still_since) / MICROSECONDS,
            luma=luma,
            spread=spread,
            strangeness=self._strangeness(some, spread, frame.pts),
        )
        self._last_pts = frame.pts

    def _strangeness(self, luma: UInt8Array, spread: float, pts: int) -> float:
        elapsed = pts - (self._last_pts or pts)
        if spread < FLAT_SPREAD:
            # A covered lens is another matter: it does not settle as a scene.
            self._familiar_pts += elapsed
            return 0.0
        scene = block_means(luma)
        if self._reference is None:
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
    """Mean and standard deviation, in single precision; of small arrays a fraction of what numpy's own take."""
    centred = values.astype(np.float32).ravel()
    mean = float(np.add.reduce(centred)) / centred.size
    centred -= np.float32(mean)
    return mean, math.sqrt(float(centred @ centred) / centred.size)


def _median(values: npt.NDArray[np.float32]) -> np.float32:
    """What ``np.median`` gives, which checks much that cannot be here."""
    half = values.size // 2
    low = half if values.size % 2 else half - 1
    ordered = values.ravel().copy()
    ordered.partition((low, half))
    middle: np.float32 = (ordered[low] + ordered[half]) / np.float32(2)
    return middle


def block_means(luma: UInt8Array) -> npt.NDArray[np.float32]:
    """``[ROWS, COLS]`` block means of a picture ``[height, width]``, grey levels; fewer where it is smaller."""
    tall, wide = max(1, luma.shape[0] // ROWS), max(1, luma.shape[1] // COLS)
    rows, cols = luma.shape[0] // tall, luma.shape[1] // wide
    part = luma[: rows * tall, : cols * wide].reshape(rows, tall, cols, wide)
    sums = np.add.reduce(np.add.reduce(part, axis=1, dtype=np.int32), axis=2)
    means: npt.NDArray[np.float32] = sums.astype(np.float32) / np.float32(tall * wide)
    return means
