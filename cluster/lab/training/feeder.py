"""Examples made in other processes, in the order of their numbers, whatever the number of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from cluster.errors import SightlineError
from cluster.lab.training.examples import Example

# Examples that wait, per process: each is a few megabytes.
_DEPTH = 6
_LOOK_S = 5.0


class Feeder:
    """``next()`` gives examples ``first, first + 1, …``. With no process of its own it makes them when asked.

    Process ``w`` of ``n`` makes every ``n``-th example and hands it over through a bounded queue of its own, so the
    order is always the same. Use it as a context manager: leaving it ends the processes.
    """

    def __init__(self, make: Callable[[int], Example], *, workers: int, first: int = 0) -> None:
        self._make = make
        self._next = first
        self._processes: list[Any] = []
        self._queues: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for worker in range(workers):
            channel: Any = context.Queue(_DEPTH)
            number = first + worker
            process = context.Process(target=_work, args=(make, number, workers, channel, os.getpid()), daemon=True)
            process.start()
            self._processes.append(process)
            self._queues.append(channel)
        self._first = first

    def next(self) -> Example:
        """The next example.

        Raises:
            SightlineError: making it failed, or the process that makes it is gone.
        """
        number = self._next
        self._next += 1
        if not self._processes:
            return self._make(number)
        which = (number - self._first) % len(self._processes)
        while True:
            try:
                made = self._queues[which].get(timeout=_LOOK_S)
            except queue.Empty:
                if self._processes[which].is_alive():
                    continue
                raise SightlineError(
                    f"the process that renders scenes ended with code {self._processes[which].exitcode}; "
                    "start again to go on from the last checkpoint"
                ) from None
            if isinstance(made, str):
                raise SightlineError(f"example {number} could not be made:\n{made}")
            example: Example = made
            return example

    def close(self) -> None:
        """End the processes; harmless when repeated."""
        for process in self._processes:
            process.terminate()
        for process, channel in zip(self._processes, self._queues, strict=True):
            process.join()
            channel.cancel_join_thread()
            channel.close()
        self._processes, self._queues = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(make: Callable[[int], Example], number: int, step: int, channel: Any, parent: int) -> None:
    # A trainer that was killed reads no more: what still lies in the queue must not keep this process.
    channel.cancel_join_thread()
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() == parent:
            try:
                made: Example | str = make(number)
            except Exception:
                made = traceback.format_exc()
            while os.getppid() == parent:
                with contextlib.suppress(queue.Full):
                    channel.put(made, timeout=_LOOK_S)
                    break
            number += step
