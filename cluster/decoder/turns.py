"""Cameras of one process take turns, a packet each."""

from __future__ import annotations

import os
import threading
from collections import deque
from types import TracebackType

MOST = 8
"""Threads of a process that decode at once: Python's lock lets no more of them get on."""


class Turns:
    """A semaphore that is fair: a place that becomes free belongs to who has waited longest.

    Without any bound a hundred cameras that are behind all wait for Python's lock at once, and the event loop, which
    sends their frames and says that the process lives, gets a hundredth of it. With ``threading.Semaphore`` the thread
    that has just given a place back takes it again for its next packet, before any that waits has woken up.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
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
                self._free += 1


def decoding_turns() -> Turns:
    """For the cameras of one process: as many at once as it has cores, and as get on."""
    return Turns(min(len(os.sched_getaffinity(0)), MOST))
