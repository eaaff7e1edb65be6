"""ReKV's choice of frames against its published rule, written out in numpy over the raw keys."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.head_memory import KVChunk
from cluster.memory.organise import ClusterTable, NewTokens
from cluster.memory.organise.simple import Frames, Tokens
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.retrieve.rekv import ReKV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec

WIDTH = 4


def published(query: np.ndarray, keys: list[np.ndarray], count: int) -> list[int]:
    """Numbers of the frames: ``query [H, r, D]`` of all query heads, ``keys`` per frame ``[Hkv, t, D]``."""
    group = len(query) // len(keys[0])
    question = query.mean(1).reshape(-1)
    scores = [float(np.repeat(frame.mean(1), group, axis=0).reshape(-1) @ question) for frame in keys]
    return sorted(sorted(range(len(keys)), key=lambda number: (-scores[number], number))[:count])


def whole_numbers(*shape: int, seed: int) -> np.ndarray:
    """So few and small that sums are exact and ties frequent."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float64)


def table_of(
    keys: dict[int, np.ndarray], organiser: type[Frames] | type[Tokens] = Frames, width: int = WIDTH
) -> ClusterTable:
    """One head's table; ``keys`` by frame ``[t, D]``, as its organiser puts them into clusters."""
    made = organiser(width)
    for number, key in keys.items():
        tensor, count = torch.from_numpy(key).float(), len(key)
        none = torch.zeros(count, dtype=torch.int64)
        made.add(NewTokens(tensor, tensor, none + number, none), lambda _: None)
    return made.table


def frames_of(table: ClusterTable, clusters: torch.Tensor) -> list[int]:
    """Frames of the tokens in clusters, once for each token."""
    return sorted(table.latest[table.of_token[torch.isin(table.of_token, clusters)]].tolist())


@given(
    seed=st.integers(0, 200),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    frames=st.integers(1, 12),
    rows=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 14),
    organiser=st.sampled_from([Frames, Tokens]),
)
def test_the_frames_are_those_of_the_published_rule(
    seed: int, heads: int, group: int, frames: int, rows: int, count: int, organiser: type[Frames] | type[Tokens]
) -> None:
    keys = [whole_numbers(heads, 4, WIDTH, seed=seed + 1000 * number) for number in range(frames)]
    query = whole_numbers(heads * group, rows, WIDTH, seed=seed)
    wanted = published(query, keys, count)
    tables = [table_of({7 + n: key[h] for n, key in enumerate(keys)}, organiser) for h in range(heads)]
    by_key_head = torch.from_numpy(query).float().reshape(heads, group * rows, WIDTH)
    found = ReKV(frames=count).select_layer(by_key_head, tables)
    for table, chosen in zip(tables, found, strict=True):
        assert frames_of(table, chosen) == [7 + n for n in wanted for _ in range(4)]
        assert chosen.tolist() == sorted(chosen.tolist())


def test_heads_decide_together_by_mean_rows_and_dot_products() -> None:
    # Products 2 + 0, 0 + 5 and 0.5 + 0.5. Head 0 alone would take frame 0, as would the best single row (18 + 0);
    # the cosine is largest for frame 2.
    tables = [
        table_of({0: np.array([[2.0, 0.0]]), 1: np.array([[0.0, 1.0]]), 2: np.array([[0.5, 0.0]])}, width=2),
        table_of({0: np.array([[0.0, 1.0]]), 1: np.array([[5.0, 1.0]]), 2: np.array([[0.5, 0.0]])}, width=2),
    ]
    query = torch.tensor([[[9.0, 0.0], [-7.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]])
    chosen = ReKV(frames=1).select_layer(query, tables)
    assert [each.tolist() for each in chosen] == [[1], [1]]


def test_of_equal_scores_the_older_frame_comes_first() -> None:
    table = table_of({number: np.ones((2, WIDTH)) for number in range(40)})
    assert ReKV(frames=3).select(torch.ones(1, WIDTH), table).tolist() == [0, 1, 2]


@pytest.mark.parametrize("common", [-100.0, 100.0])
def test_a_head_without_a_frame_counts_it_as_average_and_has_nothing_of_it(common: float) -> None:
    def head(scores: dict[int, float]) -> ClusterTable:
        return table_of({number: np.array([[score, 0.0]]) for number, score in scores.items()}, width=2)

    # Head 0 lacks frame 2 and counts it as ``common``. Sums above that: 5, 2, 4, 7. Counted as nothing, frame 2 would
    # be the best beside -100 and the worst beside 100.
    tables = [head({0: common + 2, 1: common, 3: common - 2}), head({0: 3, 1: 2, 2: 4, 3: 9}), head({})]
    query = torch.tensor([[[1.0, 0.0]]]).expand(3, 1, 2)
    for count, wanted in ((2, [[0, 2], [0, 3], []]), (3, [[0, 2], [0, 2, 3], []])):
        found = ReKV(frames=count).select_layer(query, tables)
        assert [each.tolist() for each in found] == wanted


@pytest.mark.parametrize("first", [0, 5, 8])
def test_a_session_reads_the_same_frames_in_every_head(first: int) -> None:
    """The nearest of those from ``first`` on, however near older ones are."""
    layers, heads, group, frames, count = 2, 2, 2, 10, 3
    spec = MemorySpec(compressor="none", organiser="frames", block_frames=4, cap_bytes=32 * 2**20)
    memory = StreamMemory("cam", spec, TierStack([Arena(64 * 2**20)]))
    keys = [whole_numbers(layers, heads, 4, WIDTH, seed=number) for number in range(frames)]
    for number, key in enumerate(keys):
        tensor = torch.from_numpy(key).float()
        cells = torch.arange(4)
        memory.add_chunk(KVChunk("cam", number, number * MICROSECONDS, tensor, tensor, cells, 2, 2, torch.zeros(1)))
    memory.settle()
    for layer in range(layers):
        query = whole_numbers(heads * group, 4, WIDTH, seed=100 + layer)
        wanted = [first + number for number in published(query, [key[layer] for key in keys[first:]], count)]
        rows = torch.from_numpy(query).float().reshape(heads, group * 4, WIDTH)
        with RetrievalSession(memory, ReKV(frames=count), first_frame=first, prefetch=False) as retrieval:
            found = retrieval.fetch(layer, rows)
        assert found.frame.tolist() == [[number for number in wanted for _ in range(4)]] * heads
        assert bool(found.valid.all())


def test_the_number_of_frames_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="1 or more, not 0"):
        ReKV(frames=0)
