"""Limits how many cameras of a process decode at once."""

import os
import threading
import time
from collections import deque
from types import TracebackType

MOST = 8
"""Most threads of a process that decode at once: more gain nothing under the GIL."""


class DecodeGate:
    """Fair semaphore for decoding: a free slot goes to the thread that has waited longest.

    Without a limit, a hundred late cameras contend for the GIL, and the event loop, which sends frames and heartbeats,
    gets a hundredth of it. ``threading.Semaphore`` is unfair: the thread that releases a slot takes it again for its
    next packet before any waiting one has woken up.
    """

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._busy_s = 0.0
        self._since_s = self._taken_s = time.monotonic()
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._count()
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._count()
                self._free += 1

    def take_busy_share(self) -> float:
        """Share of the slots that was taken since the last call."""
        with self._lock:
            self._count()
            busy_s, self._busy_s = self._busy_s, 0.0
            passed_s, self._taken_s = self._since_s - self._taken_s, self._since_s
        return busy_s / (self._places * passed_s) if passed_s else 0.0

    def _count(self) -> None:
        now_s = time.monotonic()
        self._busy_s += (self._places - self._free) * (now_s - self._since_s)
        self._since_s = now_s


def make_decode_gate() -> DecodeGate:
    """Gate for the cameras of one process: as many slots as it has cores, at most ``MOST``."""
    return DecodeGate(min(len(os.sched_getaffinity(0)), MOST))
