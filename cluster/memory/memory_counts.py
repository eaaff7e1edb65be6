"""Counters and heartbeat report of one memory, and the losses of all memories of this process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cluster.types import MICROSECONDS

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

LOST: Counter[str] = Counter(frames=0, tokens=0)
"""Losses of all memories of this process, including deleted ones: ``frames`` dropped before they were stored, and
stored ``tokens`` whose blocks were lost."""

_lock = threading.Lock()


@dataclass(slots=True)
class MemoryCounts:
    """Counters of one memory: ``frames`` accepted, batches ``settled``; ``compressed_away`` and ``lost`` count tokens
    over all layers and heads."""

    frames: int = 0
    settled: int = 0
    compressions: int = 0
    compressed_away: int = 0
    lost: int = 0
    frames_dropped: int = 0
    windows_not_saved: int = 0
    unreadable: int = 0

    def drop_frames(self, frames: int = 1) -> None:
        self.frames_dropped += frames
        with _lock:
            LOST["frames"] += frames

    def lose_tokens(self, tokens: int) -> None:
        self.lost += tokens
        with _lock:
            LOST["tokens"] += tokens


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One camera's memory in a heartbeat. ``span_s``: from the oldest to the newest frame; ``state``: the tiers'
    errors, if any."""

    nbytes: int
    frames: int
    span_s: float
    state: str = ""

    @classmethod
    def of(cls, memory: StreamMemory) -> Self:
        oldest, newest = memory.oldest, memory.newest
        span_s = 0.0 if oldest is None or newest is None else (newest - oldest) / MICROSECONDS
        return cls(memory.held_bytes, memory.frames, span_s)
