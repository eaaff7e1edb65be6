"""Clusters against a plain reading of the papers, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.memory.organise import ClusterTable, organisers
from cluster.memory.organise.resv import ReSV

WIDTH = 6


def stream(seed: int, chunks: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys around a few directions, in frames of these sizes."""
    rng = torch.Generator().manual_seed(seed)
    around = torch.randn(4, WIDTH, generator=rng)
    made = []
    for frame, size in enumerate(chunks):
        which = torch.randint(4, (size,), generator=rng)
        made.append((around[which] + 0.3 * torch.randn(size, WIDTH, generator=rng), torch.full((size,), frame)))
    return made


@pytest.mark.parametrize("name", organisers.names())
@given(seed=st.integers(0, 30), chunks=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_every_token_has_one_cluster_and_means_are_means(name: str, seed: int, chunks: list[int]) -> None:
    organiser = organisers.get(name)(WIDTH)
    made = stream(seed, chunks)
    for key, frame in made:
        organiser.add(key, frame)
    table, keys = organiser.table, torch.cat([key for key, _ in made])
    assert len(table.of_token) == len(keys)
    assert int(table.count.sum()) == len(keys)
    for cluster in range(len(table)):
        members = table.members(cluster)
        assert len(members) == int(table.count[cluster]) > 0
        torch.testing.assert_close(table.mean[cluster], keys[members].mean(0), atol=1e-5, rtol=1e-4)
    # Members lie together.
    ordered = table.of_token[table.order()]
    assert bool((ordered[1:] >= ordered[:-1]).all())


def plain_resv(organiser: ReSV, keys: torch.Tensor) -> list[int]:
    """The rule, one token after the other."""
    bits = [(organiser.hash(key[None])[0] > 0).tolist() for key in keys]
    founders: list[list[bool]] = []
    found = []
    for mine in bits:
        apart = [sum(a != b for a, b in zip(mine, theirs, strict=True)) for theirs in founders]
        if apart and min(apart) <= organiser.threshold:
            found.append(apart.index(min(apart)))
        else:
            founders.append(mine)
            found.append(len(founders) - 1)
    return found


@given(
    seed=st.integers(0, 60), chunks=st.lists(st.integers(0, 12), min_size=1, max_size=6), threshold=st.integers(0, 12)
)
def test_hash_clusters_do_not_depend_on_how_tokens_come(seed: int, chunks: list[int], threshold: int) -> None:
    organiser = ReSV(WIDTH, threshold=threshold)
    made = stream(seed, chunks)
    for key, frame in made:
        organiser.add(key, frame)
    assert organiser.table.of_token.tolist() == plain_resv(organiser, torch.cat([key for key, _ in made]))


def test_equal_keys_are_one_cluster_and_opposite_ones_are_two() -> None:
    organiser = ReSV(WIDTH)
    key = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    organiser.add(torch.cat([key, key, -key, 2 * key]), torch.zeros(4, dtype=torch.int64))
    assert organiser.table.of_token.tolist() == [0, 0, 1, 0]


def test_welford_by_hand() -> None:
    table = ClusterTable(1)
    table.add(torch.tensor([[2.0], [4.0], [10.0]]), torch.tensor([0, 0, 1]))
    table.add(torch.tensor([[9.0]]), torch.tensor([0]))
    assert table.mean.tolist() == [[5.0], [10.0]]
    assert table.count.tolist() == [3, 1]


def test_a_gap_in_the_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        ClusterTable(1).add(torch.zeros(1, 1), torch.tensor([1]))


@pytest.mark.parametrize("options", [{"bits": 0}, {"threshold": -1}])
def test_hashes_of_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="hash nothing"):
        ReSV(WIDTH, **options)
