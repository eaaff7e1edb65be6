"""Retrievers against brute force and by hand."""

import inspect
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory import prefetch
from cluster.memory.head_memory import KVChunk
from cluster.memory.organise import ClusterTable, NewTokens
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.retrieve.nearest import TopK, TwoStage
from cluster.memory.retrieve.wicsum import WiCSum, _chosen
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.registry import retrievers
from cluster.types import MICROSECONDS, MemorySpec


def whole(name: str) -> Any:
    """A retriever that is to retrieve everything: its options are shares, or a number that is enough for any test."""
    policy = retrievers.get(name)
    options = inspect.signature(policy).parameters.values()
    return policy(**{each.name: 1.0 for each in options if isinstance(each.default, float)})


def table_of(key: torch.Tensor, cluster: list[int], partition: list[int]) -> ClusterTable:
    table = ClusterTable(key.shape[1])
    count = len(key)
    table.add(
        NewTokens(key, key, torch.arange(count), torch.tensor(partition, dtype=torch.int64)),
        torch.tensor(cluster, dtype=torch.int64),
    )
    return table


def some(seed: int, clusters: int, width: int = 4) -> ClusterTable:
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (clusters,), generator=rng).tolist()
    cluster = [number for number, size in enumerate(sizes) for _ in range(size)]
    return table_of(torch.randn(len(cluster), width, generator=rng), cluster, [number % 3 for number in cluster])


@pytest.mark.parametrize("name", retrievers.names())
def test_of_nothing_nothing_is_retrieved(name: str) -> None:
    retriever = whole(name)
    for query, table in ((torch.ones(2, 4), ClusterTable(4)), (torch.zeros(0, 4), some(0, 5))):
        found = retriever.select(query, table)
        assert found.tolist() == []
        assert found.dtype == torch.int64


@pytest.mark.parametrize("name", retrievers.names())
@given(seed=st.integers(0, 50), clusters=st.integers(1, 40), sharp=st.sampled_from([0.1, 1.0, 40.0]))
def test_who_asks_for_everything_gets_everything(name: str, seed: int, clusters: int, sharp: float) -> None:
    retriever = whole(name)
    query = sharp * torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    assert retriever.select(query, some(seed, clusters)).tolist() == list(range(clusters))


@pytest.mark.parametrize("name", retrievers.names())
def test_heads_of_a_layer_get_their_own_clusters(name: str) -> None:
    retriever, tables = whole(name), [some(1, 5), ClusterTable(4), some(2, 9)]
    for rows, wanted in ((3, [list(range(5)), [], list(range(9))]), (0, [[], [], []])):
        query = torch.randn(3, rows, 4, generator=torch.Generator().manual_seed(0))
        found = retriever.select_layer(query, tables)
        assert [each.tolist() for each in found] == wanted
        assert all(each.dtype == torch.int64 for each in found)


@pytest.mark.parametrize("name", retrievers.names())
def test_a_layer_of_one_head_chooses_like_that_head(name: str) -> None:
    retriever, table = retrievers.get(name)(), some(4, 200)
    query = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    (found,) = retriever.select_layer(query[None], [table])
    assert found.tolist() == retriever.select(query, table).tolist()
    assert 0 < len(found) < len(table)


def test_wicsum_is_of_means_and_counts() -> None:
    table, query = some(3, 30), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    found = WiCSum(ratio=0.4).select(query, table)
    taken = _chosen(query[None], table.mean[None], table.count[None], 0.4)[0][0].any(0)
    assert found.tolist() == taken.nonzero()[:, 0].tolist()


@given(
    seed=st.integers(0, 100),
    clusters=st.integers(1, 30),
    rows=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    tokens=st.sampled_from([None, 0, 1, 7, 1000]),
)
def test_top_k_is_the_best_until_the_budget_is_reached(
    seed: int, clusters: int, rows: int, share: float, tokens: int | None
) -> None:
    table = some(seed, clusters)
    query = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    scores = [max(float(row @ mean) for row in query) for mean in table.mean]
    wanted: set[int] = set()
    for number in sorted(range(clusters), key=lambda i: -scores[i]):
        held = sum(int(table.count[each]) for each in wanted)
        if held >= (share * table.tokens if tokens is None else tokens):
            break
        wanted.add(number)
    assert set(TopK(share=share, tokens=tokens).select(query, table).tolist()) == wanted


def test_of_equal_scores_top_k_takes_the_older() -> None:
    table = table_of(torch.ones(40, 2), list(range(40)), [0] * 40)
    assert TopK(tokens=3).select(torch.ones(1, 2), table).tolist() == [0, 1, 2]


def two_partitions() -> ClusterTable:
    """Partition 0: many at (1, 0) and one far out at (0, 9). Partition 1: two at (0, 2) and (0, 4)."""
    key = torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 9.0], [0.0, 2.0], [0.0, 4.0]])
    return table_of(key, [0] * 8 + [1, 2, 3], [0] * 9 + [1, 1])


def test_partitions_come_first_by_the_mean_of_all_their_members() -> None:
    table = two_partitions()
    query = torch.tensor([[0.0, 1.0]])
    # (8/9, 1) against (0, 3): the second partition, though the nearest cluster is in the first.
    found = TwoStage(partitions=1, clusters=1).select(query, table)
    assert found.tolist() == [3]
    assert TwoStage(partitions=2, clusters=1).select(query, table).tolist() == [1]


def test_any_row_can_choose_a_partition() -> None:
    query = torch.tensor([[0.0, 1.0], [9.0, 0.0]])
    assert TwoStage(partitions=1, clusters=1.0).select(query, two_partitions()).tolist() == [0, 1]


def test_shares_are_rounded_up_and_numbers_are_numbers() -> None:
    table, query = two_partitions(), torch.tensor([[0.0, 1.0]])
    for partitions, clusters, wanted in (
        (0.5, 0.5, [3]),
        (0.6, 0.5, [1, 3]),
        (1.0, 0.3, [1, 3]),
        (5, 3, [1, 2, 3]),
        (1, 7, [2, 3]),
    ):
        found = TwoStage(partitions=partitions, clusters=clusters).select(query, table)
        assert found.tolist() == wanted


class NeverAnswers(Arena):
    """A tier far away whose loads end with the test."""

    at_hand = False
    over = threading.Event()

    def load(self, keys):
        self.over.wait()
        return super().load(keys)


def test_all_layers_of_a_question_have_one_wait_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each might wait a minute, and so might who closes the session."""
    monkeypatch.setattr(prefetch, "_JOIN_S", 60.0)
    far = NeverAnswers(2**22, name="node")
    memory = StreamMemory("gate", MemorySpec(), TierStack([Arena(2**22, name="host"), far]))
    for number in range(16):
        key, value = torch.ones(2, 6, 1, 3, 4)
        memory.add_chunk(
            KVChunk("gate", number, number * MICROSECONDS, key, value, torch.arange(3), 1, 3, torch.ones(4))
        )
    memory.tiers.tiers[0].drop("gate")
    late = threading.Timer(20.0, far.over.set)
    late.start()
    try:
        with RetrievalSession(memory, TwoStage(), deadline_s=60.0, budget_s=0.2) as retrieval:
            for layer in range(6):
                retrieval.fetch(layer, torch.ones(1, 2, 4))
            assert retrieval.stats.unavailable >= 6
        assert not far.over.is_set()
        far.over.set()
        with RetrievalSession(memory, TwoStage()) as retrieval:
            assert retrieval.fetch(0, torch.ones(1, 2, 4)).tokens, "this organiser keeps no values of clusters"
    finally:
        late.cancel()
        far.over.set()


def test_a_session_that_fails_to_begin_leaves_no_reader(monkeypatch) -> None:
    """Replaced blocks wait for readers: one that is never closed would have them stay for good."""
    memory = StreamMemory("gate", MemorySpec(), TierStack([Arena(2**22)]))
    monkeypatch.setattr(RetrievalSession, "_is_wanted", lambda *_: 1 / 0)
    memory.accept_chunk(KVChunk("gate", 0, 0, *torch.ones(2, 1, 1, 3, 4), torch.arange(3), 1, 3, torch.ones(4)))
    with pytest.raises(ZeroDivisionError):
        RetrievalSession(memory, TwoStage())
    assert memory._readers == []


def test_clusters_that_are_not_read_are_summarised() -> None:
    memory = StreamMemory("gate", MemorySpec(organiser="mosaic"), TierStack([Arena(2**22)]))
    rng = torch.Generator().manual_seed(1)
    for number in range(16):
        key, value = torch.randn(2, 1, 1, 3, 4, generator=rng)
        cell = torch.arange(3)
        memory.add_chunk(KVChunk("gate", number, number * MICROSECONDS, key, value, cell, 1, 3, torch.ones(4)))
    head = memory.heads[0][0]
    assert len(head.table) > 2
    query = torch.randn(1, 2, 4, generator=rng)
    with RetrievalSession(memory, TwoStage(clusters=1, representatives=False)) as retrieval:
        read = retrieval.fetch(0, query)
    with RetrievalSession(memory, TwoStage(clusters=1)) as retrieval:
        both = retrieval.fetch(0, query)
        assert retrieval.stats.fetched_tokens == read.tokens
    assert both.tokens == read.tokens + len(head.table) - 1
    assert bool((both.frame.diff() >= 0).all())
    # Each is the mean of a cluster that was not read.
    rows = {tuple(row.tolist()) for row in torch.cat([both.key, both.value], dim=2)[0]}
    means = torch.cat([head.table.mean, head.table.value_mean], dim=1)
    chosen = int(TwoStage(clusters=1).select(query[0], head.table))
    assert all(
        (tuple(mean.tolist()) in rows) == (number != chosen)
        for number, mean in enumerate(means)
        if number != chosen or head.table.count[number] > 1
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wicsum", {"ratio": 1.5}),
        ("top_k", {"share": -0.1}),
        ("top_k", {"tokens": -1}),
        ("two_stage", {"partitions": 0}),
        ("two_stage", {"clusters": 1.5}),
        ("two_stage", {"clusters": True}),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"between 0 and 1|0 or more|a number from 1"):
        retrievers.get(name)(**options)
