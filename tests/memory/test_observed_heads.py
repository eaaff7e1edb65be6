"""Compression by observed queries when the heads of a memory do not hold the same number of tokens."""

import torch

from cluster.memory.eviction import compress
from cluster.memory.head_memory import KVChunk
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec

LAYERS, HEADS, WIDTH = 2, 2, 4


def memory_of(frames: int) -> StreamMemory:
    """Frame ``f`` is a single token: its key is ``f`` times the first axis in head 0, the second in head 1."""
    spec = MemorySpec(
        compressor="snapkv",
        compressor_options={"window": 0, "kernel": 1},
        organiser="frames",
        block_frames=1,
        cap_bytes=32 * 2**20,
    )
    memory = StreamMemory("cam", spec, TierStack([Arena(64 * 2**20)]))
    for number in range(frames):
        key = torch.zeros(LAYERS, HEADS, 1, WIDTH)
        key[:, 0, 0, 0] = key[:, 1, 0, 1] = number
        cell = torch.zeros(1, dtype=torch.int64)
        chunk = KVChunk("cam", number, number * MICROSECONDS, key, key.clone(), cell, 1, 1, torch.ones(3))
        memory.add_chunk(chunk)
    return memory


def frames_held(memory: StreamMemory) -> list[list[list[int]]]:
    return [[head.frame.tolist() for head in heads] for heads in memory.heads]


def asking(memory: StreamMemory) -> None:
    """Head 0 asks for long keys, head 1 for short ones."""
    queries = torch.zeros(HEADS, 3, WIDTH)
    queries[0, :, 0], queries[1, :, 1] = 4.0, -4.0
    memory.observe_queries([queries] * LAYERS)


def test_every_head_is_asked_by_its_own_rows() -> None:
    memory = memory_of(8)
    asking(memory)
    assert compress(memory, 0.5) is not None
    assert frames_held(memory) == [[[4, 5, 6, 7], [0, 1, 2, 3]]] * LAYERS


def test_also_when_one_of_them_lost_a_block() -> None:
    memory = memory_of(8)
    asking(memory)
    head = memory.heads[1][0]
    memory.drop_lost_clusters(1, 0, [int(head.organiser.table.uid[7])])
    assert memory.heads[1][0].tokens == 7
    assert compress(memory, 0.5) is not None
    (first, second), (lost, other) = frames_held(memory)
    assert (second, other) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert first == [4, 5, 6, 7]
    assert lost == [3, 4, 5, 6]
    # The compressor that goes on has all heads' rows again.
    assert compress(memory, 0.5) is not None


def test_other_settings_know_who_asked() -> None:
    memory = memory_of(8)
    asking(memory)
    memory.change_spec(memory.spec)
    assert compress(memory, 0.5) is not None
    assert frames_held(memory) == [[[4, 5, 6, 7], [0, 1, 2, 3]]] * LAYERS
