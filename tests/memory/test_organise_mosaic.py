"""Mosaic's clusters by hand: who joins, what is split, and what is put off."""

import math

import pytest
import torch
from grouped_tokens import Everything, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.organise.mosaic import Mosaic, two_means

# One threshold for clusters of every size.
FLAT = {"tau_small": 0.1, "tau_large": 0.1}


def directions(*degrees: float) -> torch.Tensor:
    turned = torch.tensor(degrees) * math.pi / 180
    return torch.stack([turned.cos(), turned.sin()], dim=1)


def made(**options: float | bool) -> Everything:
    """With members offloaded."""
    return Everything(Mosaic(2, **{**FLAT, **options}), at_hand=False)


def test_the_first_tokens_are_divided_until_their_clusters_are_valid() -> None:
    everything = made()
    joined = everything.add(tokens(directions(0, 90, 5, 95, 180)))
    assert joined.tolist() == [joined[0], joined[1], joined[0], joined[1], joined[4]]
    assert len(set(joined.tolist())) == everything.organiser.founded == 3
    assert everything.organiser.groupings == 2


def test_a_token_joins_the_cluster_most_like_it_by_direction() -> None:
    everything = Everything(Mosaic(2, tau_small=0.45, tau_large=0.45))
    far, near = everything.add(tokens(torch.tensor([[5.0, 0.0], [0.0, 1.0]]))).tolist()
    assert far != near
    # At 30 degrees: nearer to the second as points go, more like the first.
    assert everything.add(tokens(directions(30), 1)).tolist() == [far]


def test_clusters_do_not_cross_partitions() -> None:
    everything = Everything(Mosaic(2, **FLAT))
    everything.add(tokens(directions(0)))
    assert everything.add(tokens(directions(0), 1, partition=1)).tolist() == [1]
    assert everything.add(tokens(directions(0), 2)).tolist() == [0]


def test_an_offloaded_cluster_is_marked_and_new_entries_stand_beside_it() -> None:
    everything = made()
    organiser = everything.organiser
    everything.add(tokens(directions(0, 2, 4)))
    # 5 degrees fits, 70 does not: variance over squared norm is then far above a tenth.
    assert everything.add(tokens(directions(70, 5), 1)).tolist() == [1, 2]
    assert organiser.pending.tolist() == [True, False, False]
    assert organiser.founded_for(0).tolist() == [1, 2]
    assert (organiser.deferred, organiser.splits, organiser.founded) == (1, 0, 3)
    everything.check()


def test_a_join_that_leaves_an_offloaded_cluster_valid_defers_no_split() -> None:
    everything = made()
    everything.add(tokens(directions(0, 2, 4)))
    assert everything.add(tokens(directions(5), 1)).tolist() == [1]
    assert everything.organiser.deferred == 0
    # Merged when it is loaded; nothing needs a split then.
    assert everything.split(0) is None
    assert everything.organiser.table.of_token.tolist() == [0, 0, 0, 0]
    assert everything.organiser.merged == 1
    assert not bool(everything.organiser.pending.any())
    everything.check()


def test_what_was_founded_beside_a_cluster_is_merged_before_it_is_divided() -> None:
    everything = made()
    everything.add(tokens(directions(-10, -8, -6, 25)))
    assert len(everything.organiser.table) == 1
    everything.add(tokens(directions(60), 1))
    # 25 degrees is more like 60 than like the others, which only a division of all five sees.
    assert everything.split(0) == 1
    assert everything.organiser.table.of_token.tolist() == [0, 0, 0, 1, 1]
    assert everything.organiser.table.uid.tolist() == [0, 2]
    assert everything.organiser.splits == 1
    everything.check()


def test_what_was_founded_for_one_that_is_merged_belongs_to_where_it_went() -> None:
    everything = made()
    everything.add(tokens(directions(0, 2)))
    everything.add(tokens(directions(60), 1))
    everything.add(tokens(directions(64), 2))
    organiser = everything.organiser
    assert organiser.founded_for(1).tolist() == [2]
    organiser.merge(0, torch.tensor([1]))
    assert organiser.founded_for(0).tolist() == [1]
    everything.check()


def test_a_cluster_at_hand_takes_all_and_is_split_at_once_and_again_while_it_must() -> None:
    everything = Everything(Mosaic(2, **FLAT))
    organiser = everything.organiser
    everything.add(tokens(directions(0, 2)))
    assert everything.add(tokens(directions(70, 72, 161, 163), 1)).tolist() == [0, 0, 0, 0]
    assert organiser.deferred == 0
    while bool(organiser.pending.any()):
        everything.split(int(organiser.pending.nonzero()[0]))
    of_token = organiser.table.of_token
    assert of_token[::2].tolist() == of_token[1::2].tolist()
    assert len(organiser.table) == 3
    assert organiser.splits == 2


def test_the_part_with_the_oldest_member_keeps_number_and_uid() -> None:
    everything = Everything(Mosaic(2, **FLAT))
    everything.add(tokens(directions(0)))
    # More numerous, but younger.
    everything.add(tokens(directions(80, 81, 82), 1))
    assert everything.split(0) == 1
    assert everything.organiser.table.of_token.tolist() == [0, 1, 1, 1]


def test_what_is_never_put_off_needs_its_members() -> None:
    everything = made(defer=False)
    everything.add(tokens(directions(0)))
    with pytest.raises(ValueError, match="its members are not loaded"):
        everything.add(tokens(directions(90), 1))


def test_a_mark_outlives_compression_and_whom_a_cluster_was_founded_for_is_not_mistaken() -> None:
    everything = made()
    everything.add(tokens(directions(180)))
    everything.add(tokens(directions(0, 2), 1, partition=1))
    everything.add(tokens(directions(70), 2, partition=1))
    everything.keep(torch.tensor([1, 3]))
    assert everything.organiser.pending.tolist() == [True, False]
    # Merged and divided again.
    assert everything.split(0) == 1
    assert everything.organiser.pending.tolist() == [False, False]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 200),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    small=st.floats(0.0, 0.5),
    large=st.floats(0.0, 0.5),
)
def test_no_cluster_is_invalid_unless_it_is_one_token_or_marked(
    seed: int, sizes: list[int], small: float, large: float
) -> None:
    organiser = Mosaic(3, tau_small=small, tau_large=large, kappa=4)
    everything = Everything(organiser, at_hand=False)
    rng = torch.Generator().manual_seed(seed)
    for frame, size in enumerate(sizes):
        everything.add(tokens(torch.randn(size, 3, generator=rng), frame))
        for cluster in range(len(organiser.table)):
            key = everything.key[organiser.table.members(cluster)]
            share = float((key - key.mean(0)).square().sum() / key.square().sum())
            tau = large - (large - small) * math.exp(-len(key) / 4)
            assert share <= tau + 1e-5


@pytest.mark.parametrize("options", [{"tau_small": -0.1}, {"tau_large": 1.5}, {"kappa": 0}])
def test_thresholds_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="thresholds are shares"):
        Mosaic(2, **options)


def divide(points: torch.Tensor, weight: torch.Tensor | None = None) -> list[bool]:
    weight = torch.ones(len(points)) if weight is None else weight
    side: list[bool] = two_means(points, weight, torch.zeros(len(points), dtype=torch.int64), 1).tolist()
    return side


def test_two_means_by_hand() -> None:
    assert divide(directions(0, 100, 3, 90)) == [False, True, False, True]


def test_a_heavy_point_draws_its_parts_centre() -> None:
    # With all the weight at 0 the first part's centre stays there, and 40 leaves it.
    points = directions(0, 90, 40, 55)
    assert divide(points) == [False, True, False, True]
    assert divide(points, torch.tensor([50.0, 1.0, 1.0, 1.0])) == [False, True, True, True]


def test_one_direction_cannot_be_divided() -> None:
    assert divide(torch.tensor([[1.0, 0.0], [3.0, 0.0]])) == [False, False]
    assert divide(torch.ones(1, 2)) == [False]


@given(seed=st.integers(0, 300), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_groups_are_divided_as_each_would_be_alone_by_direction(seed: int, sizes: list[int]) -> None:
    rng = torch.Generator().manual_seed(seed)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    group = group[torch.randperm(len(group), generator=rng)]
    points = torch.randn(len(group), 3, generator=rng)
    side = two_means(points, torch.ones(len(group)), group, len(sizes))
    for number, size in enumerate(sizes):
        mine, of = points[group == number], side[group == number]
        assert of.tolist() == divide(mine)
        if size == 1:
            continue
        assert not bool(of[0])
        assert bool(of.any())
        unit = torch.nn.functional.normalize(mine, dim=1)
        first, second = (torch.nn.functional.normalize(unit[part].sum(0), dim=0) for part in (~of, of))
        assert ((unit @ second > unit @ first) == of).tolist() == [True] * size
