"""Load of one replica: predicted from its cameras' demands, corrected by its reports."""

import math
from collections import deque
from dataclasses import dataclass, field

from cluster.control.admission import UNBOUNDED, Holding
from cluster.control.camera_record import FleetCamera

AVERAGE_S = 16.0
"""Averaging time of reports, seconds: in less than the usual strides, the load is that of the cameras whose windows end
just then, and quality follows them up and down."""

SURGE, SURGE_S = 1.25, 5.0
"""Work over what can be done, in so many seconds, that is no chance: then these alone count."""

SMOOTH, URGENT = 0.1, 0.5
"""Weights per second of reports: normally, and of those that report overload."""

ABRUPT = 0.05
"""Relative change of the predicted load between two reports after which earlier reports are discarded."""

HORIZON_S = 8.0
"""Seconds within which a backlog is to be worked off."""

MOST_WAITING = 0.4
"""Cap of the backlog's utilisation: it is worked off over strides, not by shedding everyone."""


@dataclass(slots=True)
class ReplicaLoad:
    """Call :meth:`changed` after any change of its ``cameras`` but :meth:`add`.

    * ``limit``: what it can hold
    * ``ratio``: measured over predicted busy seconds
    * ``settled_s``: until then its last steps down have no full effect yet
    * ``lag_s``: expected mean lag of a window; ``None``: unknown since the last change
    """

    capacity: float
    limit: Holding = UNBOUNDED
    cameras: dict[str, FleetCamera] = field(default_factory=dict)
    ratio: float = 1.0
    reported_s: float = -math.inf
    backlog_s: float = 0.0
    settled_s: float = -math.inf
    draining: bool = False
    lag_s: float | None = None
    _load: float | None = None
    _before: float = 0.0
    _grew_s: float = -math.inf
    _fell_s: float = -math.inf
    _recent_reports: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, name: str, camera: FleetCamera) -> None:
        """Add a camera: of the loads, summed in this order, only its own is new."""
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
            busy_share: of the time since the last report.
            backlog_s: seconds of waiting work.
            unshared_s: seconds that its steps took since the last report because they were not full: an underloaded
                replica makes small steps, and is busier than it is loaded.
            settle_s: seconds after which changes of many cameras have taken effect.
        """
        period_s, grown_s = now_s - self.reported_s, backlog_s - self.backlog_s
        self.reported_s, self.backlog_s, self.lag_s = now_s, max(0.0, backlog_s), None
        self._ignore_reports_until(now_s + settle_s)
        if self.load <= 0 or not 0 < period_s < math.inf:
            self._recent_reports.clear()
            return
        came_s = max(0.0, min(1.0, busy_share)) * period_s + grown_s - unshared_s
        self._recent_reports.append((period_s, came_s, self.load * period_s))
        while sum(each[0] for each in self._recent_reports) - self._recent_reports[0][0] >= AVERAGE_S:
            self._recent_reports.popleft()
        heard_s, came_s, expected_s = self._sums(SURGE_S)
        if came_s <= SURGE * heard_s:
            heard_s, came_s, expected_s = self._sums(AVERAGE_S)
        # Work that arrived over work that could be done.
        offered = max(0.0, came_s / heard_s)
        found = min(max(offered * heard_s * self.capacity / expected_s, 0.25), 4.0)
        if now_s < (self._fell_s if found > self.ratio else self._grew_s):
            self._recent_reports.clear()
            return
        weight = URGENT if offered > 1.0 and found > self.ratio else SMOOTH
        self.ratio += (1 - (1 - weight) ** period_s) * (found - self.ratio)

    def _sums(self, seconds: float) -> tuple[float, float, float]:
        """Of the newest reports: seconds that they cover, of work that came, and of work that was predicted."""
        heard_s = came_s = expected_s = 0.0
        for period_s, came, expected in reversed(self._recent_reports):
            if heard_s >= seconds:
                break
            heard_s, came_s, expected_s = heard_s + period_s, came_s + came, expected_s + expected
        return heard_s, came_s, expected_s

    def _ignore_reports_until(self, felt_s: float) -> None:
        """Discard reports from before an abrupt change: of overload where the load fell, of underload where it grew."""
        before, self._before = self._before, self.load
        if abs(self.load - before) > ABRUPT * before:
            self._recent_reports.clear()
            if self.load > before:
                self._grew_s = felt_s
            else:
                self._fell_s = felt_s

    @property
    def predicted(self) -> float:
        """Load over capacity, without the backlog."""
        return self.load / self.capacity * self.ratio

    @property
    def utilisation(self) -> float:
        """Load over capacity with the backlog, to be worked off within :data:`HORIZON_S`; 1 is full."""
        # A backlog of a second or so is the running step and the next one.
        return self.predicted + min(MOST_WAITING, max(0.0, self.backlog_s - 1.0) / HORIZON_S)
