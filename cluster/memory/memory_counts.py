"""Counters and report of one memory, and what this process lost of all of them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cluster.types import MICROSECONDS

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

LOST: Counter[str] = Counter(frames=0, tokens=0)
"""Of all memories of this process, removed ones too: ``frames`` that were dropped before they were stored, and stored
``tokens`` whose blocks are gone."""

_lock = threading.Lock()


@dataclass(slots=True)
class MemoryCounts:
    """Counters: ``frames`` accepted, batches ``settled``, tokens of all layers and heads ``lost``."""

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
    """One camera's memory in a heartbeat. ``span_s``: oldest to newest frame; ``state``: what is wrong with the tiers,
    or empty."""

    nbytes: int
    frames: int
    span_s: float
    state: str = ""

    @classmethod
    def of(cls, memory: StreamMemory) -> Self:
        oldest, newest = memory.oldest, memory.newest
        span_s = 0.0 if oldest is None or newest is None else (newest - oldest) / MICROSECONDS
        return cls(memory.held_bytes, memory.frames, span_s)
