"""Per-camera series of a decoder and a replica, and the series of fleet, windows and resources."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from cluster.metrics import families
from cluster.types import Answer, AskResult, StreamSpec

if TYPE_CHECKING:
    from cluster.types.reports import ReplicaStatus

STATES = ("waiting", "connecting", "running", "backoff", "error", "ended")

MAX_QUESTIONS = 8
"""Maximum number of a camera's questions with a score series of their own."""
MOST_QUESTIONS = 64
"""Maximum number of a process's questions counted by name; further ones count as ``other``."""

_DECODED = (
    families.camera_asked,
    families.camera_last_frame_age,
    families.camera_quality,
    families.decode_errors,
    families.stream_gaps,
)


class CameraMetrics:
    """One camera's decoder series, created together and removed with the camera."""

    def __init__(self, camera: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.camera = camera
        self._clock = clock
        self._last_frame: float | None = None
        self._lazy_events: set[str] = set()
        self.decode_errors = families.decode_errors.labels(camera)
        self.gaps = families.stream_gaps.labels(camera)
        self.quality = families.camera_quality.labels(camera)
        self.quality.set(1.0)
        self.asked = families.camera_asked.labels(camera)
        families.camera_last_frame_age.labels(camera).set_function(self.age_s)
        self.set_state("waiting")

    def set_state(self, state: str) -> None:
        """Set the camera's state, one of :data:`STATES`. Raises ``ValueError``: no such state."""
        if state not in STATES:
            raise ValueError(f"unknown camera state {state!r}; there are: {', '.join(STATES)}")
        for name in STATES:
            families.camera_state.labels(self.camera, name).set(name == state)

    def frame_decoded(self, arrived_s: float | None = None) -> None:
        self._last_frame = self._clock() if arrived_s is None else arrived_s

    def count_lazy_events(self, times: Mapping[str, int]) -> None:
        """Count events of lazy decoding; a count of 0 creates the event's series."""
        self._lazy_events |= times.keys()
        for event, count in times.items():
            families.lazy_events.labels(self.camera, event).inc(count)

    def age_s(self) -> float:
        return float("inf") if self._last_frame is None else max(0.0, self._clock() - self._last_frame)

    def remove(self) -> None:
        # By all labels: removal by one label scans every camera's series, and a draining decoder loses all cameras.
        for family in _DECODED:
            family.remove(self.camera)
        for state in STATES:
            families.camera_state.remove(self.camera, state)
        for event in self._lazy_events:
            families.lazy_events.remove(self.camera, event)


class AnsweredCameras:
    """Series of the cameras that one replica answers for; thread-safe.

    :meth:`retain_cameras` removes the series of cameras that moved to another replica, which exports them from then on.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._strides: dict[str, float] = {}
        self._scores: dict[str, set[str]] = {}
        self._questions: set[str] = set()

    def open_camera(self, spec: StreamSpec) -> None:
        with self._lock:
            self._strides[spec.stream] = spec.stride_s
            shown = self._scores.setdefault(spec.stream, set())
            for question in shown - {question.id for question in spec.questions}:
                families.camera_score.remove(spec.stream, question)
                shown.remove(question)

    def record_window(self, answers: Sequence[Answer]) -> None:
        """Record the answers, at least one, of one window; cameras that are not open are ignored."""
        camera, lag_s = answers[0].stream, answers[0].timing.latency_s
        with self._lock:
            if camera not in self._strides:
                return
            families.lag_strides.observe(lag_s / self._strides[camera])
            families.camera_lag.labels(camera).set(lag_s)
            families.camera_answered.labels(camera).set(self._clock())
            shown = self._scores[camera]
            for answer in answers:
                if len(self._questions) < MOST_QUESTIONS:
                    self._questions.add(answer.question)
                question = answer.question if answer.question in self._questions else "other"
                families.answers_total.labels(question, "yes" if answer.positive else "no").inc()
                if answer.question in shown or len(shown) < MAX_QUESTIONS:
                    shown.add(answer.question)
                    families.camera_score.labels(camera, answer.question).set(answer.score)

    def set_memory_bytes(self, held: Mapping[str, int]) -> None:
        with self._lock:
            for camera in self._strides.keys() & held.keys():
                families.camera_memory.labels(camera).set(held[camera])

    def retain_cameras(self, cameras: Iterable[str]) -> None:
        with self._lock:
            for camera in self._strides.keys() - set(cameras):
                # By all labels: removal by one label scans every camera's series, and a drained replica loses them all.
                for family in (families.camera_lag, families.camera_answered, families.camera_memory):
                    family.remove(camera)
                for question in self._scores.pop(camera):
                    families.camera_score.remove(camera, question)
                del self._strides[camera]


class FleetMetrics:
    """Series of the fleet's members and replicas; those of replicas that left are removed. ``wanted``: configured
    number of processes by role."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._shown: set[str] = set()
        self._expected: set[str] = set()
        for role, count in wanted.items():
            families.fleet_wanted.labels(role).set(count)
            families.fleet_members.labels(role).set(0)

    def set_members(self, there: Mapping[str, int]) -> None:
        for role, count in there.items():
            families.fleet_members.labels(role).set(count)

    def set_expected_cameras(self, cameras: Collection[str]) -> None:
        """Set the existing cameras, which alert rules on missing series need."""
        for camera in self._expected - set(cameras):
            families.camera_expected.remove(camera)
        for camera in set(cameras) - self._expected:
            families.camera_expected.labels(camera).set(1)
        self._expected = set(cameras)

    def set_replicas(self, statuses: Sequence[ReplicaStatus]) -> None:
        for status in statuses:
            families.fleet_utilisation.labels(status.name).set(status.utilisation)
            families.fleet_cameras.labels(status.name).set(status.cameras)
            families.fleet_lowered.labels(status.name).set(status.lowered)
        for gone in self._shown - {status.name for status in statuses}:
            for family in (families.fleet_utilisation, families.fleet_cameras, families.fleet_lowered):
                family.remove(gone)
        self._shown = {status.name for status in statuses}


def record_window(answer: Answer, *, late: bool = False) -> None:
    """Count one answered window: its result, tokens and stage latencies. Call once per window, not per question."""
    families.windows.labels("gated" if answer.gated else "done", "").inc()
    if late:
        families.windows.labels("late", "").inc()
    for kind in ("full", "kept", "refreshed", "reused", "new", "query", "encoded"):
        families.tokens.labels(kind).inc(getattr(answer.tokens, kind))
    timing = answer.timing
    if not answer.gated:
        for stage in ("queue", "vision", "plan", "llm"):
            families.stage_seconds.labels(stage).observe(getattr(timing, f"{stage}_s"))
    families.stage_seconds.labels("total").observe(timing.latency_s)


def drop_window(reason: str, count: int = 1) -> None:
    """Count deliberately dropped windows."""
    families.windows.labels("dropped", reason).inc(count)


def lose_window(count: int = 1) -> None:
    """Count windows lost with a process."""
    families.windows.labels("lost", "").inc(count)


def record_ask(result: AskResult) -> None:
    """Count one answered free question."""
    families.asks.labels("answered").inc()
    families.ask_seconds.labels("first_token").observe(result.first_token_s)
    families.ask_seconds.labels("total").observe(result.total_s)
    families.ask_read_bytes.inc(result.bytes_read)


ResourceState = Literal["accepted", "conflict", "invalid", "no_room", "waiting"]
WatchEnd = Literal["ended", "broken", "expired", "failed"]
WATCH_ENDS: tuple[WatchEnd, ...] = get_args(WatchEnd)


class WatchMetrics:
    """State of the watch on ``Camera`` resources; thread-safe. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listed_s = self._heard_s = -math.inf
        families.reconciler_age.labels("list").set_function(lambda: self._clock() - self._listed_s)
        families.reconciler_age.labels("word").set_function(lambda: self._clock() - self._heard_s)

    def listed(self) -> None:
        self._listed_s = self._heard_s = self._clock()

    def server_responded(self) -> None:
        """The server sent something on a watch, or ended one normally."""
        self._heard_s = self._clock()

    def restarted(self, why: WatchEnd) -> None:
        families.reconciler_watch_restarts.labels(why).inc()


def show_resources(states: Iterable[ResourceState]) -> None:
    """Set the number of resources in each state; ``states``: one per resource."""
    found = Counter(states)
    for state in get_args(ResourceState):
        families.camera_resources.labels(state).set(found[state])
