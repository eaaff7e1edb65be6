"""What one replica carries as the fleet knows it: predicted by its cameras' demands, corrected by what it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.scheduling.ladder.policy import CameraOnLadder
from cluster.scheduling.phases import Phases

NEARLY_BUSY = 0.9
"""Share of busy time from which on it says little of the load: steps hold more windows the more wait, and more than all
of its time a replica cannot be busy. What still tells then is whether the backlog grows."""

SMOOTH, URGENT, FADE = 0.1, 0.7, 0.02
"""Weights of what a report says: usually, of one that tells of more work than can be done, and of the cost model when a
report says nothing."""

MOST_WAITING = 0.4
"""Most that a backlog counts as utilisation: it is worked off in strides, not by shedding everyone."""


@dataclass(slots=True)
class ReplicaLoad:
    """``load``, ``windows``, ``due``: sums over its cameras at their rungs, of busy seconds, of computed windows and of
    all windows a second.

    * ``lowered``: cameras below full quality
    * ``ratio``: measured over predicted busy seconds
    * ``offered``: work that came in over what could be done, of the last reports
    * ``settled_s``: until then its last steps down cannot be felt yet
    * ``felt_s``: until then it may report of before cameras came, went or stepped
    * ``short_s``: seconds a second that it lacks although everyone stands as low as may be
    """

    capacity: float
    cameras: dict[str, CameraOnLadder] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    load: float = 0.0
    windows: float = 0.0
    due: float = 0.0
    lowered: int = 0
    ratio: float = 1.0
    offered: float | None = None
    reported_s: float = -math.inf
    backlog_s: float = 0.0
    settled_s: float = -math.inf
    felt_s: float = -math.inf
    short_s: float = 0.0
    draining: bool = False

    def own(self, name: str, camera: CameraOnLadder, windows: float, due: float) -> None:
        """A camera comes."""
        self.cameras[name] = camera
        self.load += camera.load
        self.windows += windows
        self.due += due
        self.lowered += camera.rung > 0

    def disown(self, name: str, windows: float, due: float) -> None:
        """A camera goes."""
        camera = self.cameras.pop(name)
        self.lowered -= camera.rung > 0
        # Sums of floats that were added and taken away drift; those of an empty replica are 0.
        self.load = self.load - camera.load if self.cameras else 0.0
        self.windows = self.windows - windows if self.cameras else 0.0
        self.due = self.due - due if self.cameras else 0.0

    def change(self, load: float, windows: float, due: float) -> None:
        """A camera that stays asks for so much more."""
        self.load += load
        self.windows += windows
        self.due += due

    def report(self, busy_share: float, backlog_s: float, now_s: float, *, unshared_s: float) -> None:
        """Correct the prediction by what came in: the share of its time that it was busy, and what more waits now.

        Args:
            backlog_s: seconds of work that wait.
            unshared_s: seconds by which a window that has a step to itself takes longer than ``load`` counts. A replica
                with time to spare makes small steps: it is busier than it is loaded.
        """
        period_s, grown_s = now_s - self.reported_s, backlog_s - self.backlog_s
        self.reported_s, self.backlog_s = now_s, max(0.0, backlog_s)
        if self.load <= 0 or now_s < self.felt_s or not 0 < period_s < math.inf:
            self.offered = None
            return
        offered = max(0.0, min(1.0, busy_share) + grown_s / period_s)
        self.offered = offered if self.offered is None else (self.offered + offered) / 2
        if self.offered > 1.0:
            # Full steps: a window takes what ``load`` counts for it.
            self._learn(self.offered * self.capacity / self.load, URGENT, up=True)
        elif self.offered < NEARLY_BUSY:
            self._learn(self.offered * self.capacity / (self.load + self.windows * unshared_s), SMOOTH)
        else:
            self._learn(1.0, FADE)

    def _learn(self, found: float, weight: float, *, up: bool = False) -> None:
        if found > self.ratio or not up:
            self.ratio += weight * (min(max(found, 0.25), 4.0) - self.ratio)

    @property
    def predicted(self) -> float:
        """Work over capacity, without what waits."""
        return self.load / self.capacity * self.ratio

    def utilisation(self, horizon_s: float) -> float:
        """Work over capacity with what waits, to be worked off within ``horizon_s``; 1 is full."""
        # A backlog of a second or so is a step under way and the next one.
        return self.predicted + min(MOST_WAITING, max(0.0, self.backlog_s - 1.0) / horizon_s)
