"""Time between laps of a step."""

import time
from itertools import pairwise
from typing import Any

import torch


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
