"""The windows of one replica that wait for the engine: bounded, whole windows dropped, every drop counted.

A window that is skipped costs accuracy of nothing else: the engine's next window of that camera computes what it would
have. So when the engine cannot keep up, the newest window of a camera replaces the oldest one still waiting, and
who waits longest is served first.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cluster.types import WindowRequest


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
    """At most ``per_stream`` waiting windows of a camera, and at most ``capacity`` of all.

    A *patient* camera (a file read as fast as it goes) loses nothing to newer windows and is never late: whoever feeds
    it must stop while it has a window waiting.
    """

    def __init__(self, *, per_stream: int = 1, capacity: int = 1024) -> None:
        if per_stream < 1 or capacity < 1:
            raise ValueError(f"a window queue must hold at least one window, not {min(per_stream, capacity)}")
        self.per_stream = per_stream
        self.capacity = capacity
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, stream: str) -> int:
        """Windows of one camera that wait."""
        return len(self._waiting.get(stream, ()))

    def offer(self, request: WindowRequest, *, late_s: float = math.inf, patient: bool = False) -> list[DroppedWindow]:
        """Queue a window; returns those that had to leave for it.

        ``late_s``: an answer that is begun later than this after the window's last frame arrived helps nobody.
        """
        queue = self._waiting.setdefault(request.stream, deque())
        queue.append(_Waiting(request, math.inf if patient else request.arrived_s + late_s))
        self._size += 1
        dropped = []
        while not patient and len(queue) > self.per_stream:
            dropped.append(self._drop(queue, DropReason.REPLACED))
        if self._size > self.capacity:
            dropped.append(self._drop(min(self._waiting.values(), key=_arrival), DropReason.OVERFLOW))
        self._forget_empty()
        return dropped

    def take(self, max_batch: int, now_s: float) -> Batch:
        """Up to ``max_batch`` windows, one per camera, those first whose last frame arrived first.

        ``now_s`` is the same monotonic clock as ``WindowRequest.arrived_s``.
        """
        dropped = []
        for queue in self._waiting.values():
            while queue and queue[0].deadline_s < now_s:
                dropped.append(self._drop(queue, DropReason.LATE))
        self._forget_empty()
        heads = sorted(self._waiting.values(), key=_arrival)[:max_batch]
        requests = [queue.popleft().request for queue in heads]
        self._size -= len(requests)
        self._forget_empty()
        return Batch(requests, dropped)

    def discard(self, stream: str) -> list[WindowRequest]:
        """Forget a camera that went away or began anew; its waiting windows are returned, not counted as drops."""
        gone = [waiting.request for waiting in self._waiting.pop(stream, ())]
        self._size -= len(gone)
        return gone

    def _drop(self, queue: deque[_Waiting], reason: DropReason) -> DroppedWindow:
        self._size -= 1
        return DroppedWindow(queue.popleft().request, reason)

    def _forget_empty(self) -> None:
        for stream in [stream for stream, queue in self._waiting.items() if not queue]:
            del self._waiting[stream]


class _Waiting(NamedTuple):
    request: WindowRequest
    deadline_s: float


def _arrival(queue: deque[_Waiting]) -> float:
    return queue[0].request.arrived_s
