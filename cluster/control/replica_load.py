"""Load of one replica: predicted from its cameras' demands, corrected by its reports."""

import math
from collections import deque
from dataclasses import dataclass, field

from cluster.control.admission import UNBOUNDED, MemoryDemand
from cluster.control.camera_record import FleetCamera

AVERAGE_S = 16.0
"""Averaging time of reports, seconds: over less than the usual strides, load depends on which cameras' windows happen
to end, and quality would oscillate."""

STANDING_S, RUNNING_S = 8.0, 1.0
"""A backlog counts as far as it lasts for ``STANDING_S`` seconds, a usual stride, and exceeds ``RUNNING_S``, the
running step and the next: windows of cameras that started together end together, and are computed before the next."""

SMOOTH, URGENT = 0.1, 0.5
"""Weights of reports, per second: normally, and under overload."""

ABRUPT = 0.05
"""Relative change of the predicted load between two reports after which earlier reports are discarded."""

HORIZON_S = 16.0
"""Target time, in seconds, for working off a backlog."""

MOST_WAITING = 0.4
"""Cap of the utilisation added by a backlog: it is worked off over several strides, not by shedding every camera."""


@dataclass(slots=True)
class ReplicaLoad:
    """Call :meth:`changed` after any change of its ``cameras`` except through :meth:`add`.

    * ``limit``: memory it offers
    * ``ratio``: measured / predicted busy seconds
    * ``settled_s``: time at which its last steps down have taken full effect
    * ``lag_s``: expected mean lag of a window; ``None``: not computed since the last change
    """

    limit: MemoryDemand = UNBOUNDED
    cameras: dict[str, FleetCamera] = field(default_factory=dict)
    ratio: float = 1.0
    settled_s: float = -math.inf
    draining: bool = False
    lag_s: float | None = None
    _load: float | None = None
    _before: float = 0.0
    _grew_s: float = -math.inf
    _fell_s: float = -math.inf
    # Times and backlogs of the reports of the last STANDING_S seconds, and of the one before: at first, nothing waits.
    _backlogs: deque[tuple[float, float]] = field(default_factory=lambda: deque([(-math.inf, 0.0)]))
    _recent_reports: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, name: str, camera: FleetCamera) -> None:
        """Add a camera, whose load is added to the sum instead of recomputing it."""
        self.cameras[name], self.lag_s = camera, None
        if self._load is not None:
            self._load += camera.load

    def changed(self) -> None:
        self._load = self.lag_s = None

    @property
    def load(self) -> float:
        """Busy seconds per second of its cameras at their rungs."""
        if self._load is None:
            self._load = sum(camera.load for camera in self.cameras.values())
        return self._load

    def report(
        self, busy_share: float, backlog_s: float, now_s: float, *, unshared_s: float = 0.0, settle_s: float = 0.0
    ) -> None:
        """Correct the prediction by the busy share and the change of the backlog.

        Args:
            busy_share: busy fraction of the time since the last report.
            backlog_s: seconds of waiting work.
            unshared_s: seconds since the last report spent on the fixed cost of steps that were not full: an
                underloaded replica makes small steps, and is busier than its load.
            settle_s: seconds after which an abrupt change of load has taken effect.
        """
        before_s, before = self._backlogs[-1]
        period_s, grown_s = now_s - before_s, backlog_s - before
        self.lag_s = None
        self._backlogs.append((now_s, backlog_s))
        while now_s - self._backlogs[1][0] >= STANDING_S:
            self._backlogs.popleft()
        self._ignore_reports_until(now_s + settle_s)
        if self.load <= 0 or not 0 < period_s < math.inf:
            self._recent_reports.clear()
            return
        came_s = max(0.0, min(1.0, busy_share)) * period_s + grown_s - unshared_s
        self._recent_reports.append((period_s, came_s, self.load * period_s))
        while sum(each[0] for each in self._recent_reports) - self._recent_reports[0][0] >= AVERAGE_S:
            self._recent_reports.popleft()
        overloaded = self._standing_s > RUNNING_S
        heard_s, came_s, expected_s = self._sums(STANDING_S if overloaded else AVERAGE_S)
        # Arriving work / capacity.
        offered = max(0.0, came_s / heard_s)
        found = min(max(offered * heard_s / expected_s, 0.25), 4.0)
        if now_s < (self._fell_s if found > self.ratio else self._grew_s):
            self._recent_reports.clear()
            return
        if heard_s < STANDING_S:
            return
        weight = URGENT if overloaded and offered > 1.0 and found > self.ratio else SMOOTH
        self.ratio += (1 - (1 - weight) ** period_s) * (found - self.ratio)

    def _sums(self, seconds: float) -> tuple[float, float, float]:
        """Over the newest reports: seconds covered, seconds of work that arrived, and seconds of work predicted."""
        heard_s = came_s = expected_s = 0.0
        for period_s, came, expected in reversed(self._recent_reports):
            if heard_s >= seconds:
                break
            heard_s, came_s, expected_s = heard_s + period_s, came_s + came, expected_s + expected
        return heard_s, came_s, expected_s

    @property
    def _standing_s(self) -> float:
        """Least backlog of the last ``STANDING_S`` seconds."""
        return min(backlog_s for _, backlog_s in self._backlogs)

    def _ignore_reports_until(self, felt_s: float) -> None:
        """After an abrupt change, discard earlier reports, and until ``felt_s`` overload if the load fell, or underload
        if it grew."""
        before, self._before = self._before, self.load
        if abs(self.load - before) > ABRUPT * before:
            self._recent_reports.clear()
            if self.load > before:
                self._grew_s = felt_s
            else:
                self._fell_s = felt_s

    @property
    def predicted(self) -> float:
        """Load / capacity, without the backlog."""
        return self.load * self.ratio

    @property
    def utilisation(self) -> float:
        """Load / capacity, with the standing backlog to be worked off within :data:`HORIZON_S`; 1 is full."""
        return self.predicted + min(MOST_WAITING, max(0.0, self._standing_s - RUNNING_S) / HORIZON_S)
