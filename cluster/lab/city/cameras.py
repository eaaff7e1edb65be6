"""All cameras of one controller as arrays: when their windows end, which of them the static gate lets through.

A tick of simulated time is a few numpy operations over all cameras; windows that the gate holds are only counted.
Times are simulated seconds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from cluster.control.demand import Measured
from cluster.lab.city import Bools, Floats, Ints
from cluster.lab.city.mix import CameraClass, Wake
from cluster.types.cameras import IDLE_SPREAD

CHANGED = 0.1
"""Change of a camera's computed share that is news."""

SILENT = 6
"""Cameras without news are told of this many times less often."""


class Fate(IntEnum):
    """What became of a window: the last answer stands, it was computed, or given up."""

    GATED, COMPUTED, DROPPED = range(3)


class UnreportedCounts:
    """Counts by camera. One whose windows go on being computed, or held, as before is reported seldom: its estimate has
    settled, and telling it again would change nothing."""

    def __init__(self, count: int) -> None:
        self._counts = np.zeros((len(Fate), count), dtype=np.int64)
        self._since_s = np.zeros(count)
        self._share = np.full(count, -1.0)

    def add(self, fate: Fate, camera: Ints) -> None:
        """A window of each of these; a camera may be there twice."""
        np.add.at(self._counts[fate], camera, 1)

    def forget(self, camera: int, now_s: float) -> None:
        """The camera has begun anew."""
        self._counts[:, camera] = 0
        self._since_s[camera] = now_s
        self._share[camera] = -1.0

    def due(self, now_s: float, every_s: float) -> Iterator[tuple[int, Measured]]:
        """Cameras that are to be reported now; their counts begin anew."""
        period = now_s - self._since_s
        ready = np.flatnonzero((period >= every_s) & self._counts.any(axis=0))
        gated, computed, _ = self._counts[:, ready]
        share = computed / np.maximum(gated + computed, 1)
        news = (np.abs(share - self._share[ready]) > CHANGED) | (period[ready] >= SILENT * every_s)
        chosen = ready[news]
        self._share[chosen] = share[news]
        yield from self.take(chosen, now_s)

    def take(self, chosen: Ints, now_s: float) -> Iterator[tuple[int, Measured]]:
        """Counts of these cameras, which begin anew."""
        periods_s = (now_s - self._since_s[chosen]).tolist()
        counts = self._counts[:, chosen].T.tolist()
        for camera, period_s, (gated, computed, dropped) in zip(chosen.tolist(), periods_s, counts, strict=True):
            yield camera, Measured(period_s, gated + computed, gated, dropped=dropped)
        self._counts[:, chosen] = 0
        self._since_s[chosen] = now_s


SAME_S = 1e-6
"""Times that are no further apart are the same: windows' ends are sums of strides, which do not add up exactly."""

FIRST_WINDOWS = 2
"""Windows that are computed after a fresh start whatever moves (``cluster/engine/window/windows.py``)."""


@dataclass(frozen=True, slots=True)
class Due:
    """Windows that ended in a tick, one entry each, ordered by time.

    * ``camera``: index; ``end_s``: when it ended; ``stride_s``: the stride it stands for
    * ``gated``: the last answer stands; ``strides``: strides of frames that a computed one has to take in; ``held``:
      strides that it is long
    """

    camera: Ints
    end_s: Floats
    stride_s: Floats
    gated: Bools
    strides: Floats
    held: Floats


class Cameras:
    """State of ``len(kinds)`` cameras. ``kinds``: the class of each, an index into ``classes``.

    ``hour``: time of day when the simulated time is 0.
    """

    def __init__(self, classes: Sequence[CameraClass], kinds: Ints, *, hour: float, rng: np.random.Generator) -> None:
        self.classes = tuple(classes)
        self.kinds = kinds
        self.stride_s = np.array([each.stride_s for each in classes])[kinds]
        self.window_s = np.array([each.window_s for each in classes])[kinds]
        self._gate = np.array([each.static_gate for each in classes])[kinds]
        # Even, as the engine's are by the cameras' names.
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
        """Begin, or begin anew, with windows that end ``phase`` strides after whole strides of the simulated time; the
        first of them when it is a stride long."""
        stride = float(self.stride_s[camera] * self.factor[camera])
        origin = (np.ceil(now_s / stride - phase - SAME_S) + phase) * stride
        self._next_s[camera] = origin + stride
        self._origin_s[camera] = self._covered_s[camera] = origin
        self._since_fresh[camera] = 0
        self._unencoded[camera] = False

    def stretch(self, camera: int | Ints, factor: float | Floats) -> None:
        """Set strides to ``factor`` of the cameras' own; the next window ends one new stride after the last closed one.
        Of one camera or of several, each there once."""
        change = (factor - self.factor[camera]) * self.stride_s[camera]
        self.factor[camera] = factor
        self._next_s[camera] += change

    def dropped(self, camera: Ints, end_s: Floats, strides: Floats) -> None:
        """Computed windows were given up: the next one of the camera has to take in their frames, moving or not."""
        since = end_s - strides * self.stride_s[camera] * self.factor[camera]
        np.minimum.at(self._covered_s, camera, since)
        self._unencoded[camera] = True

    def due(self, until_s: float, wakes: Sequence[Wake]) -> Due:
        """Windows that end before ``until_s`` and were not returned yet; cameras move on."""
        parts: list[tuple[Ints, Floats, Floats, Bools, Floats, Floats]] = []
        while len(now := np.flatnonzero(self._next_s < until_s - SAME_S)):
            parts.append(self._close(now, wakes))
        if not parts:
            none = np.zeros(0)
            return Due(none.astype(np.int64), none, none, none.astype(bool), none, none)
        joined = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        order = np.argsort(joined[1], kind="stable")
        camera, end_s, stride_s, gated, strides, held = (column[order] for column in joined)
        return Due(camera, end_s, stride_s, gated, strides, held)

    def _close(self, now: Ints, wakes: Sequence[Wake]) -> tuple[Ints, Floats, Floats, Bools, Floats, Floats]:
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
        return now, end, stride, ~computed, strides, held

    def _move(self, now: Ints, end: Floats, stride: Floats) -> Bools:
        """One step of each camera's Markov chain over its stride; exact for any length (ActivitySection)."""
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
