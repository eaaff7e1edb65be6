"""What the host has to know of the device: whether it is lost, how long its work took, and how much of it waits."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from cluster.errors import DeviceError

IN_FLIGHT = 2
"""Passes before windows end that the device has not finished, at most: a window that ends meanwhile waits for them."""


@contextmanager
def lost_device() -> Iterator[None]:
    """Tell a device that cannot be used again apart from other failures."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceError(f"the GPU failed, and is lost to this process: {error}") from error


class PassesInFlight:
    """Passes that a GPU has been given one after the other, at most :data:`IN_FLIGHT` of which it has not finished."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda" and torch.cuda.is_available()
        self._given: deque[Any] = deque()

    def wait(self) -> None:
        """Wait until there is room for one more."""
        while len(self._given) >= IN_FLIGHT:
            self._given.popleft().synchronize()

    def add(self) -> None:
        """All that was launched until now is one more."""
        if self._events:
            self._given.append(torch.cuda.current_stream().record_event())


class Stopwatch:
    """Seconds between laps; on a GPU measured by events in its queue, without waiting."""

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
        """End the last lap; seconds of each."""
        self.lap()
        if not self._events:
            return tuple(after - before for before, after in pairwise(self._laps))
        self._laps[-1].synchronize()
        return tuple(before.elapsed_time(after) / 1000 for before, after in pairwise(self._laps))
