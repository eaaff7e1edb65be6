"""The engine thread of a replica: takes frames, runs batches of windows through the engine, emits answers.

Everything that touches the engine runs on this one thread; other threads only enqueue work into bounded inboxes. In
each iteration the thread pushes every waiting frame (cheap), which closes windows, then answers one batch of the most
urgent windows. The length of a step is bounded, so that an urgent window never waits long.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.control.costs import CostModel
from cluster.errors import CapacityError, ConfigError, DeviceError, NotReadyError, UnavailableError, UnknownCameraError
from cluster.replica.ask_queue import AskQueue, stopping
from cluster.replica.steps import OpenStream, PendingFrame, StepRunner, StepTimeEstimator
from cluster.replica.window_queue import WindowQueue
from cluster.types import AskResult, AskSpec, DeletedMemory, FrameSample, StreamSpec
from cluster.types.cameras import Priority
from cluster.types.reports import HandOverResult, ReplicaReport, StreamReport, WindowCounters

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.replica.events import ReplicaEvents

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_REPORTS = 1024
"""Maximum closed cameras whose last report is kept for heartbeats."""

RECENT_S, REPEATED = 60.0, 32
"""Seconds for which every heartbeat repeats a closed camera's report, and how many older ones it repeats in turn: each
is work for the controller, and a replica may have had many cameras that are elsewhere now."""

MAX_FAILURES = 3
"""Consecutive steps failing on every window after which the replica counts as broken."""


class EngineWorker:
    """Owns the engine from :meth:`start` to :meth:`stop`.

    Args:
        engine: used only on the worker's thread.
        events: receives the worker's events, on its thread.
        max_batch: maximum windows per step; ``step_budget_s``: time limit of a step of more than one window, predicted
            from ``costs`` (``None``: proportional to tokens) and measured steps.
        per_stream: maximum waiting windows of one camera (see :class:`WindowQueue`).
        order: scheduling policy of the queue, by name.
        inbox: maximum frames of one camera waiting for the thread.
        stall_s: seconds one engine call may take before :meth:`check` reports the engine as stuck.
        absent_s: seconds without :meth:`confirm_ownership` after which frames and windows wait for the next one: this
            process was suspended, and other replicas may own its cameras.
        ask_share: fraction of the time that free questions may take while windows wait.
    """

    def __init__(
        self,
        engine: "Engine",
        events: "ReplicaEvents",
        *,
        max_batch: int = 8,
        step_budget_s: float = 1.0,
        costs: CostModel | None = None,
        per_stream: int = 2,
        order: str = "deadline",
        inbox: int = 8,
        stall_s: float = 120.0,
        absent_s: float = math.inf,
        ask_share: float = 0.2,
    ) -> None:
        self._engine = engine
        self._asks = AskQueue(engine.ask, share=ask_share)
        self._estimator = StepTimeEstimator(costs)
        self._inbox = inbox
        self._stall_s = stall_s
        self._absent_s, self._confirmed_s = absent_s, time.monotonic()
        self._queue = WindowQueue(per_stream=per_stream, order=order)
        self._streams: dict[str, OpenStream] = {}
        self._closed: dict[str, StreamReport] = {}
        self._commands: deque[tuple[Callable[[Future[Any]], None], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._ended = False
        self._busy_since: float | None = None
        self._busy_s = self._asked_s = 0.0
        # Whether open windows may have more to prefill.
        self._ahead = False
        self._steps = StepRunner(
            engine,
            events,
            self._streams,
            self._wake,
            queue=self._queue,
            estimator=self._estimator,
            is_confirmed=self._is_confirmed,
            max_batch=max_batch,
            step_budget_s=step_budget_s,
        )
        # Why the engine is unusable for good.
        self._broken = ""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread -----------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current step; false if the thread did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def confirm_ownership(self) -> None:
        """Confirm that this process still owns its cameras."""
        with self._wake:
            self._confirmed_s = time.monotonic()
            self._wake.notify_all()

    def release_all(self) -> Future[None]:
        """Close every camera without answering or saving: other replicas own them and count windows here as lost."""
        return self.call_on_engine_thread(lambda _: self._release_all())

    def prepare(self, spec: StreamSpec) -> None:
        """Prefetch another process's saved state before :meth:`open`, off the engine thread; raises the same errors."""
        self._engine.prepare(spec)

    def open(self, spec: StreamSpec) -> Future[None]:
        """Admit a camera, or change its questions and policies; done when the engine has accepted it. The future raises
        ``ConfigError`` if the engine cannot."""
        return self.call_on_engine_thread(lambda _: self._admit(spec))

    def offer(self, sample: FrameSample, arrived_s: float | None = None) -> Future[None]:
        """Enqueue a frame of an open camera that arrived at ``arrived_s`` (monotonic; default now); done when taken.

        The future raises ``ValueError`` if the engine cannot use it: the camera must continue with a fresh frame.

        Raises:
            CapacityError: too many frames wait already.
            UnknownCameraError: the camera is not open.
            UnavailableError: the worker has stopped; futures of other calls raise it, too.
        """
        taken: Future[None] = _future()
        offer = PendingFrame(sample, time.monotonic() if arrived_s is None else arrived_s, taken)
        with self._wake:
            if self._ended:
                raise stopping()
            stream = self._streams.get(sample.stream)
            if stream is None:
                raise UnknownCameraError(f"camera {sample.stream!r} is not open here")
            if len(stream.inbox) >= self._inbox:
                raise CapacityError(f"camera {sample.stream!r} has {self._inbox} frames waiting already")
            stream.inbox.append(offer)
            self._wake.notify_all()
        return taken

    def ask(self, ask: AskSpec, piece: Callable[[str], None], *, timeout_s: float) -> Future[AskResult]:
        """Enqueue a free question, answered between windows. Raises ``UnavailableError``: the worker has stopped."""
        with self._wake:
            done = self._asks.offer(ask, piece, timeout_s=timeout_s)
            self._wake.notify_all()
        return done

    def call_on_engine_thread(self, call: Callable[["Engine"], T]) -> Future[T]:
        """Run ``call`` on the engine thread between two steps; the future raises what it raises."""

        def command(done: Future[T]) -> None:
            try:
                done.set_result(call(self._engine))
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, DeviceError):
                    raise

        return self._command(command)

    def delete_memory(
        self, stream: str, ago_s: float | None = None, *, only_open: bool = False
    ) -> Future[Future[DeletedMemory]]:
        """See ``Engine.delete_memory``, whose future is the result; ``only_open``: do nothing unless the camera is
        open. A running answer may use what is deleted, and fails with ``NotReadyError``."""

        def delete(engine: "Engine") -> Future[DeletedMemory]:
            if only_open and stream not in self._streams:
                nothing: Future[DeletedMemory] = _future()
                nothing.set_result(DeletedMemory(0, 0))
                return nothing
            error = NotReadyError(f"camera {stream!r} had memory deleted while it was asked; ask again about the rest")
            self._asks.cancel_camera(stream, error, waiting=False)
            return engine.delete_memory(stream, ago_s)

        return self.call_on_engine_thread(delete)

    def close(self, stream: str, *, flush: bool = False, abandoned: bool = False) -> None:
        """Close a camera at once, failing its questions, or with ``flush`` once its last, incomplete window is
        answered; its memory stays. ``abandoned``: its decoder died; windows missed until now are lost."""
        self._command(lambda _: self._close(stream, flush, abandoned))

    def hand_over(self, stream: str) -> Future[HandOverResult]:
        """Close a camera for another replica once its queued windows are answered. When done, its state is in the tiers
        if the engine could save it; otherwise the caller counts the open window."""
        return self._command(partial(self._request_hand_over, stream))

    def remove_camera(self, stream: str, life: str) -> Future[None]:
        """Close a removed camera and delete its memory in every tier; a namesake with another ``life`` is kept."""
        return self.call_on_engine_thread(lambda _: self._remove(stream, life))

    def counts(self, stream: str) -> WindowCounters:
        """Window counts of a camera so far."""
        with self._wake:
            known = self._streams.get(stream)
            return WindowCounters() if known is None else known.windows()

    def reports(self) -> list[StreamReport]:
        """Reports of every camera for the heartbeat, including recently closed ones, and of earlier ones
        :data:`REPEATED` in turn. Counts never decrease in one process."""
        with self._wake:
            now_s, known = time.monotonic(), list(self._closed.items())
            first, rest = known[:REPEATED], known[REPEATED:]
            self._closed = dict(rest + first)
            told = [report for _, report in first] + [each for _, each in rest if now_s - each.now_s < RECENT_S]
            closed = [replace(report, now_s=now_s) for report in told]
            return [*closed, *(stream.report() for stream in self._streams.values())]

    def open_streams(self) -> list[str]:
        """Names of the open cameras."""
        with self._wake:
            return list(self._streams)

    def depths(self) -> dict[str, int]:
        """Length of each queue, by name."""
        with self._wake:
            frames = sum(len(s.inbox) for s in self._streams.values())
            return {"windows": len(self._queue), "frames": frames, "questions": len(self._asks)}

    def load(self) -> ReplicaReport:
        """Load report for the heartbeat."""
        with self._wake:
            waiting = {name: self._queue.waiting(name) for name in self._streams}
        backlog_s = sum(count * self._estimator.expected_s(name) for name, count in waiting.items() if count)
        since = self._busy_since
        # Count the elapsed part of a running step.
        busy_s = self._busy_s + (0.0 if since is None else time.monotonic() - since)
        return ReplicaReport(
            busy_s, backlog_s, len(waiting), self._steps.steps, self._steps.windows, self._steps.trouble, self._asked_s
        )

    def check(self) -> None:
        """Check that the engine thread makes progress. Raises ``RuntimeError``: it is dead, stuck, or fails on every
        window."""
        if not self._thread.is_alive():
            raise RuntimeError(self._broken or "the engine thread has died")
        if self._steps.failures >= MAX_FAILURES:
            raise RuntimeError(f"the engine failed on every window of its last {self._steps.failures} batches")
        busy_since = self._busy_since
        # Windows of a failed batch are retried in one engine call each.
        if busy_since is not None and time.monotonic() - max(busy_since, self._steps.began_s) > self._stall_s:
            raise RuntimeError(f"the engine has made no progress for more than {self._stall_s:g} s")

    # -- the engine thread ----------------------------------------------------------------------
    def _command(self, command: Callable[[Future[Any]], None]) -> Future[Any]:
        done = _future()
        with self._wake:
            if not self._ended:
                self._commands.append((command, done))
                self._wake.notify_all()
                return done
        done.set_exception(stopping())
        return done

    def _run(self) -> None:
        try:
            self._serve()
        except DeviceError as error:
            # The engine's state is lost; the next process restores windows and memories from the tiers.
            self._broken = str(error)
            log.critical("the engine stops: %s", error)
        finally:
            self._asks.close()
            with self._wake:
                self._ended = True
                waiting = [done for _, done in self._commands]
                waiting += [offer.taken for stream in self._streams.values() for offer in stream.inbox]
                waiting += [stream.leaving for stream in self._streams.values() if stream.leaving is not None]
            for done in waiting:
                done.set_exception(stopping())

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, self._steps.backoff_s)
                if self._stopping:
                    return
            began = self._busy_since = time.monotonic()
            for _ in range(len(self._commands)):
                command, done = self._commands.popleft()
                command(done)
            if self._is_confirmed():
                self._steps.settle()
                for name, stream in list(self._streams.items()):
                    match self._steps.take_frames(stream):
                        case "ended":
                            self._remove_stream(name)
                        case "leaves":
                            self._hand_over(name, stream)
                if self._steps.backoff_s is None:
                    self._steps.step()
                    self._ahead = not len(self._queue) and self._steps.prefill_ahead()
            now = time.monotonic()
            self._busy_s += now - began
            self._busy_since = now
            self._asks.step(windows_wait=len(self._queue) > 0)
            asked_s = time.monotonic() - now
            self._busy_s, self._asked_s = self._busy_s + asked_s, self._asked_s + asked_s
            self._busy_since = None

    def _has_work(self) -> bool:
        if self._stopping or self._commands:
            return True
        if not self._is_confirmed():
            return False
        if self._steps.backoff_s is not None:
            return any(stream.inbox and not self._steps.must_wait(stream) for stream in self._streams.values())
        return bool(
            self._ahead
            or self._steps.held
            or len(self._queue)
            or len(self._asks)
            or any(stream.inbox or stream.ending or stream.leaving for stream in self._streams.values())
        )

    def _admit(self, spec: StreamSpec) -> None:
        open_here, closed = self._streams.get(spec.stream), self._closed.get(spec.stream)
        before = open_here.spec.life if open_here is not None else closed.life if closed is not None else spec.life
        try:
            if before != spec.life:
                # The removed namesake may not be closed or deleted yet; the new camera must not continue its window.
                self._remove(spec.stream, before)
            Priority.of(spec.priority)
            self._engine.admit(spec)
        except (ConfigError, DeviceError, ValueError):
            raise
        except Exception:
            log.exception("camera %s could not be opened", spec.stream)
            raise
        with self._wake:
            known = self._streams.get(spec.stream)
            if known is None:
                self._streams[spec.stream] = OpenStream.opened(spec, self._closed.pop(spec.stream, None))
            else:
                known.change_spec(spec)
                known.ending = False
                self._cancel_hand_over(known)

    def _close(self, name: str, flush: bool, abandoned: bool) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        if abandoned:
            self._steps.count_lost(stream, stream.accounting.count_abandoned(time.monotonic(), stream.spec.stride_s))
        if flush:
            stream.ending = True
        else:
            self._asks.cancel_camera(name, UnavailableError(f"camera {name!r} was closed here; ask again in a moment"))
            self._remove_stream(name)

    def _request_hand_over(self, name: str, done: Future[HandOverResult]) -> None:
        stream = self._streams.get(name)
        if stream is None or stream.leaving is not None:
            done.set_result(HandOverResult(False, WindowCounters()))
        else:
            stream.leaving = done

    @staticmethod
    def _cancel_hand_over(stream: OpenStream) -> None:
        if stream.leaving is not None:
            stream.leaving.set_result(HandOverResult(False, stream.windows()))
            stream.leaving = None

    def _hand_over(self, name: str, stream: OpenStream) -> None:
        self._asks.cancel_camera(
            name, UnavailableError(f"camera {name!r} moves to another replica; ask again in a moment")
        )
        saved: Future[bool] = _future()
        try:
            saved = self._engine.hand_over(name)
        except DeviceError:
            raise
        except Exception:
            log.exception("camera %s could not be handed over", name)
            saved.set_result(False)
        done, stream.leaving = stream.leaving, None
        self._remove_stream(name)
        assert done is not None
        counts = stream.windows()
        saved.add_done_callback(lambda saved: done.set_result(HandOverResult(saved.result(), counts)))

    def _remove(self, name: str, life: str) -> None:
        stream = self._streams.get(name)
        if stream is None or stream.spec.life == life:
            self._asks.cancel_camera(name, UnknownCameraError(f"camera {name!r} was removed"))
            if stream is not None:
                self._remove_stream(name, save=False)
        try:
            self._engine.delete_memory(name, life=life)
        except NotReadyError:
            log.debug("camera %s was removed from an engine without memory", name)
        with self._wake:
            if name in self._closed and self._closed[name].life == life:
                del self._closed[name]

    def _release_all(self) -> None:
        for name in list(self._streams):
            self._asks.cancel_camera(
                name, UnavailableError(f"camera {name!r} is at another replica; ask again in a moment")
            )
            self._remove_stream(name, save=False)

    def _is_confirmed(self) -> bool:
        return time.monotonic() - self._confirmed_s <= self._absent_s

    def _remove_stream(self, name: str, *, save: bool = True) -> None:
        self._queue.discard(name)
        self._estimator.remove_stream(name)
        self._engine.evict(name, save=save)
        with self._wake:
            gone = self._streams.pop(name)
            self._closed[name] = gone.report()
            if len(self._closed) > KEPT_REPORTS:
                del self._closed[next(iter(self._closed))]
        self._cancel_hand_over(gone)
        for offer in gone.inbox:
            offer.taken.set_exception(UnknownCameraError(f"camera {name!r} was closed"))


def _future() -> Future[Any]:
    """A future that waiters cannot cancel, since the engine thread sets it in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
