"""The engine thread of a replica: frames in, batches of windows through the engine, answers out.

Everything that touches the engine runs on this one thread. Other threads only put work into bounded inboxes. Between
two steps the thread takes every frame that waits (cheap), which closes windows, then answers one batch of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.engine.base import Engine
from cluster.errors import CapacityError, ConfigError
from cluster.scheduling.reports import StreamReport
from cluster.scheduling.windows import WindowQueue
from cluster.types import Answer, FrameSample, LastAnswer, StreamSpec, WindowRequest

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Steps in a row that may fail on every window before the replica counts as broken."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a camera is: frames up to ``index`` were taken (-1: none yet), windows were answered or dropped.

    ``refused``: one sentence when frame ``index`` could not be used; the camera must go on with a fresh anchor.
    """

    index: int
    windows_done: int
    windows_gated: int
    windows_dropped: int
    refused: str = ""


class WorkerEvents(Protocol):
    """What the engine thread tells; called on that thread, so implementations must not block."""

    def progress(self, stream: str, progress: StreamProgress) -> None:
        """A frame was taken or refused, or a window was settled."""
        ...

    def answered(self, answers: Sequence[Answer], *, late: bool) -> None:
        """One window was answered; ``late``: after the next one was due."""
        ...

    def batch(self, windows: int) -> None:
        """So many windows went through the engine together."""
        ...

    def dropped(self, stream: str, reason: str, windows: int) -> None:
        """Windows were given up: late, replaced, overflow, or failed."""
        ...

    def lost(self, stream: str, windows: int) -> None:
        """A window in the making went down with a stream that began anew."""
        ...


@dataclass(slots=True)
class _Stream:
    spec: StreamSpec
    patient: bool
    inbox: deque[tuple[FrameSample, float]] = field(default_factory=deque)
    ending: bool = False
    index: int = -1
    unanswered_frames: int = 0
    latency_s: float = 0.0
    last_answers: dict[str, LastAnswer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class EngineWorker:
    """Owns the engine from :meth:`start` to :meth:`stop`.

    Args:
        max_batch: windows answered together at most.
        per_stream: windows of one camera that may wait (see :class:`WindowQueue`).
        inbox: frames of one camera that may wait; the sender's credit.
        stall_s: seconds one engine call may take before :meth:`check` says the engine is stuck.
    """

    def __init__(
        self,
        engine: Engine,
        events: WorkerEvents,
        *,
        max_batch: int = 8,
        per_stream: int = 2,
        inbox: int = 64,
        stall_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._events = events
        self._max_batch = max_batch
        self._inbox = inbox
        self._stall_s = stall_s
        self._clock = clock
        self._queue = WindowQueue(per_stream=per_stream)
        self._streams: dict[str, _Stream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread -----------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finish the step under way and end; false when it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open(self, spec: StreamSpec, *, patient: bool = False) -> Future[None]:
        """Admit a camera, or change its questions and policies; done when the engine has agreed.

        The future raises ``ConfigError`` when it cannot.
        """
        done: Future[None] = Future()
        self._command(lambda: self._admit(spec, patient, done))
        return done

    def offer(self, sample: FrameSample) -> None:
        """Put a frame of an open camera into its inbox.

        Raises:
            CapacityError: the inbox is full: the sender ignored its credit.
            KeyError: the camera is not open.
        """
        with self._wake:
            stream = self._streams[sample.stream]
            if len(stream.inbox) >= self._inbox:
                raise CapacityError(f"camera {sample.stream!r} has {self._inbox} frames waiting; it has no credit left")
            stream.inbox.append((sample, self._clock()))
            self._wake.notify_all()

    def close(self, stream: str, *, flush: bool = False) -> None:
        """Forget a camera: at once, or with ``flush`` after its last, incomplete window was answered."""
        self._command(lambda: self._close(stream, flush))

    def credit(self, stream: str) -> int:
        """Frames the inbox of a camera still takes."""
        with self._wake:
            known = self._streams.get(stream)
            return self._inbox - len(known.inbox) if known else self._inbox

    def progress(self, stream: str) -> StreamProgress:
        """How far a camera is."""
        with self._wake:
            known = self._streams.get(stream)
            return _progress(known) if known else StreamProgress(-1, 0, 0, 0)

    def reports(self) -> list[StreamReport]:
        """Every open camera, for the heartbeat."""
        with self._wake:
            return [
                StreamReport(name, stream.latency_s, tuple(stream.last_answers.values()), dict(stream.counts))
                for name, stream in self._streams.items()
            ]

    def depths(self) -> dict[str, int]:
        """Items that wait now, by queue."""
        with self._wake:
            return {"windows": len(self._queue), "frames": sum(len(s.inbox) for s in self._streams.values())}

    def check(self) -> None:
        """Whether the engine thread is alive and moving.

        Raises:
            RuntimeError: it is dead, stuck, or fails on every window.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the engine thread has died")
        if self._failures >= MAX_FAILURES:
            raise RuntimeError(f"the engine failed on every window of its last {self._failures} batches")
        busy_since = self._busy_since
        if busy_since is not None and self._clock() - busy_since > self._stall_s:
            raise RuntimeError(f"the engine has made no progress for more than {self._stall_s:g} s")

    # -- the engine thread ----------------------------------------------------------------------
    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
            self._busy_since = self._clock()
            for command in commands:
                command()
            for name in list(self._streams):
                self._take_frames(name)
            self._step()
            self._busy_since = None

    def _has_work(self) -> bool:
        return bool(
            self._stopping
            or self._commands
            or len(self._queue)
            or any(stream.inbox or stream.ending for stream in self._streams.values())
        )

    def _admit(self, spec: StreamSpec, patient: bool, done: Future[None]) -> None:
        try:
            self._engine.admit(spec)
        except (ConfigError, ValueError) as error:
            done.set_exception(error)
            return
        with self._wake:
            known = self._streams.get(spec.stream)
            if known is None:
                self._streams[spec.stream] = _Stream(spec, patient)
            else:
                known.spec, known.patient, known.ending = spec, patient, False
        done.set_result(None)

    def _close(self, name: str, flush: bool) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        if flush:
            stream.ending = True
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._queue.discard(name)
        self._engine.evict(name)
        with self._wake:
            self._streams.pop(name, None)

    def _take_frames(self, name: str) -> None:
        stream = self._streams[name]
        while stream.inbox and not self._must_wait(stream):
            with self._wake:
                sample, arrived_s = stream.inbox.popleft()
            self._push(stream, sample, arrived_s)
        if stream.ending and not stream.inbox:
            self._finish(name, stream)

    def _must_wait(self, stream: _Stream) -> bool:
        """A fresh frame makes the engine forget the windows that still wait; a patient camera loses none either way."""
        return self._queue.waiting(stream.spec.stream) > 0 and (stream.patient or stream.inbox[0][0].fresh)

    def _push(self, stream: _Stream, sample: FrameSample, arrived_s: float) -> None:
        name = stream.spec.stream
        if sample.fresh and stream.unanswered_frames:
            stream.counts["windows_lost"] += 1
            stream.unanswered_frames = 0
            self._events.lost(name, 1)
        stream.index = sample.index
        try:
            closed = self._engine.push(sample)
        except ValueError as error:
            self._events.progress(name, _progress(stream, refused=str(error)))
            return
        if closed:
            stream.unanswered_frames = 0
        if not closed or sample.pts + sample.duration // 8 >= closed[-1].end:
            stream.unanswered_frames += 1
        self._enqueue(stream, [replace(request, arrived_s=arrived_s) for request in closed])
        self._events.progress(name, _progress(stream))

    def _enqueue(self, stream: _Stream, requests: Sequence[WindowRequest]) -> None:
        for request in requests:
            # An answer that starts later than the window is long tells of a scene that is gone.
            for gone in self._queue.offer(request, late_s=stream.spec.window_s, patient=stream.patient):
                self._drop(gone.request.stream, gone.reason)

    def _finish(self, name: str, stream: _Stream) -> None:
        """Answer what is left of a camera whose source ended, then forget it."""
        if stream.unanswered_frames:
            stream.unanswered_frames = 0
            stream.patient = True
            self._enqueue(stream, self._engine.flush(name))
        if not self._queue.waiting(name):
            self._forget(name)

    def _step(self) -> None:
        batch = self._queue.take(self._max_batch, self._clock())
        for gone in batch.dropped:
            self._drop(gone.request.stream, gone.reason)
        if not batch.requests:
            return
        try:
            self._answer(batch.requests)
            self._failures = 0
        except Exception:
            log.exception("a batch of %d windows failed; answering them one by one", len(batch.requests))
            self._answer_singly(batch.requests)

    def _answer_singly(self, requests: Sequence[WindowRequest]) -> None:
        """One camera's trouble must not cost the others their answers."""
        failed = 0
        for request in requests:
            try:
                self._answer([request])
            except Exception as error:
                log.exception("window %d of camera %r failed", request.window, request.stream)
                failed += 1
                self._restart(request.stream, f"the engine failed on it: {error}")
        self._failures = self._failures + 1 if failed == len(requests) else 0

    def _restart(self, name: str, reason: str) -> None:
        """Begin a camera anew after the engine failed on it; its state cannot be trusted."""
        stream = self._streams[name]
        self._drop(name, "failed", 1 + len(self._queue.discard(name)))
        stream.unanswered_frames = 0
        self._engine.evict(name)
        self._engine.admit(stream.spec)
        self._events.progress(name, _progress(stream, refused=reason))

    def _answer(self, requests: Sequence[WindowRequest]) -> None:
        self._busy_since = self._clock()
        answers = self._engine.step(requests)
        self._events.batch(len(requests))
        for request in requests:
            mine = [answer for answer in answers if answer.stream == request.stream]
            self._settle(self._streams[request.stream], mine)

    def _settle(self, stream: _Stream, answers: Sequence[Answer]) -> None:
        if not answers:
            return
        first = answers[0]
        with self._wake:
            counts = stream.counts
            counts["windows_gated" if first.gated else "windows_done"] += 1
            counts["tokens_full"] += first.tokens.full
            counts["tokens_kept"] += first.tokens.kept
            counts["tokens_computed"] += first.tokens.computed
            stream.latency_s = first.timing.latency_s
            for answer in answers:
                stream.last_answers[answer.question] = LastAnswer(
                    answer.question, answer.score, answer.positive, answer.end
                )
        self._events.answered(answers, late=first.timing.latency_s > stream.spec.stride_s)
        self._events.progress(stream.spec.stream, _progress(stream))

    def _drop(self, name: str, reason: str, windows: int = 1) -> None:
        stream = self._streams[name]
        stream.counts["windows_dropped"] += windows
        self._events.dropped(name, reason, windows)
        self._events.progress(name, _progress(stream))


def _progress(stream: _Stream, refused: str = "") -> StreamProgress:
    counts = stream.counts
    return StreamProgress(
        stream.index, counts["windows_done"], counts["windows_gated"], counts["windows_dropped"], refused
    )
