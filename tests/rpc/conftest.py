"""Coroutine tests run on their own event loop with a deadline; small makers of border types."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest

from cluster.types import (
    Answer,
    EncodedPacket,
    FrameSample,
    PatchGrid,
    Question,
    StreamSpec,
    TokenCount,
    mask_digest,
)

DEADLINE_S = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


class Make:
    """Border types with nothing that matters left out."""

    GRID = PatchGrid(rows=4, cols=6, patch=2, merge=2, temporal=2)

    def packet(self, sequence: int, *, size: int = 100, gop: int = 10, codec: str = "h264") -> EncodedPacket:
        data = (sequence % 251).to_bytes(1, "big") * size
        return EncodedPacket(codec, data, sequence * 40_000, sequence * 40_000, sequence % gop == 0, sequence)

    def packets(self, count: int, **options: Any) -> list[EncodedPacket]:
        return [self.packet(sequence, **options) for sequence in range(count)]

    def sample(self, stream: str = "gate", index: int = 0, *, fresh: bool | None = None) -> FrameSample:
        """Frame 0 is fresh and complete, later ones keep two groups."""
        fresh = index == 0 if fresh is None else fresh
        mask = np.full((4, 6), fresh)
        mask[:2, :4] = True
        count = int(mask.sum())
        patches = np.random.default_rng(index).integers(0, 256, (count, 2, 3, 2, 2), dtype=np.uint8)
        pts = index * 1_000_000
        digest = mask_digest(mask, index, pts)
        return FrameSample(stream, index, pts, 1_000_000, fresh, fresh, self.GRID, mask, patches, 0.25, digest)

    def spec(self, stream: str = "gate", *, window_s: float = 40.0) -> StreamSpec:
        return StreamSpec(stream, (Question("person", "Is there a person?"),), window_s=window_s)

    def answer(self, window: int = 0, *, stream: str = "gate", question: str = "person", end: int = 0) -> Answer:
        tokens = TokenCount(full=100, kept=40, reused=20, refreshed=5, new=15, query=12, encoded=15)
        end = end or window * 8_000_000 + 40_000_000
        return Answer(stream, window, end - 40_000_000, end, question, 0.75, True, "yes", False, tokens)


@pytest.fixture
def make() -> Make:
    return Make()


async def until(condition: Any, what: str = "", timeout_s: float = 10.0) -> None:
    """Wait until ``condition()`` holds; fails with ``what`` after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"never happened: {what or condition}")


@pytest.fixture(name="until")
def until_fixture() -> Any:
    return until
