"""The windows of one replica that wait for the engine: bounded, whole windows dropped, every drop counted.

A window that is skipped costs accuracy of nothing else: the engine's next window of that camera computes what it would
have. So when the engine cannot keep up, the newest window of a camera replaces the one still waiting, and a camera
whose answers come late is served no worse than the others (earliest arrival first).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cluster.engine.base import WindowRequest


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
    """What :meth:`WindowQueue.take` hands to the engine, and what it found too late for it."""

    requests: list[WindowRequest]
    dropped: list[DroppedWindow]


class WindowQueue:
    """At most ``capacity`` waiting windows; at most one of a camera unless it is ``patient``.

    A patient camera (a file played faster than real time) loses nothing: whoever feeds it must stop while it has a
    window waiting. ``max_wait_s``: an answer that would start later than this after its last frame helps nobody.
    """

    def __init__(self, *, capacity: int = 1024, max_wait_s: float = 60.0) -> None:
        if capacity < 1:
            raise ValueError(f"a window queue must hold at least one window, not {capacity}")
        self.capacity = capacity
        self.max_wait_s = max_wait_s
        self.dropped: Counter[DropReason] = Counter()
        self._waiting: dict[str, deque[WindowRequest]] = {}
        self._patient: set[str] = set()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, stream: str) -> int:
        """Windows of one camera that wait."""
        return len(self._waiting.get(stream, ()))

    def offer(self, request: WindowRequest, *, patient: bool = False) -> list[DroppedWindow]:
        """Queue a window; returns those that had to leave for it."""
        queue = self._waiting.setdefault(request.stream, deque())
        dropped = []
        if patient:
            self._patient.add(request.stream)
        else:
            self._patient.discard(request.stream)
            dropped += [self._drop(queue.popleft(), DropReason.REPLACED) for _ in range(len(queue))]
        queue.append(request)
        self._size += 1
        if self._size > self.capacity:
            dropped.append(self._drop(self._oldest().popleft(), DropReason.OVERFLOW))
        self._forget_empty()
        return dropped

    def take(self, max_batch: int, now_s: float) -> Batch:
        """Up to ``max_batch`` windows, one per camera, those first whose last frame arrived first.

        ``now_s`` is the same monotonic clock as ``WindowRequest.arrived_s``.
        """
        dropped = []
        for stream, queue in self._waiting.items():
            while queue and stream not in self._patient and now_s - queue[0].arrived_s > self.max_wait_s:
                dropped.append(self._drop(queue.popleft(), DropReason.LATE))
        self._forget_empty()
        heads = sorted(self._waiting.values(), key=lambda queue: queue[0].arrived_s)[:max_batch]
        requests = [queue.popleft() for queue in heads]
        self._size -= len(requests)
        self._forget_empty()
        return Batch(requests, dropped)

    def discard(self, stream: str) -> list[WindowRequest]:
        """Forget a camera that went away or began anew; its waiting windows are returned, not counted as drops."""
        gone = list(self._waiting.pop(stream, ()))
        self._patient.discard(stream)
        self._size -= len(gone)
        return gone

    def _oldest(self) -> deque[WindowRequest]:
        return min((queue for queue in self._waiting.values() if queue), key=lambda queue: queue[0].arrived_s)

    def _drop(self, request: WindowRequest, reason: DropReason) -> DroppedWindow:
        self._size -= 1
        self.dropped[reason] += 1
        return DroppedWindow(request, reason)

    def _forget_empty(self) -> None:
        for stream in [stream for stream, queue in self._waiting.items() if not queue]:
            del self._waiting[stream]
            self._patient.discard(stream)
