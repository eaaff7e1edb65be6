"""Blocks through a tier: there and back, dropped and counted, retried while it is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cluster.engine.vllm.connector.courier import Courier
from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, KVShape
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
def courier_of(folder: BlockFolder, tier: Arena, **options: int) -> Iterator[Courier]:
    courier = Courier(folder, tier, shape=SHAPE, fingerprint="m", cap_bytes=CAP, **options)
    try:
        yield courier
    finally:
        courier.close()


def test_a_window_goes_to_another_host(tmp_path: Path) -> None:
    tier = Arena(2**22, slab_bytes=2**14)
    here, there = BlockFolder(tmp_path / "here", shards=2), BlockFolder(tmp_path / "there", shards=2)
    fill(here, a=block_of(5), b=block_of(3, 1))
    with courier_of(here, tier) as courier:
        courier.keep("gate", ["a", "b"])
        assert courier.flush(10)
        assert courier.counts["kept"] == 2
    with courier_of(there, tier) as courier:
        # Of another length than asked, never kept, and of another stream: none of them is there.
        assert courier.restore("gate", [("a", 4), ("c", 2)], 10) == set()
        assert courier.restore("yard", [("a", 5)], 10) == set()
        assert courier.restore("gate", [("a", 5), ("b", 3)], 10) == {"a", "b"}
        assert courier.counts["restored"] == 2
    for shard in range(2):
        assert torch.equal(read(there, "a", shard), block_of(5) + shard)
        assert torch.equal(read(there, "b", shard), block_of(3, 1) + shard)


def test_what_is_dropped_is_gone_everywhere(tmp_path: Path) -> None:
    tier, folder = Arena(2**22, slab_bytes=2**14), BlockFolder(tmp_path)
    fill(folder, a=block_of(5), b=block_of(3))
    with courier_of(folder, tier) as courier:
        courier.keep("gate", ["a", "b"])
        assert courier.flush(10)
        courier.drop("gate", ["a"])
        assert folder.tokens("a") is None
        assert courier.flush(10)
        assert courier.restore("gate", [("a", 5), ("b", 3)], 10) == {"b"}
        courier.drop("gate", ["b"])
        assert courier.flush(10)
    assert tier.nbytes("gate") == 0


def test_a_stream_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    tier, folder = Arena(2**22, slab_bytes=2**14), BlockFolder(tmp_path)
    fill(folder, a=block_of(5), b=block_of(3))
    with courier_of(folder, tier) as courier:
        courier.keep("gate", ["a"])
        courier.note("gate", lambda: b"what it takes")
        courier.keep("yard", ["b"])
        assert courier.flush(10)
        assert courier.noted("gate") == b"what it takes"
        courier.keep("gate", ["b"])
        courier.forget("gate")
        assert courier.flush(10)
        assert courier.noted("gate") is None
        assert courier.restore("yard", [("b", 3)], 10) == {"b"}
    assert tier.nbytes("gate") == 0


def test_a_manifest_is_written_behind_its_blocks(tmp_path: Path) -> None:
    """So that it never names what is not there yet, because the tier is full."""
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100, 1))
    room = Arena(2**16 + 2**14, evicts=False, slab_bytes=2**14)
    with courier_of(folder, room) as courier:
        courier.keep("gate", ["a", "b"])
        courier.note("gate", lambda: b"a and b")
        assert not courier.flush(1.0)
        assert courier.noted("gate") is None
        courier.drop("gate", ["a"])
        assert courier.flush(10)
        assert courier.noted("gate") == b"a and b"


def test_a_full_tier_is_tried_again(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100, 1))
    room = Arena(2**16, evicts=False, slab_bytes=2**14)
    with courier_of(folder, room) as courier:
        courier.keep("gate", ["a", "b"])
        assert not courier.flush(1.0)
        assert courier.counts["retries"] > 0
        assert courier.counts["kept"] == 1
        courier.drop("gate", ["a"])
        assert courier.flush(10)
        folder.drop(["b"])
        assert courier.restore("gate", [("b", 100)], 10) == {"b"}
    assert torch.equal(read(folder, "b"), block_of(100, 1))


def test_no_more_waits_than_may(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    fill(folder, a=block_of(100), b=block_of(100), c=block_of(100), d=block_of(100))
    room = Arena(2**14, evicts=False, slab_bytes=2**14)
    with courier_of(folder, room, waiting=2) as courier:
        courier.keep("gate", ["a"])
        courier.flush(0.2)
        courier.keep("gate", ["b", "c", "d"])
        assert courier.counts["dropped"] > 0
    # What still waited when it was closed is counted as well.
    assert courier.counts["dropped"] + courier.counts["kept"] + courier.counts["refused"] >= 3


def test_a_block_that_is_not_there_is_counted(tmp_path: Path) -> None:
    with courier_of(BlockFolder(tmp_path), Arena(2**22, slab_bytes=2**14)) as courier:
        courier.keep("gate", ["none"])
        assert courier.flush(10)
        assert courier.counts["refused"] == 1
        assert courier.restore("gate", [("none", 3)], 0.0) == set()
        assert courier.counts["missing"] == 1
