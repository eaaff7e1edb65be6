"""Windows of a replica's cameras into the engine, step by step, and what becomes of those that cannot be answered."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.engine.base import Engine
from cluster.errors import UnavailableError
from cluster.replica.open_stream import OpenStream
from cluster.replica.pace import StepPace
from cluster.replica.window_queue import DroppedWindow, DropReason, WindowQueue
from cluster.types import Answer, WindowRequest
from cluster.types.priority import Priority

log = logging.getLogger(__name__)

REST_S = 0.5
"""Between two steps of an engine that is not there: its windows wait that long for the next one."""


class WorkerEvents(Protocol):
    """What the engine thread tells; called on that thread, so implementations must not block."""

    def answered(self, answers: Sequence[Answer], *, late: bool) -> None:
        """One window was answered; ``late``: after the next one was due."""
        ...

    def batch(self, windows: int) -> None:
        """So many windows went through the engine together."""
        ...

    def dropped(self, stream: str, reason: str, windows: int) -> None:
        """Windows were given up; ``reason`` is a :class:`DropReason` or ``failed``."""
        ...

    def lost(self, stream: str, windows: int) -> None:
        """Windows of which video never came, or one in the making that went down with a stream that began anew."""
        ...


class Steps:
    """The windows that wait, and the engine that answers them. Called on the engine's thread.

    ``failures``: steps in a row in which every window failed; ``began_s``: when the engine was last called, monotonic;
    ``steps``: so far, in which ``windows`` were computed; ``trouble``: why the engine was not there when it was last
    asked, empty where it was.

    Args:
        streams: the cameras that are open, by name; ``lock``: held while what a camera reports changes.
        queue: where windows wait; ``pace``: what each is expected to take.
        max_batch, step_budget_s: see :class:`~cluster.replica.worker.EngineWorker`.
    """

    def __init__(
        self,
        engine: Engine,
        events: WorkerEvents,
        streams: Mapping[str, OpenStream],
        lock: threading.Condition,
        *,
        queue: WindowQueue,
        pace: StepPace,
        max_batch: int,
        step_budget_s: float,
    ) -> None:
        self.failures = 0
        self.trouble = ""
        self.began_s = -math.inf
        self.steps = self.windows = 0
        self._engine = engine
        self._events = events
        self._streams = streams
        self._lock = lock
        self._queue = queue
        self._pace = pace
        self._max_batch = max_batch
        self._step_budget_s = step_budget_s
        self._rested_s = 0.0

    def enqueue(self, stream: OpenStream, requests: Sequence[WindowRequest]) -> None:
        """Windows of a camera have closed."""
        self._wait(stream, requests, self._queue.offer)

    @property
    def rest_s(self) -> float | None:
        """Seconds for which the engine, which was not there, is not asked again; ``None`` when it may be."""
        left = self._rested_s - time.monotonic()
        return left if left > 0 else None

    def step(self) -> None:
        """Answer one batch of what waits: the most urgent windows."""
        batch = self._queue.take(self._max_batch, time.monotonic(), self._step_budget_s)
        for gone in batch.dropped:
            self._drop(gone.request.stream, gone.reason)
        if not batch.requests:
            return
        try:
            self._answer(batch.requests)
            self.failures = 0
        except UnavailableError as error:
            self._put_back(batch.requests, error)
        except Exception:
            log.exception("a batch of %d windows failed; answering them one by one", len(batch.requests))
            self._answer_singly(batch.requests)

    def _wait(
        self,
        stream: OpenStream,
        requests: Sequence[WindowRequest],
        offer: Callable[..., list[DroppedWindow]],
    ) -> None:
        spec = stream.spec
        for request in requests:
            for gone in offer(
                request,
                stride_s=spec.stride_s,
                # An answer that starts later than the window is long tells of a scene that is gone.
                late_s=spec.window_s,
                patient=spec.patient or stream.ending,
                priority=Priority.of(spec.priority),
                seconds=self._pace.expect(spec.stream),
            ):
                self._drop(gone.request.stream, gone.reason)

    def _put_back(self, requests: Sequence[WindowRequest], error: UnavailableError) -> None:
        """The engine is not there, which is no fault of the windows: they wait for the next step."""
        self.failures += 1
        self.trouble = str(error)
        self._rested_s = time.monotonic() + REST_S
        log.warning("%d windows wait: %s", len(requests), error)
        for request in requests:
            self._wait(self._streams[request.stream], [request], self._queue.put_back)

    def _answer_singly(self, requests: Sequence[WindowRequest]) -> None:
        """One camera's trouble must not cost the others their answers."""
        failed = 0
        for place, request in enumerate(requests):
            try:
                self._answer([request])
            except UnavailableError as error:
                self._put_back(requests[place:], error)
                return
            except Exception as error:
                log.exception("window %d of camera %r failed", request.window, request.stream)
                failed += 1
                self._restart(request.stream, f"the engine failed on it: {error}")
        self.failures = self.failures + 1 if failed == len(requests) else 0

    def _restart(self, name: str, reason: str) -> None:
        """Begin a camera anew after the engine failed on it; its state cannot be trusted."""
        stream = self._streams[name]
        self._drop(name, "failed", 1 + len(self._queue.discard(name)))
        stream.book.settled()
        stream.broken = reason
        self._engine.evict(name)
        self._engine.admit(stream.spec)
        stream.begin_anew()

    def _answer(self, requests: Sequence[WindowRequest]) -> None:
        self.began_s = time.monotonic()
        answers = self._engine.step(requests)
        self.trouble = ""
        self._pace.stepped(answers, time.monotonic() - self.began_s)
        computed = len({answer.stream for answer in answers if not answer.gated})
        self.steps += computed > 0
        self.windows += computed
        self._events.batch(len(requests))
        for request in requests:
            mine = [answer for answer in answers if answer.stream == request.stream]
            self._settle(self._streams[request.stream], mine)

    def _settle(self, stream: OpenStream, answers: Sequence[Answer]) -> None:
        if not answers:
            # The engine no longer has the window's frames.
            self._drop(stream.spec.stream, DropReason.LATE)
            return
        answers = [replace(answer, incarnation=stream.incarnation) for answer in answers]
        with self._lock:
            stream.answered(answers)
        self._events.answered(answers, late=stream.latency_s > stream.spec.stride_s)

    def _drop(self, name: str, reason: str, windows: int = 1) -> None:
        self._streams[name].counts["windows_dropped"] += windows
        self._events.dropped(name, reason, windows)
