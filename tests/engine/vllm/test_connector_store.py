"""Blocks in files: whole or not at all, of the right model and key, under a cap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, Fault, KVShape
from cluster.errors import ConfigError

SHAPE = KVShape(layers=2, heads=3, size=4, dtype=torch.bfloat16)


def store_in(folder: Path, *, cap: int = 2**20, fingerprint: str = "model", shape: KVShape = SHAPE) -> BlockStore:
    return BlockStore(BlockFolder(folder), shape=shape, fingerprint=fingerprint, cap_bytes=cap)


def block_of(tokens: int, seed: int = 0, shape: KVShape = SHAPE) -> Tensor:
    return torch.randn(shape.block(tokens), generator=torch.Generator().manual_seed(seed)).to(shape.dtype)


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    block = block_of(5)
    assert store_in(tmp_path).put([("a", block)]) == [True]
    found = store_in(tmp_path).get("a")
    assert isinstance(found, Tensor)
    assert torch.equal(found, block)
    assert BlockFolder(tmp_path).tokens("a") == 5
    assert BlockFolder(tmp_path).tokens("b") is None
    assert store_in(tmp_path).get("b") is Fault.MISSING


def test_what_replaces_a_block_is_read_next(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put([("a", block_of(5))])
    own = store.get("a")
    assert isinstance(own, Tensor)
    assert torch.equal(own, block_of(5))
    store_in(tmp_path).put([("a", block_of(6, seed=1))])
    found = store.get("a")
    assert isinstance(found, Tensor)
    assert torch.equal(found, block_of(6, seed=1))


@pytest.mark.parametrize("where", ["first", "header", "last"])
def test_a_changed_byte_is_damage_and_goes(tmp_path: Path, where: str) -> None:
    store_in(tmp_path).put([("a", block_of(5))])
    path = BlockFolder(tmp_path).path("a")
    data = bytearray(path.read_bytes())
    data[{"first": 0, "header": 40, "last": len(data) - 1}[where]] ^= 1
    path.write_bytes(data)
    assert store_in(tmp_path).get("a") is Fault.DAMAGED
    assert not path.exists()


@pytest.mark.parametrize("left", [0, 10, 100, -1])
def test_a_short_block_is_not_there_at_all(tmp_path: Path, left: int) -> None:
    store_in(tmp_path).put([("a", block_of(5))])
    path = BlockFolder(tmp_path).path("a")
    path.write_bytes(path.read_bytes()[:left])
    assert BlockFolder(tmp_path).tokens("a") is None
    assert store_in(tmp_path).get("a") is Fault.DAMAGED


def test_blocks_of_another_model_shape_or_key_are_foreign(tmp_path: Path) -> None:
    store_in(tmp_path).put([("a", block_of(5)), ("b", block_of(5)), ("c", block_of(5))])
    assert store_in(tmp_path, fingerprint="other").get("a") is Fault.FOREIGN
    other = KVShape(layers=3, heads=2, size=4, dtype=torch.bfloat16)
    assert store_in(tmp_path, shape=other).get("b") is Fault.FOREIGN
    folder = BlockFolder(tmp_path)
    folder.path("c").replace(folder.path("d"))
    assert folder.tokens("d") is None
    assert store_in(tmp_path).get("d") is Fault.FOREIGN


def test_a_block_is_there_only_in_all_shards(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, shards=2)
    for shard in range(2):
        assert folder.tokens("a") is None
        store = BlockStore(folder, shape=SHAPE, fingerprint="model", shard=shard, cap_bytes=2**20)
        store.put([("a", block_of(5))])
    assert folder.tokens("a") == 5
    assert folder.drop_blocks(["a", "b"]) == 1
    assert folder.nbytes == 0


def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    tokens = 200
    need = SHAPE.nbytes(tokens) + 4096
    store = store_in(tmp_path, cap=3 * need)
    for number, key in enumerate("abc"):
        store.put([(key, block_of(tokens, number))])
        os.utime(store.folder.path(key), (number, number))
    store.get("a")
    assert store.put([("d", block_of(tokens))]) == [True]
    assert [key for key in "abcd" if store.folder.tokens(key)] == ["a", "c", "d"]
    assert store.evicted == 1
    assert store.folder.nbytes <= 3 * need


def test_what_is_larger_than_the_cap_is_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path, cap=8192)
    assert store.put([("a", block_of(20)), ("b", block_of(500))]) == [True, False]
    assert store.folder.tokens("a") == 20
    with pytest.raises(ConfigError, match="holds no KV"):
        store_in(tmp_path, cap=10)


def test_open_blocks_keep_no_files_open(tmp_path: Path) -> None:
    """A worker has as many of them as frames in all windows, and few files it may open."""
    store = store_in(tmp_path, cap=2**24)
    before = len(list(Path("/proc/self/fd").iterdir()))
    store.put([(str(number), block_of(2, number)) for number in range(300)])
    blocks = [store.get(str(number)) for number in range(300)]
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
    assert all(torch.equal(block, block_of(2, number)) for number, block in enumerate(blocks) if block is not None)


def test_memory_of_blocks_that_are_gone_is_given_back(tmp_path: Path) -> None:
    """A mapping keeps a deleted file's memory: it ends at once, or when something else is written."""

    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    store = store_in(tmp_path)
    store.put([("a", block_of(5)), ("b", block_of(5))], again=False)
    store.get("a", again=False)
    assert mapped() == 0
    store.get("a")
    assert mapped() == 1
    store.folder.drop_blocks(["a"])
    store.put([("c", block_of(5))], again=False)
    assert mapped() == 0


def test_a_folder_that_takes_nothing_loses_the_block_and_nothing_else(tmp_path: Path) -> None:
    store = store_in(tmp_path / "kv")
    store.put([("a", block_of(5))])
    # A folder in the file's place: what is written cannot be renamed onto it.
    store.folder.path("b").mkdir()
    assert store.put([("b", block_of(5)), ("c", block_of(5))]) == [False, True]
    assert not [path for path in (tmp_path / "kv").iterdir() if path.name.startswith(".")]
