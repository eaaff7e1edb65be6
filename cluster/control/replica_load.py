"""What one replica carries as the fleet knows it: predicted by its cameras' demands, corrected by what it reports."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cluster.control.ladder import CameraOnLadder

SLOTS = 64
"""Stretches that a stride is divided into."""

_GOLDEN = 0.6180339887498949


class WindowPhases:
    """Cameras of one replica over their stride: each takes the emptiest of ``SLOTS`` stretches by the load in it.

    Cameras of one stride meet their own kind only: those of different strides drift past each other anyhow.
    """

    def __init__(self) -> None:
        self._slots: dict[float, list[float]] = {}
        self._placed: dict[str, tuple[float, int, float, float]] = {}
        self._count = 0

    def add(self, camera: str, stride_s: float, load: float, *, phase: float | None = None) -> float:
        """A camera's phase, 0 to below 1: the share of its stride by which its windows end later than those of phase 0.

        ``phase``: the one it has already and keeps. A known camera is taken out first.
        """
        self.remove(camera)
        slots = self._slots.setdefault(stride_s, [0.0] * SLOTS)
        self._count += 1
        if phase is None:
            least = min(slots)
            # Of equally empty ones the one that is farthest from those taken last.
            start = int(self._count * _GOLDEN % 1 * SLOTS)
            place = next(p % SLOTS for p in range(start, start + SLOTS) if slots[p % SLOTS] == least)
            phase = (place + self._count * _GOLDEN % 1) / SLOTS
        else:
            place = int(phase * SLOTS)
        slots[place] += load
        self._placed[camera] = (stride_s, place, load, phase)
        return phase

    def remove(self, camera: str) -> float | None:
        """Forget a camera; its phase if it was known."""
        known = self._placed.pop(camera, None)
        if known is None:
            return None
        stride_s, place, load, phase = known
        self._slots[stride_s][place] = max(0.0, self._slots[stride_s][place] - load)
        return phase

    def phase_of(self, camera: str) -> float:
        """A known camera's phase."""
        return self._placed[camera][3]


AVERAGE_S = 5.0
"""Seconds of reports that the work offered is judged by: of one second it says more of chance than of the cameras."""

SMOOTH, URGENT = 0.1, 0.5
"""Weights a second of what reports say: usually, and of those that tell of more work than can be done."""

ABRUPT = 0.05
"""Relative change of the predicted load from one report to the next after which what was heard before is forgotten."""

MOST_WAITING = 0.4
"""Most that a backlog counts as utilisation: it is worked off in strides, not by shedding everyone."""


@dataclass(slots=True)
class ReplicaLoad:
    """``load``, ``windows``, ``due``: sums over its cameras at their rungs, of busy seconds, of computed windows and of
    all windows a second.

    * ``lowered``: cameras below full quality
    * ``ratio``: measured over predicted busy seconds
    * ``offered``: work that came in over what could be done, of the last ``AVERAGE_S``
    * ``settled_s``: until then its last steps down cannot be felt yet
    * ``short_s``: seconds a second that it lacks although everyone stands as low as may be
    """

    capacity: float
    cameras: dict[str, CameraOnLadder] = field(default_factory=dict)
    phases: WindowPhases = field(default_factory=WindowPhases)
    load: float = 0.0
    windows: float = 0.0
    due: float = 0.0
    lowered: int = 0
    ratio: float = 1.0
    offered: float | None = None
    reported_s: float = -math.inf
    backlog_s: float = 0.0
    settled_s: float = -math.inf
    short_s: float = 0.0
    draining: bool = False
    _before: float = 0.0
    _grew_s: float = -math.inf
    _fell_s: float = -math.inf
    _recent_reports: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add_camera(self, name: str, camera: CameraOnLadder, windows: float, due: float) -> None:
        """A camera comes."""
        self.cameras[name] = camera
        self.load += camera.load
        self.windows += windows
        self.due += due
        self.lowered += camera.rung > 0

    def remove_camera(self, name: str, windows: float, due: float) -> None:
        """A camera goes."""
        camera = self.cameras.pop(name)
        self.lowered -= camera.rung > 0
        # Sums of floats that were added and taken away drift; those of an empty replica are 0.
        self.load = self.load - camera.load if self.cameras else 0.0
        self.windows = self.windows - windows if self.cameras else 0.0
        self.due = self.due - due if self.cameras else 0.0

    def change_load(self, load: float, windows: float, due: float) -> None:
        """A camera that stays asks for so much more."""
        self.load += load
        self.windows += windows
        self.due += due

    def report(
        self, busy_share: float, backlog_s: float, now_s: float, *, unshared_s: float = 0.0, settle_s: float = 0.0
    ) -> None:
        """Correct the prediction by what came in: the share of its time that it was busy, and what more waits now.

        Args:
            backlog_s: seconds of work that wait.
            unshared_s: seconds that its steps took since the last report because they were not full: a replica with
                time to spare makes small steps, and is busier than it is loaded.
            settle_s: seconds after which many cameras that came, went or stepped are felt.
        """
        period_s, grown_s = now_s - self.reported_s, backlog_s - self.backlog_s
        self.reported_s, self.backlog_s = now_s, max(0.0, backlog_s)
        self._ignore_reports_until(now_s + settle_s)
        if self.load <= 0 or not 0 < period_s < math.inf:
            self.offered = None
            self._recent_reports.clear()
            return
        came_s = max(0.0, min(1.0, busy_share)) * period_s + grown_s - unshared_s
        self._recent_reports.append((period_s, came_s, self.load * period_s))
        while sum(each[0] for each in self._recent_reports) - self._recent_reports[0][0] >= AVERAGE_S:
            self._recent_reports.popleft()
        heard_s, came_s, expected_s = map(sum, zip(*self._recent_reports, strict=True))
        self.offered = max(0.0, came_s / heard_s)
        found = min(max(self.offered * heard_s * self.capacity / expected_s, 0.25), 4.0)
        if now_s < (self._fell_s if found > self.ratio else self._grew_s):
            self._recent_reports.clear()
            return
        weight = URGENT if self.offered > 1.0 and found > self.ratio else SMOOTH
        self.ratio += (1 - (1 - weight) ** period_s) * (found - self.ratio)

    def _ignore_reports_until(self, felt_s: float) -> None:
        """Reports until ``felt_s`` tell of before an abrupt change: of too much work where the load fell, of too little
        where it grew."""
        before, self._before = self._before, self.load
        if abs(self.load - before) > ABRUPT * before:
            self._recent_reports.clear()
            if self.load > before:
                self._grew_s = felt_s
            else:
                self._fell_s = felt_s

    @property
    def predicted(self) -> float:
        """Work over capacity, without what waits."""
        return self.load / self.capacity * self.ratio

    def utilisation(self, horizon_s: float) -> float:
        """Work over capacity with what waits, to be worked off within ``horizon_s``; 1 is full."""
        # A backlog of a second or so is a step under way and the next one.
        return self.predicted + min(MOST_WAITING, max(0.0, self.backlog_s - 1.0) / horizon_s)
