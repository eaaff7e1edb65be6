"""Small makers of border types."""

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
)


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
        return FrameSample(stream, index, pts, 1_000_000, fresh, fresh, self.GRID, mask, patches, 0.25)

    def spec(self, stream: str = "gate", *, window_s: float = 40.0) -> StreamSpec:
        return StreamSpec(stream, (Question("person", "Is there a person?"),), window_s=window_s)

    def answer(self, window: int = 0, *, stream: str = "gate", question: str = "person", end: int = 0) -> Answer:
        tokens = TokenCount(full=100, kept=40, reused=20, refreshed=5, new=15, query=12, encoded=15)
        end = end or window * 8_000_000 + 40_000_000
        return Answer(stream, window, end - 40_000_000, end, question, 0.75, True, "yes", False, tokens)


@pytest.fixture
def make() -> Make:
    return Make()
