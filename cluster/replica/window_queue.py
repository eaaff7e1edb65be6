"""Bounded queue of one replica's windows, ordered by priority class and scheduling policy.

Classes precede deadlines: critical, then normal, then background. Skipping a window does not affect later answers: the
engine's next window of that camera computes what the skipped one would have. So when the engine cannot keep up, the
newest window of a camera replaces its oldest waiting one *and takes its place in the order*: the camera that waited
longest is next, with a fresh window. Otherwise an overloaded queue would answer every window just before it expires.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from typing import NamedTuple

from cluster.registry import window_orders
from cluster.types import WindowRequest
from cluster.types.cameras import Priority

SWEEP_S = 1.0
"""Seconds between two scans for late windows."""


class DropReason(StrEnum):
    """Why a window was never answered."""

    LATE = "late"
    REPLACED = "replaced"
    OVERFLOW = "overflow"


@dataclass(frozen=True, slots=True)
class DroppedWindow:
    """A window that left the queue unanswered."""

    request: WindowRequest
    reason: DropReason


class Batch(NamedTuple):
    """Windows that :meth:`WindowQueue.take_batch` hands to the engine, and those it dropped as late."""

    requests: list[WindowRequest]
    dropped: list[DroppedWindow]


class _Waiting(NamedTuple):
    request: WindowRequest
    stride_s: float
    until_s: float
    seconds: float


# Like ``_Waiting(...)`` and ``Batch(...)`` in a third of the time: they are created for every window and step.
_new_waiting: Callable[[tuple[WindowRequest, float, float, float]], _Waiting] = partial(tuple.__new__, _Waiting)
_new_batch: Callable[[tuple[list[WindowRequest], list[DroppedWindow]]], Batch] = partial(tuple.__new__, Batch)

_VOID = 64
"""Slack, in entries, before a heap is purged of void ones."""


class _Camera:
    """``turn``, ``served_s``: due times of its first and its last taken window; ``ticket``: of its valid heap entry."""

    __slots__ = ("rank", "served_s", "ticket", "turn", "windows")

    def __init__(self) -> None:
        self.windows: deque[_Waiting] = deque()
        self.rank = 1
        self.turn = 0.0
        self.served_s = -math.inf
        self.ticket = 0


class Deadline:
    """Earliest deadline first: a window is due one stride after its arrival.

    A camera that sends faster than declared is due no sooner than a stride after its last window, so that it takes no
    time from others (a constant bandwidth server: Abeni and Buttazzo, RTSS 1998).
    """

    @staticmethod
    def due_s(arrived_s: float, stride_s: float, served_s: float) -> float:
        if served_s <= arrived_s:
            return arrived_s + stride_s
        return min(served_s, arrived_s + stride_s) + stride_s


class Arrival:
    """First come, first served; the baseline."""

    @staticmethod
    def due_s(arrived_s: float, stride_s: float, served_s: float) -> float:  # noqa: ARG004
        return arrived_s


class WindowQueue:
    """At most ``per_stream`` waiting windows of a camera, and ``capacity`` in total; :meth:`offer` is O(log n).

    A *patient* camera (a file read as fast as possible) loses no window to newer ones and is never late: its feeder
    must pause while one waits. Above ``capacity`` its windows are dropped like any other.
    """

    def __init__(self, *, per_stream: int = 1, capacity: int = 1024, order: str = "deadline") -> None:
        self.per_stream = per_stream
        self.capacity = capacity
        self._due_s: Callable[[float, float, float], float] = window_orders.get(order)().due_s
        self._cameras: dict[str, _Camera] = {}
        # Per class, entries (turn, ticket, camera); an entry whose ticket is not the camera's is void.
        self._heaps: tuple[list[tuple[float, int, _Camera]], ...] = tuple([] for _ in Priority)
        self._tickets = 0
        self._size = 0
        self._swept_s = -math.inf
        # No waiting window is late before then.
        self._late_s = math.inf

    def __len__(self) -> int:
        return self._size

    def waiting(self, stream: str) -> int:
        """Number of one camera's waiting windows."""
        camera = self._cameras.get(stream)
        return 0 if camera is None else len(camera.windows)

    def offer(
        self,
        request: WindowRequest,
        *,
        stride_s: float = 0.0,
        late_s: float = math.inf,
        patient: bool = False,
        priority: Priority = Priority.NORMAL,
        seconds: float = 0.0,
        again: bool = False,
    ) -> list[DroppedWindow]:
        """Enqueue a window; returns those dropped for it.

        Args:
            stride_s: seconds after the arrival of its last frame at which it is due.
            late_s: seconds after the arrival of its last frame at which an answer becomes worthless.
            patient: drop the camera's windows only if the whole queue is full.
            priority: class of the camera.
            seconds: expected time that it adds to a step.
            again: it could not be started, and goes before its camera's newer ones as if it had never been taken.
        """
        until_s = math.inf if patient else request.arrived_s + late_s
        if until_s < self._late_s:
            self._late_s = until_s
        self._size += 1
        waiting = _new_waiting((request, stride_s, until_s, seconds))
        camera = self._cameras.get(request.stream)
        if camera is None:
            camera = self._cameras[request.stream] = _Camera()
        windows, rank = camera.windows, priority.rank
        if again:
            windows.appendleft(waiting)
            camera.served_s = -math.inf
        else:
            windows.append(waiting)
        first = again or len(windows) == 1
        if first or camera.rank != rank:
            if first:
                camera.turn = self._due(camera, waiting)
            camera.rank = rank
            self._push(camera)
        dropped: list[DroppedWindow] = []
        if not patient:
            while len(windows) > self.per_stream:
                dropped.append(self._drop(camera, DropReason.REPLACED))
        if self._size > self.capacity:
            dropped.append(self._overflow())
        return dropped

    def take_batch(self, max_batch: int, now_s: float, budget_s: float = math.inf) -> Batch:
        """Take up to ``max_batch`` windows, one per camera, the most urgent class first and then by due time.

        Args:
            now_s: on the monotonic clock of ``WindowRequest.arrived_s``.
            budget_s: limit of the windows' summed ``seconds``; the first is taken in any case.
        """
        dropped: list[DroppedWindow] = []
        crowded = len(self._cameras) > 2 * self.capacity
        if (self._late_s < now_s or crowded) and abs(now_s - self._swept_s) >= SWEEP_S:
            self._sweep(now_s, dropped)
        some_late = self._late_s < now_s
        requests: list[WindowRequest] = []
        again: list[_Camera] = []
        left = budget_s
        full = False
        for heap in self._heaps:
            while heap and not full and len(requests) < max_batch:
                _, ticket, camera = heap[0]
                if camera.ticket != ticket:
                    heappop(heap)
                    continue
                if some_late and self._cancel_late(camera, now_s, dropped):
                    continue
                first = camera.windows[0]
                if requests and first.seconds > left:
                    full = True
                    break
                heappop(heap)
                left -= first.seconds
                camera.windows.popleft()
                camera.served_s = camera.turn
                requests.append(first.request)
                if camera.windows:
                    again.append(camera)
                else:
                    camera.ticket = 0
        self._size -= len(requests)
        for camera in again:
            camera.turn = self._due(camera, camera.windows[0])
            self._push(camera)
        return _new_batch((requests, dropped))

    def peek(self, count: int) -> list[WindowRequest]:
        """The first ``count`` windows of the next batch, unless more urgent ones arrive; O(n)."""
        found: list[WindowRequest] = []
        for heap in self._heaps:
            waiting = (entry for entry in heap if entry[2].ticket == entry[1])
            found += [camera.windows[0].request for *_, camera in nsmallest(count - len(found), waiting)]
        return found

    def discard(self, stream: str) -> list[WindowRequest]:
        """Remove a closed or restarted camera; returns its waiting windows, which do not count as drops."""
        camera = self._cameras.pop(stream, None)
        if camera is None:
            return []
        gone = [waiting.request for waiting in camera.windows]
        camera.windows.clear()
        camera.ticket = 0
        self._size -= len(gone)
        self._purge(camera.rank)
        return gone

    def _due(self, camera: _Camera, waiting: _Waiting) -> float:
        request, stride_s, _, _ = waiting
        return self._due_s(request.arrived_s, stride_s, camera.served_s)

    def _push(self, camera: _Camera) -> None:
        self._tickets += 1
        camera.ticket = self._tickets
        heappush(self._heaps[camera.rank], (camera.turn, camera.ticket, camera))
        self._purge(camera.rank)

    def _purge(self, rank: int) -> None:
        """Rebuild a heap once void entries far outnumber cameras."""
        heap = self._heaps[rank]
        if len(heap) > 2 * len(self._cameras) + _VOID:
            heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
            heapify(heap)

    def _sweep(self, now_s: float, dropped: list[DroppedWindow]) -> None:
        """Drop late windows of every camera, and remove cameras with neither waiting windows nor a pending deadline."""
        self._swept_s, self._late_s = now_s, math.inf
        idle = []
        for name, camera in self._cameras.items():
            if camera.windows and not self._cancel_late(camera, now_s, dropped):
                self._late_s = min(self._late_s, *(waiting.until_s for waiting in camera.windows))
            elif camera.served_s <= now_s:
                idle.append(name)
        for name in idle:
            del self._cameras[name]

    def _drop(self, camera: _Camera, reason: DropReason) -> DroppedWindow:
        """Drop the oldest window of a camera; its next one takes the place in the order."""
        self._size -= 1
        gone = camera.windows.popleft()
        if not camera.windows:
            camera.ticket = 0
        return DroppedWindow(gone.request, reason)

    def _cancel_late(self, camera: _Camera, now_s: float, dropped: list[DroppedWindow]) -> bool:
        """Drop a camera's late windows; returns whether none is left."""
        while camera.windows and camera.windows[0].until_s < now_s:
            dropped.append(self._drop(camera, DropReason.LATE))
        return not camera.windows

    def _overflow(self) -> DroppedWindow:
        """Drop the earliest due window of the least urgent class."""
        for heap in reversed(self._heaps):
            while heap:
                _, ticket, camera = heap[0]
                if camera.ticket == ticket:
                    return self._drop(camera, DropReason.OVERFLOW)
                heappop(heap)
        raise AssertionError("a queue above its capacity holds a window")
