"""Threads that do what takes time for the memories of many streams, one job of a stream at a time, between steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

THREADS = 4
"""Streams whose jobs run side by side: a tier that is slow for some holds up no other."""

PATIENCE_S = 1.0
"""Longest that one piece of a job waits for a step of the engine's: an engine that never rests does not stop it."""

_IDLE_S = 5.0


class MemoryWriter:
    """Calls ``work(stream)`` for every stream that was woken, in the order in which they were; a stream that is woken
    while its job runs gets another one after it. Thread-safe. Threads start when there is something to do, and end when
    there was nothing for a while.

    At most one entry waits per stream, so the queue is bounded by the number of streams.
    """

    def __init__(self, work: Callable[[str], None], *, threads: int = THREADS) -> None:
        self._work, self._most = work, threads
        self._waiting: dict[str, None] = {}
        self._busy: set[str] = set()
        self._threads = 0
        self._changed = threading.Condition()
        self._stepping = False
        self._stepped = threading.Condition()

    def wake(self, stream: str) -> None:
        """There is something to do for a stream; returns at once."""
        with self._changed:
            self._waiting[stream] = None
            if len(self._waiting) + len(self._busy) > self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, name=f"memory {self._threads}", daemon=True).start()
            self._changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the engine computes windows: jobs stand aside from their next piece on."""
        self._stepping = True
        try:
            yield
        finally:
            with self._stepped:
                self._stepping = False
                self._stepped.notify_all()

    def give_way(self) -> None:
        """Between two pieces of a job: wait for the step that runs, if one does, for :data:`PATIENCE_S` at most.

        The two would share Python's lock and the cores, and no window is to wait for its camera's past.
        """
        if self._stepping:
            with self._stepped:
                self._stepped.wait_for(lambda: not self._stepping, PATIENCE_S)

    def is_waiting(self, stream: str) -> bool:
        """Whether a job of this stream waits or runs."""
        with self._changed:
            return stream in self._waiting or stream in self._busy

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def _run(self) -> None:
        _use_one_core()
        while (stream := self._next()) is not None:
            try:
                self._work(stream)
            except Exception:
                log.exception("the memory of camera %r could not be written", stream)
            with self._changed:
                self._busy.remove(stream)
                self._changed.notify_all()

    def _next(self) -> str | None:
        until = time.monotonic() + _IDLE_S
        with self._changed:
            while True:
                stream = next((each for each in self._waiting if each not in self._busy), None)
                if stream is not None:
                    del self._waiting[stream]
                    self._busy.add(stream)
                    return stream
                left = until - time.monotonic()
                if left <= 0:
                    self._threads -= 1
                    return None
                self._changed.wait(left)


def _use_one_core() -> None:
    """Have torch compute on this thread alone when it is called here. Each thread that calls it otherwise gets as many
    helpers as there are cores, which spin for a while after every call and slow the engine's steps down by a third."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That holds for this thread, and for all that call torch for the first time later, unless it is set anew.
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
