"""Conditional replenishment: re-encode cells that differ from their last encoded state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cluster.types import BoolGrid, ChangeGrid, FloatGrid, PatchGrid, SampledPicture, UInt8Array, cell_means
from cluster.vision.pruners.base import (
    PruneDecision,
    Pruner,
    changed_group_share,
    complete_groups,
    dilate,
    keep_everything,
    neighbours,
)

# Upward over downward step of a cell's noise level: in balance if its difference exceeds it 1 / (1 + 0.4) of the time.
RISE = 0.4
# Exposure fit: largest gain, luma variance below which no slope is fitted, and iterations.
MAX_GAIN = 2.0
FLAT = 9.0
ROUNDS = 3
# Share of foreground cells above which the background itself is in doubt.
MOST = 0.5
# Samples credited to a scene's first picture as background: it is not replaced by what stands for less than that.
HEAD_START = 20


@dataclass(frozen=True, slots=True)
class Exposure:
    """Linear exposure model ``reference = gain x now + offset`` in grey levels.

    Global between two samples, so that auto-exposure and flicker do not count as change.
    """

    gain: float = 1.0
    offset: float = 0.0

    @property
    def is_identity(self) -> bool:
        """Whether no grey level changes by half a level or more."""
        return max(abs(self.offset), abs(255 * (self.gain - 1) + self.offset)) < 0.5

    def apply(self, luma: UInt8Array) -> UInt8Array:
        """Map ``luma`` to the reference exposure."""
        if self.is_identity:
            return luma
        levels = np.arange(256, dtype=np.float32) * self.gain + self.offset
        table = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
        return np.frombuffer(bytearray(luma).translate(table.tobytes()), np.uint8).reshape(luma.shape)


def _median(values: npt.NDArray[np.floating]) -> float:
    """Upper median, ten times as fast as ``np.median``."""
    ordered = values.copy()
    ordered.partition(values.size // 2)
    return float(ordered[values.size // 2])


def _mean(values: npt.NDArray[np.floating]) -> float:
    """``np.mean`` without its overhead."""
    return float(np.add.reduce(values) / values.size)


def fit_exposure(now: FloatGrid, reference: FloatGrid) -> Exposure:
    """Robust linear fit from ``now`` to ``reference``, the cells' mean luma.

    Starts from the median offset or the median ratio, whichever has the smaller median error (auto-exposure multiplies,
    flat lighting adds), then iterates least squares over the cells within three median absolute deviations. Valid while
    less than half of the picture changes in any other way.
    """
    x = now.ravel()
    y = reference.ravel()
    offset = _median(y - x)
    gain = _median(y / np.maximum(x, 1.0))
    by_offset = np.abs(y - x - offset)
    by_gain = np.abs(y - gain * x)
    if _median(by_gain) < _median(by_offset):
        fitted, error = Exposure(gain, 0.0), by_gain
    else:
        fitted, error = Exposure(1.0, offset), by_offset
    before = None
    for _ in range(ROUNDS):
        agree = error <= max(1.0, 3.0 * _median(error))
        if before is not None and np.array_equal(agree, before):
            # Converged: the same cells would give the same line.
            break
        before = agree
        xs, ys = x[agree], y[agree]
        mean_x, mean_y = _mean(xs), _mean(ys)
        xs -= mean_x
        spread = _mean(np.square(xs))
        gain = 1.0
        if spread > FLAT:
            gain = float(np.dot(xs, ys - mean_y)) / (spread * xs.size)
            gain = min(max(gain, 1.0 / MAX_GAIN), MAX_GAIN)
        fitted = Exposure(gain, mean_y - gain * mean_x)
        error = np.abs(y - fitted.gain * x - fitted.offset)
    return fitted


@dataclass(slots=True)
class Replenish(Pruner):
    """Keep cells that differ from the picture the model already has.

    Every cell stores its luma as last encoded. Its *difference* is the mean ``|luma - stored|`` over its pixels, after
    mapping the camera's global exposure to that of the last anchor and ignoring a uniform brightness shift within
    ``shade``. A cell has *changed* if

    * its difference exceeds its threshold, or
    * it has motion vectors or intra coverage and is *suspicious*: above ``weak`` of the margin over the noise.

    Suspicious neighbours of changed cells are kept too (one-cell dilation), and the mask is completed to whole groups.
    Only kept cells update the stored luma, so slow drift accumulates until it is detected.

    Standing foreground is kept repeatedly: every ``restate`` samples, cells that differ from the *background* are kept
    whether they changed or not. Otherwise, between anchors, an answer would rest only on what came and went, and miss a
    person who fell and lies there. A cell's background is what was there longest: it is replaced by what has stood
    longer than the background was seen, or for ``settle`` samples. If most of the picture differs from the background
    in two comparisons in a row, the picture becomes the background; once is a flash or somebody in front of the lens.

    After missing video everything is kept; background and noise level are retained.

    The threshold is the camera's noise plus ``margin``. Noise is measured in quiet moments: the upper quartile of the
    cells' differences per sample, then the lower quartile of the last ``memory`` samples. A cell that flickers seven
    tenths of the time (foliage, water, a screen) learns a higher threshold of its own over minutes, at most
    ``tolerance`` times the camera's. A lane with traffic or a place where people stop is quiet often enough to keep the
    camera's threshold.
    """

    knob: ClassVar[str] = "margin"

    margin: float = 4.5
    """Grey levels above the noise that count as change."""

    lowest: float = 5.0
    """Lower bound of the camera's threshold, and its value until calibrated; grey levels."""

    highest: float = 14.0
    """Upper bound of the camera's threshold, however noisy it is; grey levels."""

    shade: float = 0.04
    """Relative change of a cell's mean brightness attributed to light, not content (soft shadows, clouds)."""

    weak: float = 0.5
    """Share of the margin that suffices if the codec or a changed neighbour supports the change; 0..1."""

    net_motion: float = 2.0
    """Net motion of a cell between two samples, in native pixels, above which it moved; a tenth is encoder noise."""

    support: int = 4
    """Number of a cell's eight neighbours that must have moved too: stray vectors are isolated, objects are not."""

    intra: float = 0.5
    """Share of a cell, intra-coded or uncovered in some frame, above which the codec supports a change."""

    memory: int = 64
    """Samples over which the camera's noise is measured (32 s at 2 FPS)."""

    calibrated_after: int = 2
    """Samples after which the measured noise replaces ``lowest``."""

    patience: float = 0.1
    """Largest downward step of a cell's noise level, in grey levels per sample; upwards 0.4 of it."""

    tolerance: float = 2.0
    """Upper bound of a cell's own threshold, in multiples of the camera's."""

    dilation: int = 1
    """1 keeps suspicious neighbours of changed cells, 0 does not."""

    exposure: int = 1
    """1 maps the camera's global exposure to that of the last anchor, 0 compares pictures as they are."""

    restate: int = 2
    """Interval, in samples, at which standing foreground is kept again; 0 keeps changes and anchors only."""

    settle: int = 120
    """Samples after which unchanged foreground becomes background (60 s at 2 FPS)."""

    learning_margin: float = field(init=False, repr=False)
    """``margin`` as configured: the background is learned with it, whatever the quality rung."""

    _memory: _Memory | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.memory < 1 or self.calibrated_after < 1:
            raise ValueError("memory and calibrated_after must be at least 1 sample")
        if self.restate < 0:
            raise ValueError("restate must be a number of samples, or 0 for never")
        self.learning_margin = self.margin

    def reset(self) -> None:
        self._memory = None

    def prune(self, frame: SampledPicture) -> PruneDecision:
        grid = frame.grid
        plain = cell_means(frame.luma, grid)
        if self._memory is None or frame.fresh or self._memory.grid != grid:
            self._memory = _Memory.of(frame, plain, self.memory)
            return PruneDecision(keep_everything(frame), 1.0)
        memory, gap = self._memory, frame.random_access
        seen = _seen(frame)
        # Masked pixels are black in any exposure.
        fitted = self.exposure and seen.any()
        exposure = fit_exposure(plain[seen], memory.means[seen]) if fitted else Exposure()
        luma = exposure.apply(frame.luma)
        means = cell_means(luma, grid) if luma is not frame.luma else plain
        difference = memory.difference(luma, means, self.shade)
        threshold = self.cell_thresholds()
        changed = difference > threshold
        suspicious = difference > threshold - self._credit()
        changed |= self._codec_evidence(frame.change) & suspicious
        changed &= seen
        activity = 1.0 if gap else changed_group_share(changed, grid.merge)
        memory.standing = np.where(changed, 0, memory.standing + 1)
        if frame.anchor or gap:
            # Everything is kept; the background must also learn when only keyframes or anchors arrive.
            self._find_foreground(frame.luma, plain, seen, due=True)
            memory.luma, memory.means = frame.luma.copy(), plain
            mask = keep_everything(frame)
        else:
            spread = changed | (dilate(changed) & suspicious) if self.dilation else changed
            mask = complete_groups(spread | self._find_foreground(frame.luma, plain, seen), grid.merge)
            memory.update(mask, luma, means)
        if not (gap or frame.repeated):
            # Differences across a gap, and those of a repeated picture, do not measure noise.
            memory.learn(difference, self.patience, seen)
        return PruneDecision(mask, activity)

    def repeat(self, frame: SampledPicture) -> PruneDecision:
        memory = self._memory
        if memory is None or memory.grid != frame.grid:
            return super(Replenish, self).repeat(frame)
        memory.standing = memory.standing + 1
        means = cell_means(frame.luma, frame.grid)
        standing = self._find_foreground(frame.luma, means, _seen(frame))
        return PruneDecision(complete_groups(standing, frame.grid.merge), 0.0)

    def _find_foreground(self, luma: UInt8Array, means: FloatGrid, seen: BoolGrid, *, due: bool = False) -> BoolGrid:
        """Foreground cells ``[rows, cols]``, while the background learns from the sample; none unless the sample is
        ``due`` or the ``restate``-th."""
        memory = self._memory
        assert memory is not None
        memory.since_compared += 1
        if not self.restate or not (due or memory.since_compared >= self.restate):
            return np.zeros_like(seen)
        background, elapsed, memory.since_compared = memory.background, memory.since_compared, 0
        if self.exposure and seen.any():
            background = background.exposed(fit_exposure(background.means[seen], means[seen]))
        difference = background.difference(luma, means, self.shade)
        differs = (difference > self._cell_thresholds(self.learning_margin)) & seen
        doubted, memory.doubted = memory.doubted, bool(differs.sum() > MOST * seen.sum())
        if memory.doubted:
            if doubted:
                memory.background = _Cells(background.grid, luma.copy(), means)
                memory.known = np.full_like(memory.known, HEAD_START)
                memory.doubted = False
            return np.zeros_like(differs)
        memory.background = background
        memory.known = np.where(differs, memory.known, memory.known + elapsed)
        settled = differs & (memory.standing >= np.minimum(memory.known, self.settle))
        memory.known = np.where(settled, memory.standing, memory.known)
        # Do not learn cells next to foreground: its faint edge would become background, and foreground once it left.
        background.update(~dilate(differs) | settled, luma, means)
        stands = differs & ~settled
        memory.standing = np.where(stands, memory.standing, 0)
        return stands & (difference > self.cell_thresholds())

    def cell_thresholds(self) -> FloatGrid | float:
        """Per-cell thresholds ``[rows, cols]`` in grey levels; a scalar before the first sample."""
        return self._cell_thresholds(self.margin)

    def _camera_threshold(self, margin: float) -> float:
        if self._memory is None or not self._calibrated:
            return self.lowest
        levels = sorted(self._memory.levels)
        noise = levels[len(levels) // 4]
        return min(max(noise + margin, self.lowest), self.highest)

    def _cell_thresholds(self, margin: float) -> FloatGrid | float:
        camera = self._camera_threshold(margin)
        if self._memory is None:
            return camera
        thresholds: FloatGrid = np.clip(self._memory.noise + margin, camera, camera * self.tolerance)
        return thresholds

    @property
    def _calibrated(self) -> bool:
        return self._memory is not None and len(self._memory.levels) >= self.calibrated_after

    def _credit(self) -> float:
        """Grey levels by which other evidence lowers the threshold; 0 while the noise is unknown."""
        return (1.0 - self.weak) * self.margin if self._calibrated else 0.0

    def _codec_evidence(self, change: ChangeGrid) -> BoolGrid:
        moved = change.net_motion > self.net_motion
        return (moved & (neighbours(moved) >= self.support)) | (change.intra > self.intra)


def _seen(frame: SampledPicture) -> BoolGrid:
    """Cells ``[rows, cols]`` not hidden by a privacy mask."""
    return np.ones((frame.grid.rows, frame.grid.cols), np.bool_) if frame.hidden is None else ~frame.hidden


@dataclass(slots=True)
class _Cells:
    """Luma of one camera's cells, in one exposure, and their means."""

    grid: PatchGrid
    luma: UInt8Array
    means: FloatGrid

    def difference(self, luma: UInt8Array, means: FloatGrid, shade: float) -> FloatGrid:
        """Mean absolute difference of each cell from its stored luma, ``[rows, cols]`` grey levels."""
        grid = self.grid
        forgiven = shade * self.means
        shift = np.rint(np.clip(means - self.means, -forgiven, forgiven)).astype(np.int16)
        difference = np.subtract(luma, self.luma, dtype=np.int16)
        if shift.any():
            strips = difference.reshape(grid.rows, grid.patch, grid.width)
            strips -= shift.repeat(grid.patch, axis=1)[:, None]
        np.abs(difference, out=difference)
        # The forgiven shift can raise a difference between black and white above 255.
        return cell_means(np.clip(difference, 0, 255, out=difference).view(np.uint16), grid)

    def exposed(self, exposure: Exposure) -> _Cells:
        """These cells mapped to another exposure."""
        if exposure.is_identity:
            return self
        luma = exposure.apply(self.luma)
        return _Cells(self.grid, luma, cell_means(luma, self.grid))

    def update(self, mask: BoolGrid, luma: UInt8Array, means: FloatGrid) -> None:
        if not mask.any():
            return
        pixels = mask.repeat(self.grid.patch, axis=0).repeat(self.grid.patch, axis=1)
        np.copyto(self.luma, luma, where=pixels)
        self.means = np.where(mask, means, self.means)


@dataclass(slots=True)
class _Memory(_Cells):
    """A camera's cells as last encoded, in the exposure of the last anchor, and their background, in the exposure of
    the sample last compared with it.

    * ``noise`` ``[rows, cols]``, ``levels``: noise level of each cell, and of the camera in recent samples
    * ``standing`` ``[rows, cols]``: samples since a cell last changed or showed the background
    * ``known`` ``[rows, cols]``: samples in which a cell showed its background
    * ``since_compared``: samples since the last comparison with the background; ``doubted``: most cells differed then
    """

    background: _Cells
    noise: FloatGrid
    levels: deque[float]
    standing: npt.NDArray[np.int32]
    known: npt.NDArray[np.int32]
    since_compared: int = 0
    doubted: bool = False

    @classmethod
    def of(cls, frame: SampledPicture, means: FloatGrid, samples: int) -> _Memory:
        background = _Cells(frame.grid, frame.luma.copy(), means)
        standing = np.zeros(means.shape, np.int32)
        levels = deque[float](maxlen=samples)
        known = np.full_like(standing, HEAD_START)
        return cls(frame.grid, frame.luma.copy(), means, background, np.zeros_like(means), levels, standing, known)

    def learn(self, difference: FloatGrid, patience: float, seen: BoolGrid) -> None:
        """Update each cell's noise level by bounded steps, and the camera's from the ``seen`` cells."""
        self.noise += np.clip(difference - self.noise, -patience, patience * RISE)
        visible = difference[seen]
        if visible.size:
            quartile = visible.size * 3 // 4
            self.levels.append(float(np.partition(visible, quartile)[quartile]))
