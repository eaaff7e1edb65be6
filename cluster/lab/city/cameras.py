"""All cameras of one controller as arrays: when their windows end, and which windows the static gate lets through.

A tick of simulated time is a few numpy operations over all cameras; gated windows are only counted.
Times are simulated seconds.
"""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from cluster.control.demand import Measured
from cluster.lab.city import Bools, Floats, Ints
from cluster.lab.city.mix import BurstEffect, CameraClass
from cluster.types.cameras import IDLE_SPREAD

CHANGED = 0.1
"""Change of a camera's computed share that triggers a report."""

SILENT = 6
"""Factor on the report interval of cameras whose computed share has not changed."""


class Fate(IntEnum):
    """Outcome of a window: gated (the last answer stands), computed or dropped."""

    GATED, COMPUTED, DROPPED = range(3)


_RESUMED = len(Fate)
"""Row, after those of the fates, that counts computed windows after a gated one."""


class UnreportedCounts:
    """Window counts per camera since its last report. A camera whose computed share is steady is reported less often:
    its load estimate has settled."""

    def __init__(self, count: int) -> None:
        self._counts = np.zeros((len(Fate) + 1, count), dtype=np.int64)
        self._since_s = np.zeros(count)
        self._share = np.full(count, -1.0)
        self._gated = np.zeros(count, dtype=bool)

    def add(self, fate: Fate, camera: Ints) -> None:
        """Count one window per entry of ``camera``, which may contain duplicates."""
        np.add.at(self._counts[fate], camera, 1)
        if fate is not Fate.DROPPED:
            self._counts[_RESUMED, camera] += self._gated[camera] & (fate is Fate.COMPUTED)
            self._gated[camera] = fate is Fate.GATED

    def reset_camera(self, camera: int, now_s: float) -> None:
        """Discard the counts of a restarted camera."""
        self._counts[:, camera] = 0
        self._gated[camera] = False
        self._since_s[camera] = now_s
        self._share[camera] = -1.0

    def due(self, now_s: float, every_s: float) -> Iterator[tuple[int, Measured]]:
        """Yield the counts of cameras whose report is due, and reset them."""
        period = now_s - self._since_s
        ready = np.flatnonzero((period >= every_s) & self._counts.any(axis=0))
        gated, computed, *_ = self._counts[:, ready]
        share = computed / np.maximum(gated + computed, 1)
        news = (np.abs(share - self._share[ready]) > CHANGED) | (period[ready] >= SILENT * every_s)
        chosen = ready[news]
        self._share[chosen] = share[news]
        yield from self.pop_counts(chosen, now_s)

    def pop_counts(self, chosen: Ints, now_s: float) -> Iterator[tuple[int, Measured]]:
        """Yield the counts of these cameras, and reset them."""
        periods_s = (now_s - self._since_s[chosen]).tolist()
        counts = self._counts[:, chosen].T.tolist()
        for camera, period_s, (gated, computed, dropped, resumed) in zip(
            chosen.tolist(), periods_s, counts, strict=True
        ):
            yield camera, Measured(period_s, gated + computed, gated, dropped=dropped, resumed=resumed)
        self._counts[:, chosen] = 0
        self._since_s[chosen] = now_s


SAME_S = 1e-6
"""Tolerance for comparing times: window ends are floating-point sums of strides."""

FIRST_WINDOWS = 2
"""Windows after a start that are computed even without motion (``cluster/engine/window/windows.py``)."""


class Due(NamedTuple):
    """Windows that ended in a tick, one entry each, ordered by end time.

    * ``camera``: index; ``end_s``: end time; ``stride_s``: stride that the window accounts for
    * ``gated``: the last answer stands; ``strides``: strides of frames that a computed window must encode; ``held``:
      window length in strides
    """

    camera: Ints
    end_s: Floats
    stride_s: Floats
    gated: Bools
    strides: Floats
    held: Floats


class Cameras:
    """State of ``len(kinds)`` cameras. ``kinds``: index into ``classes`` per camera; ``hour``: time of day at 0 s."""

    def __init__(self, classes: Sequence[CameraClass], kinds: Ints, *, hour: float, rng: np.random.Generator) -> None:
        self.classes = tuple(classes)
        self.kinds = kinds
        self.stride_s = np.array([each.stride_s for each in classes])[kinds]
        self.window_s = np.array([each.window_s for each in classes])[kinds]
        self._gate = np.array([each.static_gate for each in classes])[kinds]
        # Evenly spread; the engine spreads them by a hash of the camera name.
        spread = IDLE_SPREAD * (np.arange(len(kinds)) * (math.sqrt(5) - 1) / 2 % 1)
        self._idle_s = np.array([each.max_idle_s for each in classes])[kinds] * (1 - spread)
        self._dwell_s = np.array([each.activity.dwell_s for each in classes])[kinds]
        self._hour = hour
        self._rng = rng
        count = len(kinds)
        self.factor = np.ones(count)
        self._next_s = np.full(count, np.inf)
        self._origin_s = np.zeros(count)
        self._covered_s = np.zeros(count)
        self._since_fresh = np.zeros(count, dtype=np.int64)
        self._unencoded = np.zeros(count, dtype=bool)
        self._moving = rng.random(count) < self._share(kinds, 0.0)

    def __len__(self) -> int:
        return len(self.kinds)

    def start(self, camera: int, now_s: float, phase: float) -> None:
        """Start or restart a camera. Windows end ``phase`` strides after multiples of the stride, the first once it is
        one stride long."""
        stride = float(self.stride_s[camera] * self.factor[camera])
        origin = (np.ceil(now_s / stride - phase - SAME_S) + phase) * stride
        self._next_s[camera] = origin + stride
        self._origin_s[camera] = self._covered_s[camera] = origin
        self._since_fresh[camera] = 0
        self._unencoded[camera] = False

    def stretch(self, camera: int | Ints, factor: float | Floats) -> None:
        """Set the stride to ``factor`` times the class's; the next window ends one new stride after the last one.
        ``camera``: one index, or several without duplicates."""
        change = (factor - self.factor[camera]) * self.stride_s[camera]
        self.factor[camera] = factor
        self._next_s[camera] += change

    def dropped(self, camera: Ints, end_s: Floats, strides: Floats) -> None:
        """Record dropped windows: the next one is computed, even without motion, and encodes their frames."""
        since = end_s - strides * self.stride_s[camera] * self.factor[camera]
        np.minimum.at(self._covered_s, camera, since)
        self._unencoded[camera] = True

    def due(self, until_s: float, wakes: Sequence[BurstEffect]) -> Due:
        """Close and return the windows that end before ``until_s``."""
        parts: list[Due] = []
        while len(now := np.flatnonzero(self._next_s < until_s - SAME_S)):
            parts.append(self._close(now, wakes))
        if not parts:
            none = np.zeros(0)
            return Due(none.astype(np.int64), none, none, none.astype(bool), none, none)
        joined = Due._make(map(np.concatenate, zip(*parts, strict=True)))
        order = np.argsort(joined.end_s, kind="stable")
        return Due._make(column[order] for column in joined)

    def _close(self, now: Ints, wakes: Sequence[BurstEffect]) -> Due:
        end = self._next_s[now]
        stride = self.stride_s[now] * self.factor[now]
        moving = self._move(now, end, stride)
        for wake in wakes:
            moving |= wake.reaches(now, end)
        computed = (
            moving
            | self._unencoded[now]
            | ~self._gate[now]
            | (self._since_fresh[now] < FIRST_WINDOWS)
            | (end - self._covered_s[now] > self._idle_s[now] + SAME_S)
        )
        taken = np.minimum(end - self._covered_s[now], self.window_s[now]) / stride
        strides = np.where(computed, np.maximum(1.0, np.round(taken)), 0.0)
        held = np.ceil(np.minimum(end - self._origin_s[now], self.window_s[now]) / stride - SAME_S)
        self._covered_s[now] = np.where(computed, end, self._covered_s[now])
        self._unencoded[now] &= ~computed
        self._since_fresh[now] += 1
        self._next_s[now] = end + stride
        return Due(now, end, stride, ~computed, strides, held)

    def _move(self, now: Ints, end: Floats, stride: Floats) -> Bools:
        """Advance each camera's Markov chain by its stride; exact for any stride (see :class:`ActivitySection`)."""
        share = self._share(self.kinds[now], float(end.mean()))
        kept = np.exp(-stride / np.maximum((1 - share) * self._dwell_s[now], 1e-12))
        chance = share + (self._moving[now] - share) * kept
        moving: Bools = self._rng.random(len(now)) < chance
        self._moving[now] = moving
        return moving.copy()

    def _share(self, kinds: Ints, now_s: float) -> Floats:
        hour = self._hour + now_s / 3600
        shares: Floats = np.array([each.activity.share(hour) for each in self.classes])[kinds]
        return shares
