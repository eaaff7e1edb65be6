"""WiCSum against its definition (V-Rex, eq. 1-3), ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.organise import ClusterTable, NewTokens
from cluster.memory.retrieve.wicsum import WiCSum, _chosen, _sorted
from cluster.registry import retrievers


def wicsum(query: torch.Tensor, mean: torch.Tensor, count: torch.Tensor, ratio: float = 0.3) -> torch.Tensor:
    """Clusters that any row of one head takes."""
    return _chosen(query[None], mean[None], count[None], ratio)[0][0].any(0).nonzero()[:, 0]


@pytest.fixture
def sorted_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many scores each call has sorted."""
    counts: list[int] = []

    def counting(scores: torch.Tensor, weight: torch.Tensor, among: torch.Tensor, above: torch.Tensor) -> object:
        counts.append(int(among.sum()))
        return _sorted(scores, weight, among, above)

    monkeypatch.setattr("cluster.memory.retrieve.wicsum._sorted", counting)
    return counts


def plain(query: torch.Tensor, mean: torch.Tensor, count: torch.Tensor, ratio: float) -> set[int]:
    """Each row's scores in descending order, however many tokens each stands for, until those times the counts exceed
    the share of their sum."""
    chosen: set[int] = set()
    for row in query:
        scores = [float(row @ each) / math.sqrt(len(row)) for each in mean]
        scores = [math.exp(score - max(scores)) for score in scores]
        total = sum(score * int(n) for score, n in zip(scores, count, strict=True))
        running = 0.0
        for number in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
            if running > ratio * total:
                break
            chosen.add(number)
            running += scores[number] * int(count[number])
    return chosen


def test_the_highest_score_comes_first_however_few_tokens_it_stands_for() -> None:
    """Scores 1, 1/e and 1/e of 1, 100 and 1 tokens: a hundredth of the sum of 38.2 is exceeded by the first alone, a
    twentieth by the first and the second."""
    mean, count = torch.tensor([[2.0, 0.0], [2 - 2**0.5, 0.0], [2 - 2**0.5, 0.0]]), torch.tensor([1, 100, 1])
    query = torch.tensor([[1.0, 0.0]])
    assert wicsum(query, mean, count, 0.01).tolist() == [0]
    assert wicsum(query, mean, count, 0.05).tolist() == [0, 1]


@given(
    seed=st.integers(0, 200),
    clusters=st.integers(1, 70),
    rows=st.integers(1, 4),
    ratio=st.sampled_from([0.0, 0.1, 0.3, 0.62, 0.9]),
    few=st.sampled_from([0, 512]),
)
def test_the_best_until_the_share_is_exceeded(seed: int, clusters: int, rows: int, ratio: float, few: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    # Sharp rows and flat ones.
    query = torch.randn(rows, 8, generator=rng) * (10 ** torch.linspace(-1, 1, rows))[:, None]
    mean, count = torch.randn(clusters, 8, generator=rng), torch.randint(1, 40, (clusters,), generator=rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.memory.retrieve.wicsum._FEW", few)
        patch.setattr("cluster.memory.retrieve.wicsum._WORTH", 0)
        found = wicsum(query, mean, count, ratio)
    assert set(found.tolist()) == plain(query, mean, count, ratio)


@pytest.mark.parametrize("scores", [1, 200, 2**24])
@pytest.mark.parametrize("name", ["wicsum", "top_k"])
def test_each_group_of_rows_selects_for_itself(name: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.memory.retrieve.wicsum._SCORES", scores)
    rng = torch.Generator().manual_seed(0)
    tables, sizes = [table_of(rng, 30), table_of(rng, 12)], [3, 1, 5, 0, 2]
    query, retriever = torch.randn(2, sum(sizes), 8, generator=rng), retrievers.get(name)()
    found = retriever.select_groups(query, sizes, tables)
    assert [of_head.shape for of_head in found] == [(5, 30), (5, 12)]
    for group, rows in enumerate(torch.split(query, sizes, dim=1)):
        for of_head, own, table in zip(found, rows, tables, strict=True):
            assert of_head[group].nonzero()[:, 0].tolist() == retriever.select(own, table).tolist()


def table_of(rng: torch.Generator, clusters: int) -> ClusterTable:
    """Clusters of one to three tokens."""
    cluster = torch.arange(clusters).repeat_interleave(torch.randint(1, 4, (clusters,), generator=rng))
    key, none = torch.randn(len(cluster), 8, generator=rng), torch.zeros(len(cluster), dtype=torch.int64)
    table = ClusterTable(8)
    table.add(NewTokens(key, key, none, none), cluster)
    return table


@given(seed=st.integers(0, 200), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_each_head_chooses_among_its_own_clusters(seed: int, sizes: list[int]) -> None:
    rng = torch.Generator().manual_seed(seed)
    query, longest = torch.randn(len(sizes), 3, 8, generator=rng), max(sizes)
    # What is no cluster has a count of 0, and here the largest mean of all.
    mean = torch.full((len(sizes), longest, 8), 100.0)
    count = torch.zeros(len(sizes), longest, dtype=torch.int64)
    for head, size in enumerate(sizes):
        mean[head, :size] = torch.randn(size, 8, generator=rng)
        count[head, :size] = torch.randint(1, 40, (size,), generator=rng)
    found = [of_head.nonzero()[:, 0] for of_head in _chosen(query, mean, count, 0.4)[0].any(1)]
    for rows, means, counts, size, each in zip(query, mean, count, sizes, found, strict=True):
        assert set(each.tolist()) == (plain(rows, means[:size], counts[:size], 0.4) if size else set())


@pytest.mark.parametrize("sharpness", [0.03, 1.0, 8.0, 300.0])
def test_of_many_clusters_the_same_are_taken(sharpness: float, sorted_scores: list[int]) -> None:
    rng = torch.Generator().manual_seed(1)
    # Some of them equal, and weights down to zero.
    query, mean = sharpness * torch.randn(3, 8, generator=rng), torch.randn(1000, 8, generator=rng).repeat(3, 1)
    count = torch.randint(1, 40, (1000,), generator=rng).repeat(3)
    found = wicsum(query, mean, count, 0.6)
    assert set(found.tolist()) == plain(query, mean, count, 0.6)
    assert sum(sorted_scores) < 0.1 * 3 * 3000


@pytest.mark.parametrize("clusters", [10, 40])
def test_of_equal_scores_the_lower_numbers_are_taken(clusters: int) -> None:
    found = wicsum(torch.ones(2, 4), torch.ones(clusters, 4), torch.full((clusters,), 3), 0.3)
    # Running sums in parts of one: 0.3 is exceeded by the first more than three tenths.
    assert found.tolist() == list(range(int(0.3 * clusters) + 1))


def test_at_a_ratio_of_one_everything_is_retrieved() -> None:
    rng = torch.Generator().manual_seed(0)
    mean = 5 * torch.randn(100, 8, generator=rng)
    found = wicsum(torch.randn(2, 8, generator=rng), mean, torch.ones(100, dtype=torch.int64), 1.0)
    assert found.tolist() == list(range(100))


def test_a_sharp_question_sorts_few_scores(sorted_scores: list[int]) -> None:
    mean = torch.zeros(2000, 4)
    mean[700] = 30.0
    found = wicsum(torch.ones(1, 4), mean, torch.ones(2000, dtype=torch.int64))
    assert found.tolist() == [700]
    assert sorted_scores == [1]


@pytest.mark.parametrize("lowest", [-1e3, -1e6, -1e38])
def test_one_cluster_far_below_makes_no_bucket_wide(lowest: float, sorted_scores: list[int]) -> None:
    """It put all others into the highest, and all of them were sorted."""
    rng = torch.Generator().manual_seed(1)
    mean, count = torch.randn(3000, 1, generator=rng), torch.randint(1, 40, (3000,), generator=rng)
    mean[1234] = lowest
    found = wicsum(torch.ones(1, 1), mean, count, 0.6)
    assert set(found.tolist()) == plain(torch.ones(1, 1), mean, count, 0.6)
    assert 0 < sum(sorted_scores) < 0.1 * 3000


def test_scores_of_one_bucket_are_sorted_with_all_others(sorted_scores: list[int]) -> None:
    """Apart from them, sorting took up to four times as long."""
    mean, count = torch.zeros(3000, 1), torch.full((3000,), 3)
    assert wicsum(torch.ones(2, 1), mean, count).tolist() == list(range(901))
    assert sorted_scores == []


def test_a_question_that_is_no_number_leaves_the_others_theirs() -> None:
    """It was an error, of all cameras that were asked together."""
    rng = torch.Generator().manual_seed(1)
    query, mean = torch.randn(1, 3, 8, generator=rng), torch.randn(1, 3000, 8, generator=rng)
    query[0, 1, 4] = torch.nan
    chosen = _chosen(query, mean, torch.ones(1, 3000, dtype=torch.int64), 0.3)[0]
    for row in (0, 2):
        assert set(chosen[0, row].nonzero()[:, 0].tolist()) == plain(
            query[0, row : row + 1], mean[0], torch.ones(3000), 0.3
        )


def test_without_clusters_or_questions_nothing_is_retrieved() -> None:
    none = torch.zeros(0, 4)
    assert len(wicsum(torch.ones(1, 4), none, torch.zeros(0))) == 0
    assert len(wicsum(none, torch.ones(3, 4), torch.ones(3))) == 0


@given(seed=st.integers(0, 200), clusters=st.integers(1, 30), rows=st.integers(1, 3), most=st.integers(1, 120))
def test_of_more_tokens_than_it_reads_the_best_clusters_are_taken(
    seed: int, clusters: int, rows: int, most: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    table = ClusterTable(8)
    numbers = torch.cat([torch.arange(clusters), torch.randint(0, clusters, (6 * clusters,), generator=rng)])
    key = torch.randn(len(numbers), 8, generator=rng)
    table.add(NewTokens(key, key, torch.zeros(len(numbers)).long(), torch.zeros(len(numbers)).long()), numbers)
    # As a GPU computes it.
    query = torch.randn(rows, 8, generator=rng).bfloat16()
    # The rule by hand: the attention of all rows to one token, were each token's key its cluster's mean.
    best = (query.double() @ table.mean[table.of_token].double().T / math.sqrt(8)).softmax(1).sum(0)
    best = torch.stack([best[table.members(number)[0]] for number in range(clusters)]).tolist()
    wanted: list[int] = []
    for number in sorted(plain(query.float(), table.mean, table.count, 0.6), key=lambda n: -best[n]):
        if wanted and sum(int(table.count[n]) for n in [*wanted, number]) > most:
            break
        wanted.append(number)
    assert WiCSum(ratio=0.6, tokens=most).select(query, table).tolist() == sorted(wanted)
    assert WiCSum(ratio=1.0, tokens=most).select(query, table).tolist() == list(range(clusters))


def test_what_exceeds_the_limit_are_not_the_newest() -> None:
    """Each row's best cluster had the same score, that of its maximum, and the oldest of these were read."""
    table = ClusterTable(4)
    key = torch.cat([4.0 * torch.eye(4)[:2], 9.0 * torch.eye(4)[2:]])
    table.add(NewTokens(key, key, torch.zeros(4).long(), torch.zeros(4).long()), torch.arange(4))
    # Every row prefers another cluster; the newest two get nearly all attention of theirs.
    assert WiCSum(ratio=0.3, tokens=2).select(torch.eye(4), table).tolist() == [2, 3]


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 or more, not 0"):
        WiCSum(tokens=0)
