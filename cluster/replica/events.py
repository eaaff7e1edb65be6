"""Adapters between a replica's gRPC services and its engine thread: frames in; answers, drops and losses out."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cluster import metrics
from cluster.replica.memory import MemoryDeletions, WorkerMemory
from cluster.replica.worker import EngineWorker
from cluster.tracing.spans import ReplicaTraces
from cluster.types import Answer, FrameSample, StreamSpec
from cluster.types.reports import HandOverResult, WindowCounters
from cluster.wire import answers as results

log = logging.getLogger(__name__)
T = TypeVar("T")

ORPHAN_S = 60.0
"""Seconds a camera's window is kept after its decoder's connection broke."""


class WorkerFrames:
    """Passes received frames to the engine thread.

    Called on the event loop, sequentially per camera, concurrently across cameras. ``on_open`` and ``on_frame`` may
    raise ``SightlineError`` or ``ValueError``: the decoder is told and continues with a random access frame. After
    ``UnknownCameraError`` from ``on_frame`` it reopens the camera first.
    """

    def __init__(
        self,
        worker: EngineWorker,
        memory: WorkerMemory,
        answered: metrics.AnsweredCameras | None = None,
        traces: ReplicaTraces | None = None,
        deletions: MemoryDeletions | None = None,
    ) -> None:
        self._worker, self._memory = worker, memory
        self._answered = answered or metrics.AnsweredCameras()
        self._traces = traces
        self._deletions = deletions
        self._orphans: dict[str, float] = {}
        self._leaving: set[asyncio.Task[Any]] = set()

    async def on_open(self, spec: StreamSpec) -> None:
        """Open a camera, or change its questions."""
        self._orphans.pop(spec.stream, None)
        if self._deletions is not None:
            self._deletions.open_camera(spec)
        await asyncio.to_thread(self._worker.prepare, spec)
        await asyncio.wrap_future(self._worker.open(spec))
        self._memory.register_camera(spec)
        self._answered.open_camera(spec)

    async def on_frame(self, sample: FrameSample, arrived_s: float) -> None:
        """Return once the frame, which arrived at ``arrived_s`` (monotonic), has left the replica's queue. Until then
        credit is withheld, which is how a busy replica slows a decoder down."""
        if self._traces is not None:
            self._traces.frame_received(sample)
        await asyncio.wrap_future(self._worker.offer(sample, arrived_s))
        self._memory.add_frame(sample)

    async def on_close(self, camera: str, flush: bool) -> None:
        """Close a camera for good; ``flush``: answer its last, incomplete window first."""
        if self._traces is not None and not flush:
            self._traces.remove_camera(camera)
        self._worker.close(camera, flush=flush)

    async def on_hand_over(self, camera: str) -> HandOverResult:
        """Answer a camera's queued windows and close it for another replica, which opens it after this returns."""
        self._orphans.pop(camera, None)
        # Shielded: if the decoder dies meanwhile, nobody else would delete what is left here.
        return await asyncio.shield(self._start(self._hand_over(camera)))

    async def _hand_over(self, camera: str) -> HandOverResult:
        handed = await asyncio.wrap_future(self._worker.hand_over(camera))
        # Unless it was reopened here before it was handed over.
        if self._deletions is not None and camera not in self._worker.open_streams():
            await self._deletions.leave_camera(camera, elsewhere=True)
        return handed

    async def on_lost(self, cameras: list[str]) -> None:
        """The decoder's connection broke. Keep their windows for a while: a decoder restarts in seconds."""
        now = time.monotonic()
        self._orphans.update((camera, now) for camera in cameras)

    def counters(self, camera: str) -> WindowCounters:
        return self._worker.counts(camera)

    def close_orphans(self, now_s: float) -> None:
        """Close cameras that no decoder has reopened within ``ORPHAN_S``."""
        for camera in [camera for camera, since in self._orphans.items() if now_s - since > ORPHAN_S]:
            del self._orphans[camera]
            self._worker.close(camera, abandoned=True)
            # Off the heartbeat that calls this, since it waits for the memory's last write.
            self._start(self._leave(camera))

    def _start(self, leaving: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(leaving)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _leave(self, camera: str) -> None:
        if self._deletions is not None:
            await asyncio.wrap_future(self._worker.call_on_engine_thread(lambda _: None))
            await self._deletions.leave_camera(camera, elsewhere=False)


class ReplicaEvents:
    """Forwards the engine thread's events: answers to subscribers, counts to ``/metrics``. Called on that thread, so
    nothing here may block.

    ``settled``: called with the camera of an answered window, after its answer was published: if the process dies in
    between, the window is counted twice rather than not at all.
    """

    def __init__(
        self,
        hub: results.AnswerHub,
        cameras: metrics.AnsweredCameras,
        traces: ReplicaTraces | None = None,
        settled: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hub, self._cameras, self._traces, self._settled = hub, cameras, traces, settled

    def answered(self, answers: Sequence[Answer], *, late: bool) -> None:
        """One window was answered; ``late``: after the next one was due."""
        metrics.record_window(answers[0], late=late)
        self._cameras.record_window(answers)
        self._hub.publish(answers if self._traces is None else self._traces.window_answered(answers))
        self._settled(answers[0].stream)

    def batch(self, windows: int) -> None:
        """Windows were computed in one step; gated ones are not counted."""
        metrics.batch_windows.observe(windows)

    def dropped(self, stream: str, reason: str, windows: int) -> None:
        """Windows were dropped; ``reason`` is a :class:`DropReason` or ``failed``."""
        trace = self._traces.newest_trace_id(stream) if self._traces is not None else ""
        log.info("camera %s: %d windows dropped, %s", stream, windows, reason, extra={"trace": trace})
        metrics.drop_window(reason, windows)

    def lost(self, stream: str, windows: int) -> None:
        """Windows were lost: their video never arrived, or their camera was reset."""
        log.info("camera %s: %d windows lost: their video never arrived", stream, windows)
        metrics.lose_window(windows)
