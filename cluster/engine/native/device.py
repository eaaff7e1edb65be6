"""Host-side view of the device: device loss, timing, and the number of passes in flight."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from cluster.errors import DeviceError

IN_FLIGHT = 2
"""Maximum unfinished passes before windows end: a window that ends meanwhile waits for them."""


@contextmanager
def lost_device() -> Iterator[None]:
    """Raise ``DeviceError`` for a CUDA error after which this process cannot use the device again."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceError(f"the GPU failed and is lost to this process: {error}") from error


class PassesInFlight:
    """Limits the passes queued on a GPU to :data:`IN_FLIGHT`."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda" and torch.cuda.is_available()
        self._given: deque[Any] = deque()

    def wait(self) -> None:
        """Wait until one more pass may be queued."""
        while len(self._given) >= IN_FLIGHT:
            self._given.popleft().synchronize()

    def add(self) -> None:
        """Count the work launched since the last call as one pass."""
        if self._events:
            self._given.append(torch.cuda.current_stream().record_event())


class Stopwatch:
    """Seconds between laps; on a GPU, measured by CUDA events, without waiting before :meth:`stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda" and torch.cuda.is_available()
        self._laps: list[Any] = []
        self.lap()

    def lap(self) -> None:
        if self._events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._laps.append(event)
        else:
            self._laps.append(time.perf_counter())

    def stop(self) -> tuple[float, ...]:
        """End the last lap; returns the seconds of each."""
        self.lap()
        if not self._events:
            return tuple(after - before for before, after in pairwise(self._laps))
        self._laps[-1].synchronize()
        return tuple(before.elapsed_time(after) / 1000 for before, after in pairwise(self._laps))
