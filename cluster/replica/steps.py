"""Pushes frames into the engine, and windows through queue and engine, on the engine thread."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cluster.control.costs import CostModel, WindowWork
from cluster.errors import DeviceError, UnavailableError
from cluster.replica.window_accounting import WindowAccounting
from cluster.replica.window_queue import DropReason, WindowQueue
from cluster.types import Answer, FrameSample, LastAnswer, StreamSpec, WindowRequest
from cluster.types.cameras import Priority
from cluster.types.reports import AccountedSpan, HandOverResult, StreamReport, WindowCounters

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.replica.events import ReplicaEvents

log = logging.getLogger(__name__)

REST_S = 0.5
"""Seconds between attempts to call an unavailable engine; windows stay queued meanwhile."""


class StepTimeEstimator:
    """Predicts the compute time of windows; used on the engine thread.

    Without a cost model the time is proportional to the computed tokens, at a rate learnt from the steps.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        self._costs = costs
        # Measured / predicted seconds.
        self._ratio = 0.0 if costs is None else 1.0
        self._cameras: dict[str, float] = {}
        self._mean = 0.0

    def expected_s(self, stream: str) -> float:
        """Seconds that a camera's next window adds to a step; the mean of all cameras for an unknown one."""
        return self._ratio * self._cameras.get(stream, self._mean)

    def observe(self, answers: Sequence[Answer], seconds: float) -> None:
        """Learn from a step that took ``seconds`` for these answers."""
        predicted = 0.0
        for stream, answer in {answer.stream: answer for answer in answers}.items():
            work = WindowWork.from_counts(answer.tokens)
            expected = work.computed if self._costs is None else self._costs.window_seconds(work)
            asked = 0.0 if answer.gated else expected
            predicted += asked
            self._mean += 0.1 * (asked - self._mean)
            self._cameras[stream] = (self._cameras.get(stream, asked) + asked) / 2
        if predicted > 0:
            fixed = 0.0 if self._costs is None else self._costs.step_s
            found = seconds / (predicted + fixed)
            self._ratio = found if self._ratio == 0 else self._ratio + 0.2 * (found - self._ratio)

    def remove_stream(self, stream: str) -> None:
        """Drop a camera's estimate."""
        self._cameras.pop(stream, None)


@dataclass(frozen=True, slots=True)
class PendingFrame:
    """A frame waiting for the engine thread."""

    sample: FrameSample
    arrived_s: float
    taken: Future[None]


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


@dataclass(slots=True)
class OpenStream:
    """State of an open camera.

    ``ending``: its source ended; it is closed once nothing waits. ``broken``: why only a random access frame is
    accepted. ``before``: counts when it was last closed here; ``computed``: see :class:`StreamReport`; ``gated``:
    whether its last window was; ``leaving``: future of its pending hand-over; ``incarnation``: changes whenever window
    numbering restarts; ``run``: id of the counts.
    """

    spec: StreamSpec
    inbox: deque[PendingFrame] = field(default_factory=deque)
    ending: bool = False
    broken: str = ""
    accounting: WindowAccounting = field(default_factory=WindowAccounting)
    before: Counter[str] = field(default_factory=Counter)
    latency_s: float = 0.0
    last_answers: dict[str, LastAnswer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=lambda: Counter(tokens_full=0, tokens_kept=0, windows_resumed=0))
    gated: bool = False
    leaving: Future[HandOverResult] | None = None
    incarnation: str = field(default_factory=_new_id)
    run: str = field(default_factory=_new_id)
    accounted_before: AccountedSpan | None = None

    @classmethod
    def opened(cls, spec: StreamSpec, last: StreamReport | None) -> OpenStream:
        """State of a newly opened camera; ``last``: its counts when it was closed here before."""
        stream = cls(spec)
        if last is not None and last.life == spec.life:
            stream.run = last.run
            stream.counts.update(last.counts)
            stream.computed.update(last.computed)
            stream.before.update(last.counts)
            stream.accounted_before = last.accounted
        return stream

    def change_spec(self, spec: StreamSpec) -> None:
        """Apply a new specification; last answers are kept of unchanged questions only."""
        asked = {(question.id, question.text) for question in self.spec.questions}
        same = {question.id for question in spec.questions if (question.id, question.text) in asked}
        self.last_answers = {each: last for each, last in self.last_answers.items() if each in same}
        self.spec = spec

    def windows(self) -> WindowCounters:
        """Window counts since it was opened."""
        names = ("windows_done", "windows_gated", "windows_dropped")
        done, gated, dropped = (self.counts[name] - self.before[name] for name in names)
        return WindowCounters(done, gated, dropped, *self.accounting.closed)

    def answered(self, answers: Sequence[Answer]) -> None:
        """Record the answers of one window, one per question."""
        first = answers[0]
        self.accounting.window_answered()
        self.counts["windows_gated" if first.gated else "windows_done"] += 1
        self.computed["windows_resumed"] += self.gated and not first.gated
        self.gated = first.gated
        self.counts["tokens_full"] += first.tokens.full
        self.counts["tokens_kept"] += first.tokens.kept
        self.counts["tokens_computed"] += first.tokens.computed
        if not first.gated:
            self.computed.update(tokens_full=first.tokens.full, tokens_kept=first.tokens.kept)
        self.latency_s = first.timing.latency_s
        for answer in answers:
            self.last_answers[answer.question] = LastAnswer(answer.question, answer.score, answer.positive, answer.end)

    def report(self) -> StreamReport:
        """Report for the heartbeat."""
        last, spec, counted = tuple(self.last_answers.values()), self.spec, self.windows()
        settled = counted.done + counted.gated + counted.dropped
        return StreamReport(
            spec.stream,
            self.latency_s,
            last,
            dict(self.counts),
            dict(self.computed),
            life=spec.life,
            run=self.run,
            now_s=time.monotonic(),
            # Frames of a patient camera are held back, so their arrival is no clock.
            accounted=None if spec.patient else self.accounting.accounted(settled, spec.stride_s),
            accounted_before=self.accounted_before,
        )


@dataclass(slots=True)
class StepRunner:
    """Moves frames from cameras' inboxes into the engine, and batches of windows through it, on the engine thread.

    * ``streams``: open cameras by name; ``lock``: guards their inboxes and report fields
    * ``is_confirmed``: whether this process is known to own its cameras
    * ``max_batch``, ``step_budget_s``: see :class:`~cluster.replica.worker.EngineWorker`
    * ``failures``: consecutive steps in which every window failed; ``began_s``: monotonic time of the last engine call
    * ``steps``, ``windows``: steps that computed something so far, and the windows computed in them
    * ``trouble``: why the engine was unavailable at the last attempt, empty if it was not
    * ``held``: answers of a step during which this process was suspended; if others own the cameras by now, the windows
      count as lost
    """

    engine: Engine
    events: ReplicaEvents
    streams: Mapping[str, OpenStream]
    lock: threading.Condition
    queue: WindowQueue
    estimator: StepTimeEstimator
    is_confirmed: Callable[[], bool]
    max_batch: int
    step_budget_s: float
    failures: int = 0
    trouble: str = ""
    began_s: float = -math.inf
    steps: int = 0
    windows: int = 0
    held: list[tuple[OpenStream, list[Answer]]] = field(default_factory=list)
    _rested_s: float = 0.0
    # Seconds spent on prefilling ahead since the last step.
    _ahead_s: float = 0.0

    def take_frames(self, stream: OpenStream) -> Literal["stays", "ended", "leaves"]:
        """Push every frame of a camera that need not wait. ``ended``: its source has ended, and its last window is
        answered; ``leaves``: it is being handed over, and nothing of it waits here."""
        while stream.inbox and not self.must_wait(stream):
            with self.lock:
                offer = stream.inbox.popleft()
            try:
                self._push(stream, offer)
            except DeviceError:
                raise
            except Exception as error:
                # One camera's frame must not stop the others; its decoder is told and continues with a fresh frame.
                offer.taken.set_exception(error)
            else:
                offer.taken.set_result(None)
        if stream.ending and not stream.inbox:
            self._flush(stream)
            return "stays" if self.queue.waiting(stream.spec.stream) else "ended"
        if stream.leaving is not None and not stream.inbox and not self.queue.waiting(stream.spec.stream):
            return "leaves"
        return "stays"

    def must_wait(self, stream: OpenStream) -> bool:
        """Whether the next frame must wait: a fresh one discards waiting windows; a patient camera must lose none."""
        waiting = self.queue.waiting(stream.spec.stream)
        return waiting > 0 and (stream.spec.patient or not self._continues(stream, stream.inbox[0]))

    @staticmethod
    def _continues(stream: OpenStream, offer: PendingFrame) -> bool:
        anew = bool(stream.broken) and offer.sample.random_access
        return not anew and stream.accounting.continues(offer.sample, offer.arrived_s, patient=stream.spec.patient)

    def count_lost(self, stream: OpenStream, windows: int) -> None:
        """Count windows whose video never arrived."""
        if windows:
            stream.counts["windows_lost"] += windows
            self.events.lost(stream.spec.stream, windows)

    def _push(self, stream: OpenStream, offer: PendingFrame) -> None:
        sample, spec = offer.sample, stream.spec
        if not self._continues(stream, offer):
            stream.broken = ""
            sample = replace(sample, fresh=True, gap=False)
            self.count_lost(
                stream, stream.accounting.restart(sample, offer.arrived_s, spec.stride_s, patient=spec.patient)
            )
        elif stream.broken:
            raise ValueError(stream.broken)
        closed = self.engine.push(sample)
        self.count_lost(stream, stream.accounting.add_frame(sample, offer.arrived_s, closed, spec.stride_s))
        self._enqueue(stream, [replace(request, arrived_s=offer.arrived_s) for request in closed])

    def _flush(self, stream: OpenStream) -> None:
        """Close the incomplete last window of a camera whose source ended."""
        if stream.accounting.in_progress:
            stream.accounting.in_progress = False
            self._enqueue(stream, self.engine.flush(stream.spec.stream))

    def _enqueue(self, stream: OpenStream, requests: Sequence[WindowRequest], *, again: bool = False) -> None:
        """Enqueue closed windows of a camera; ``again``: they could not be started."""
        spec = stream.spec
        for request in requests:
            for gone in self.queue.offer(
                request,
                stride_s=spec.stride_s,
                # An answer started more than a window's length late is about a past scene.
                late_s=spec.window_s,
                patient=spec.patient or stream.ending,
                priority=Priority.of(spec.priority),
                seconds=self.estimator.expected_s(spec.stream),
                again=again,
            ):
                self._drop(gone.request.stream, gone.reason)

    @property
    def backoff_s(self) -> float | None:
        """Seconds until an unavailable engine is called again; ``None`` if it may be called now."""
        left = self._rested_s - time.monotonic()
        return left if left > 0 else None

    def step(self) -> None:
        """Answer one batch of the most urgent windows."""
        batch = self.queue.take_batch(self.max_batch, time.monotonic(), self.step_budget_s)
        for gone in batch.dropped:
            self._drop(gone.request.stream, gone.reason)
        if not batch.requests:
            return
        try:
            self._answer(batch.requests)
            self.failures = 0
        except UnavailableError as error:
            self._requeue(batch.requests, error)
        except DeviceError:
            raise
        except Exception:
            log.exception("a batch of %d windows failed; answering them one by one", len(batch.requests))
            self._answer_singly(batch.requests)

    def prefill_ahead(self) -> bool:
        """Prefill open windows ahead of their end; returns whether there may be more to do."""
        self.began_s = time.monotonic()
        try:
            return self.engine.prefill_ahead()
        except DeviceError:
            raise
        except Exception:
            log.exception("prefilling open windows failed; they are computed when they end")
            return False
        finally:
            self._ahead_s += time.monotonic() - self.began_s

    def _requeue(self, requests: Sequence[WindowRequest], error: UnavailableError) -> None:
        """Requeue windows and back off: the engine is unavailable."""
        self.failures += 1
        self.trouble = str(error)
        self._rested_s = time.monotonic() + REST_S
        log.warning("%d windows wait: %s", len(requests), error)
        for request in requests:
            self._enqueue(self.streams[request.stream], [request], again=True)

    def _answer_singly(self, requests: Sequence[WindowRequest]) -> None:
        """Answer windows one by one: an error of one camera must not affect the others."""
        failed = 0
        for place, request in enumerate(requests):
            try:
                self._answer([request])
            except UnavailableError as error:
                self._requeue(requests[place:], error)
                return
            except DeviceError:
                raise
            except Exception as error:
                log.exception("window %d of camera %r failed", request.window, request.stream)
                failed += 1
                self._restart(request.stream, f"the engine failed on it: {error}")
        self.failures = self.failures + 1 if failed == len(requests) else 0

    def _restart(self, name: str, reason: str) -> None:
        """Reopen a camera after the engine failed on it; its state cannot be trusted."""
        stream = self.streams[name]
        self._drop(name, "failed", 1 + len(self.queue.discard(name)))
        stream.accounting.in_progress = False
        stream.broken = reason
        self.engine.evict(name)
        self.engine.admit(stream.spec)
        stream.incarnation = _new_id()

    def _answer(self, requests: Sequence[WindowRequest]) -> None:
        self.began_s = time.monotonic()
        following = self.queue.peek(self.max_batch)
        answers = self.engine.step(requests, following)
        self.trouble = ""
        self.estimator.observe(answers, time.monotonic() - self.began_s + self._ahead_s)
        self._ahead_s = 0.0
        computed = len({answer.stream for answer in answers if not answer.gated})
        self.steps += computed > 0
        self.windows += computed
        if computed:
            self.events.batch(computed)
        for request in requests:
            mine = [answer for answer in answers if answer.stream == request.stream]
            self.held.append((self.streams[request.stream], mine))
        if self.is_confirmed():
            self.settle()

    def settle(self) -> None:
        """Publish held answers of cameras that are still open."""
        held, self.held = self.held, []
        for stream, answers in held:
            if self.streams.get(stream.spec.stream) is stream:
                self._settle(stream, answers)

    def _settle(self, stream: OpenStream, answers: Sequence[Answer]) -> None:
        if not answers:
            # The engine no longer has the window's frames.
            self._drop(stream.spec.stream, DropReason.LATE)
            return
        answers = [replace(answer, incarnation=stream.incarnation) for answer in answers]
        with self.lock:
            stream.answered(answers)
        self.events.answered(answers, late=stream.latency_s > stream.spec.stride_s)

    def _drop(self, name: str, reason: str, windows: int = 1) -> None:
        self.streams[name].counts["windows_dropped"] += windows
        self.events.dropped(name, reason, windows)
