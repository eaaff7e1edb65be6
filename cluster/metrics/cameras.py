"""The series of one camera at its decoder, and at the replica that answers for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.metrics.families import (
    camera_answered,
    camera_lag,
    camera_last_frame_age,
    camera_memory,
    camera_quality,
    camera_score,
    camera_state,
    decode_errors,
    lag_strides,
    stream_gaps,
)
from cluster.types import Answer, StreamSpec

STATES = ("waiting", "connecting", "running", "backoff", "error", "ended")

MAX_QUESTIONS = 8
"""Questions of one camera that have a series each; further ones are answered and have none."""


class CameraMetrics:
    """One camera's series, so that they appear together and are gone when the camera is removed."""

    def __init__(self, camera: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.camera = camera
        self._clock = clock
        self._last_frame: float | None = None
        self.decode_errors = decode_errors.labels(camera)
        self.gaps = stream_gaps.labels(camera)
        self.quality = camera_quality.labels(camera)
        self.quality.set(1.0)
        camera_last_frame_age.labels(camera).set_function(self.age_s)
        self.state("waiting")

    def state(self, state: str) -> None:
        """Set the camera's state, one of :data:`STATES`.

        Raises:
            ValueError: no such state.
        """
        if state not in STATES:
            raise ValueError(f"unknown camera state {state!r}; there are: {', '.join(STATES)}")
        for name in STATES:
            camera_state.labels(self.camera, name).set(name == state)

    def frame(self, arrived_s: float | None = None) -> None:
        """A frame was decoded, now or at ``arrived_s`` of the clock."""
        self._last_frame = self._clock() if arrived_s is None else arrived_s

    def age_s(self) -> float:
        """Seconds since the last frame."""
        return float("inf") if self._last_frame is None else max(0.0, self._clock() - self._last_frame)

    def remove(self) -> None:
        """Forget the camera's series."""
        for name in STATES:
            camera_state.remove(self.camera, name)
        for family in (camera_last_frame_age, camera_quality, decode_errors, stream_gaps):
            family.remove(self.camera)


class AnsweredCameras:
    """Series of the cameras that one replica answers for; callable from any thread.

    A camera that moves to another replica has its series there: :meth:`keep` ends those of cameras that left.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._strides: dict[str, float] = {}
        self._scores: dict[str, set[str]] = {}

    def opened(self, spec: StreamSpec) -> None:
        """A camera came, or changed its questions or its stride."""
        with self._lock:
            self._strides[spec.stream] = spec.stride_s
            shown = self._scores.setdefault(spec.stream, set())
            for question in shown - {question.id for question in spec.questions}:
                camera_score.remove(spec.stream, question)
                shown.remove(question)

    def answered(self, answers: Sequence[Answer]) -> None:
        """All answers of one window, at least one; those of a camera that is not open count for nothing."""
        camera, lag_s = answers[0].stream, answers[0].timing.latency_s
        with self._lock:
            if camera not in self._strides:
                return
            lag_strides.observe(lag_s / self._strides[camera])
            camera_lag.labels(camera).set(lag_s)
            camera_answered.labels(camera).set(self._clock())
            shown = self._scores[camera]
            for answer in answers:
                if answer.question in shown or len(shown) < MAX_QUESTIONS:
                    shown.add(answer.question)
                    camera_score.labels(camera, answer.question).set(answer.score)

    def remembers(self, held: Mapping[str, int]) -> None:
        """Bytes that cameras' memories hold; of those that are open."""
        with self._lock:
            for camera in self._strides.keys() & held.keys():
                camera_memory.labels(camera).set(held[camera])

    def keep(self, cameras: Iterable[str]) -> None:
        """End the series of all but these."""
        with self._lock:
            for camera in self._strides.keys() - set(cameras):
                for family in (camera_lag, camera_answered, camera_memory):
                    family.remove(camera)
                for question in self._scores.pop(camera):
                    camera_score.remove(camera, question)
                del self._strides[camera]
