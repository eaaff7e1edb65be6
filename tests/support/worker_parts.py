"""Frames and specifications for the engine thread, and an engine that can be held up or broken on purpose."""

import threading

import numpy as np

from cluster.errors import DeviceError
from cluster.types import FrameSample, PatchGrid, Question, StreamSpec

SECOND = 1_000_000


class HeldEngine:
    """The real engine, whose steps wait while ``closed`` and fail for the streams in ``poison``, or for
    all once ``lost``."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.poison: set[str] = set()
        self.lost = ""
        self.batches: list[list[tuple[str, int]]] = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, requests, following=()):
        self.entered.set()
        assert self.gate.wait(30)
        if self.lost:
            raise DeviceError(self.lost)
        if any(request.stream in self.poison for request in requests):
            raise RuntimeError("out of luck")
        self.batches.append([(request.stream, request.window) for request in requests])
        return self._engine.step(requests, following)


def spec(stream: str, **changes) -> StreamSpec:
    settings = {"window_s": 4.0, "stride_s": 2.0, "static_gate": False} | changes
    return StreamSpec(stream, (Question("q", "Is anyone there?"),), **settings)


def sample(stream: str, index: int, *, fresh: bool | None = None, start: int = 0) -> FrameSample:
    """One second of video with everything kept; the first is fresh."""
    grid = PatchGrid(4, 4, 14, 2, 2)
    mask = np.ones((4, 4), dtype=bool)
    patches = np.random.default_rng(index).integers(0, 255, (16, 2, 3, 14, 14), dtype=np.uint8)
    fresh = index == 0 if fresh is None else fresh
    pts = start + index * SECOND
    return FrameSample(stream, index, pts, SECOND, True, fresh, grid, mask, patches, 1.0)
