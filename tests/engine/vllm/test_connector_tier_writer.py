"""Blocks through a tier: there and back, dropped and counted, retried while it is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, KVShape
from cluster.engine.vllm.connector.tier_writer import BlockWriter
from cluster.memory.tiers.arena import Arena

SHAPE = KVShape(layers=2, heads=2, size=16, dtype=torch.float32)
CAP = 2**20


def block_of(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(SHAPE.block(tokens), generator=torch.Generator().manual_seed(seed))


def fill(folder: BlockFolder, **blocks: Tensor) -> None:
    for shard in range(folder.shards):
        store = BlockStore(folder, shape=SHAPE, fingerprint="m", shard=shard, cap_bytes=CAP)
        store.put([(key, block + shard) for key, block in blocks.items()])


def read(folder: BlockFolder, key: str, shard: int = 0) -> Tensor:
    found = BlockStore(folder, shape=SHAPE, fingerprint="m", shard=shard, cap_bytes=CAP).get(key)
    assert isinstance(found, Tensor)
    return found


@contextmanager
def writer_of(folder: BlockFolder, tier: Arena, **options: int) -> Iterator[BlockWriter]:
    writer = BlockWriter(folder, tier, shape=SHAPE, fingerprint="m", cap_bytes=CAP, **options)
    try:
        yield writer
    finally:
        writer.close()


def test_a_window_goes_to_another_host(tmp_path: Path) -> None:
    tier = Arena(2**22, slab_bytes=2**14)
    here, there = BlockFolder(tmp_path / "here", shards=2), BlockFolder(tmp_path / "there", shards=2)
    fill(here, a=block_of(5), b=block_of(3, 1))
    with writer_of(here, tier) as writer:
        writer.queue_blocks("gate", ["a", "b"])
        assert writer.flush(10)
        assert writer.counts["kept"] == 2
    with writer_of(there, tier) as writer:
        # Of another length than asked, never kept, and of another stream: none of them is there.
        assert writer.restore_blocks("gate", [("a", 4), ("c", 2)], 10) == set()
        assert writer.restore_blocks("yard", [("a", 5)], 10) == set()
        assert writer.restore_blocks("gate", [("a", 5), ("b", 3)], 10) == {"a", "b"}
        assert writer.counts["restored"] == 2
    for shard in range(2):
        assert torch.equal(read(there, "a", shard), block_of(5) + shard)
        assert torch.equal(read(there, "b", shard), block_of(3, 1) + shard)


def test_what_is_dropped_is_gone_everywhere(tmp_path: Path) -> None:
    tier, folder = Arena(2**22, slab_bytes=2**14), BlockFolder(tmp_path)
    fill(folder, a=block_of(5), b=block_of(3))
    with writer_of(folder, tier) as writer:
        writer.queue_blocks("gate", ["a", "b"])
        assert writer.flush(10)
        writer.drop_blocks("gate", ["a"])
        assert folder.tokens("a") is None
        assert writer.flush(10)
        assert writer.restore_blocks("gate", [("a", 5), ("b", 3)], 10) == {"b"}
        writer.drop_blocks("gate", ["b"])
        assert writer.flush(10)
    assert tier.nbytes("gate") == 0


def test_a_stream_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    tier, folder = Arena(2**22, slab_bytes=2**14), BlockFolder(tmp_path)
    fill(folder, a=block_of(5), b=block_of(3))
    with writer_of(folder, tier) as writer:
        writer.queue_blocks("gate", ["a"])
        writer.queue_manifest("gate", lambda: b"what it takes")
        writer.queue_blocks("yard", ["b"])
        assert writer.flush(10)
        assert writer.read_manifest("gate") == b"what it takes"
        writer.queue_blocks("gate", ["b"])
        writer.delete_stream("gate")
        assert writer.flush(10)
        assert writer.read_manifest("gate") is None
        assert writer.restore_blocks("yard", [("b", 3)], 10) == {"b"}
    assert tier.nbytes("gate") == 0


def test_a_manifest_is_written_behind_its_blocks(tmp_path: Path) -> None:
    """So that it never names what is not there yet, because the tier is full."""
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100, 1))
    room = Arena(2**16 + 2**14, evicts=False, slab_bytes=2**14)
    with writer_of(folder, room) as writer:
        writer.queue_blocks("gate", ["a", "b"])
        writer.queue_manifest("gate", lambda: b"a and b")
        assert not writer.flush(1.0)
        assert writer.read_manifest("gate") is None
        writer.drop_blocks("gate", ["a"])
        assert writer.flush(10)
        assert writer.read_manifest("gate") == b"a and b"


def test_a_full_tier_is_tried_again(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100, 1))
    room = Arena(2**16, evicts=False, slab_bytes=2**14)
    with writer_of(folder, room) as writer:
        writer.queue_blocks("gate", ["a", "b"])
        assert not writer.flush(1.0)
        assert writer.counts["retries"] > 0
        assert writer.counts["kept"] == 1
        writer.drop_blocks("gate", ["a"])
        assert writer.flush(10)
        folder.drop_blocks(["b"])
        assert writer.restore_blocks("gate", [("b", 100)], 10) == {"b"}
    assert torch.equal(read(folder, "b"), block_of(100, 1))


def test_no_more_waits_than_may(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100), c=block_of(100), d=block_of(100))
    room = Arena(2**14, evicts=False, slab_bytes=2**14)
    with writer_of(folder, room, waiting=2) as writer:
        writer.queue_blocks("gate", ["a"])
        writer.flush(0.2)
        writer.queue_blocks("gate", ["b", "c", "d"])
        assert writer.counts["dropped"] > 0
    # What still waited when it was closed is counted as well.
    assert writer.counts["dropped"] + writer.counts["kept"] + writer.counts["refused"] >= 3


def test_a_block_that_is_not_there_is_counted(tmp_path: Path) -> None:
    with writer_of(BlockFolder(tmp_path), Arena(2**22, slab_bytes=2**14)) as writer:
        writer.queue_blocks("gate", ["none"])
        assert writer.flush(10)
        assert writer.counts["refused"] == 1
        assert writer.restore_blocks("gate", [("none", 3)], 0.0) == set()
        assert writer.counts["missing"] == 1
