"""Blocks that are written once, against a count of every write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from kv_parts import key_of

from cluster.lab.bench.memory.footage import made_chunks
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

CAP = 128 * 1024


class WriteLog(Arena):
    """How often each token was stored: (layer, head, frame, cell)."""

    def __init__(self) -> None:
        super().__init__(64 * 2**20)
        self.writes: Counter[tuple[int, int, int, int]] = Counter()

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        for key, block in items:
            if block.key.dtype != torch.uint8:
                places = zip(block.frame.tolist(), block.cell.tolist(), strict=True)
                self.writes.update((key.layer, key.head, *place) for place in places)
        return super().store(items)


@pytest.mark.parametrize("compressor", ["novelty", "infinipot_v", "cords"])
@pytest.mark.parametrize(("organiser", "once"), [("kvmu", True), ("resv", False)])
def test_only_kvmu_writes_every_token_once_under_a_cap(compressor: str, organiser: str, once: bool) -> None:
    log = WriteLog()
    spec = MemorySpec(compressor=compressor, organiser=organiser, block_frames=4, cap_bytes=CAP, kv_dtype="model")
    memory = StreamMemory("cam", spec, TierStack([log]))
    chunks = list(made_chunks("cam", 160, layers=2, heads=2, rows=3, columns=4, width=8))
    for chunk in chunks:
        memory.add_chunk(chunk)
        assert log.nbytes("cam") <= CAP
    assert memory.counts.compressions > 2
    assert memory.counts.frames_dropped == memory.counts.lost == 0
    assert (max(log.writes.values()) == 1) is once
    # What is left is what came.
    for layer, h, head in memory.iter_heads():
        assert head.tokens
        for cluster, loaded in enumerate(log.load([key_of(memory, layer, h, each) for each in range(len(head.table))])):
            assert loaded.block is not None
            assert len(loaded.block) == int(head.table.count[cluster])
            came = torch.stack([chunks[int(frame)].key[layer, h] for frame in loaded.block.frame])
            assert torch.equal(loaded.block.key, came[torch.arange(len(came)), loaded.block.cell.long()])
