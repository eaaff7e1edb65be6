"""Pictures of what a camera saw go with the memory that they belong to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from test_album import GRID, SECOND, frame, scene

from cluster.replica.album import Album
from cluster.replica.memory import WorkerMemory
from cluster.types import MemorySpec, Question, StreamSpec


def spec(retention_s):
    memory = None if retention_s is None else MemorySpec(retention_s=retention_s)
    return StreamSpec("gate", (Question("fence", "Is anyone there?"),), memory=memory)


def times(album):
    return [] if "gate" not in album._streams else list(album._streams["gate"].times)


def feed(memory, seconds, start=0):
    for second in range(start, start + seconds):
        memory.see(frame(GRID, scene(GRID, second % 5), pts=second * SECOND))


def test_pictures_are_kept_as_long_as_the_memory():
    album = Album(every_s=4.0)
    memory = WorkerMemory(None, album, timeout_s=1.0)
    memory.keep(spec(20.0))
    feed(memory, 60)
    assert min(times(album)) >= (59 - 20) * SECOND
    assert len(times(album)) >= 5
    # Kept for longer from now on: what is gone is gone, and what comes stays.
    memory.keep(spec(3600.0))
    feed(memory, 60, start=60)
    assert min(times(album)) >= (59 - 20) * SECOND
    assert len(times(album)) >= 15
    memory.keep(replace(spec(8.0)))
    feed(memory, 1, start=120)
    assert min(times(album)) >= (120 - 8) * SECOND


def test_without_a_retention_the_cap_alone_decides():
    album = Album(every_s=4.0)
    memory = WorkerMemory(None, album, timeout_s=1.0)
    memory.keep(spec(None))
    feed(memory, 60)
    assert np.array_equal(times(album), np.arange(0, 60, 4) * SECOND)
