"""Clusters against a plain reading of the papers, token by token."""

import pytest
import torch
from grouped_tokens import Everything, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.organise import ClusterTable, NewTokens
from cluster.memory.organise.resv import ReSV
from cluster.registry import organisers

WIDTH = 6


def stream(seed: int, frames: list[int]) -> list[NewTokens]:
    """Keys around a few directions, in frames of these sizes."""
    rng = torch.Generator().manual_seed(seed)
    around = torch.randn(4, WIDTH, generator=rng)
    made = []
    for frame, size in enumerate(frames):
        which = torch.randint(4, (size,), generator=rng)
        key = around[which] + 0.3 * torch.randn(size, WIDTH, generator=rng)
        made.append(tokens(key, frame, value=torch.randn(size, WIDTH, generator=rng), partition=frame % 2))
    return made


@pytest.mark.parametrize("name", organisers.names())
@settings(max_examples=25)
@given(seed=st.integers(0, 300), frames=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_statistics_are_those_of_the_members_whatever_happens(
    name: str, seed: int, frames: list[int], data: st.DataObject
) -> None:
    options = {"tau_small": 0.02, "tau_large": 0.05} if name == "mosaic" else {}
    everything = Everything(organisers.get(name)(WIDTH, **options), at_hand=data.draw(st.booleans()))
    organiser = everything.organiser
    used: set[int] = set()
    for new in stream(seed, frames):
        before = organiser.table.uid.tolist()
        joined = everything.add(new)
        everything.check()
        assert joined.tolist() == organiser.table.of_token[len(everything.key) - len(new) :].tolist()
        assert not used & (set(organiser.table.uid.tolist()) - set(before))
        used |= set(organiser.table.uid.tolist())
        for cluster in organiser.pending.nonzero()[:, 0].tolist():
            number = everything.split(cluster)
            assert number in (None, len(organiser.table) - 1)
            everything.check()
        used |= set(organiser.table.uid.tolist())
        if len(everything.key) and data.draw(st.booleans()):
            there = len(everything.key)
            kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, there - 1)))), dtype=torch.int64)
            held = dict(zip(organiser.table.uid.tolist(), organiser.table.count.tolist(), strict=True))
            touched = everything.keep(kept)
            everything.check()
            left = zip(organiser.table.uid.tolist(), organiser.table.count.tolist(), strict=True)
            assert touched.tolist() == [count < held[uid] for uid, count in left]


@pytest.mark.parametrize("name", organisers.names())
def test_one_that_was_restored_goes_on_as_before(name: str) -> None:
    made = stream(3, [9] * 6)
    one = Everything(organisers.get(name)(WIDTH))
    for new in made[:3]:
        one.add(new)
    one.keep(torch.arange(2, len(one.key), 2))
    other = Everything(organisers.get(name)(WIDTH))
    other.organiser.table = ClusterTable.restore(one.organiser.table.state())
    other.organiser.load_state(one.organiser.state())
    for field in ("key", "value", "frame"):
        setattr(other, field, getattr(one, field))
    for new in made[3:]:
        one.add(new)
        other.add(new)
    assert_same_state(one.organiser.table.state(), other.organiser.table.state())
    assert_same_state(one.organiser.state(), other.organiser.state())


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def plain_resv(organiser: ReSV, keys: torch.Tensor) -> list[int]:
    """The rule, one token after the other, while no cluster is full."""
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
    seed=st.integers(0, 60), frames=st.lists(st.integers(0, 12), min_size=1, max_size=6), threshold=st.integers(0, 12)
)
def test_hash_clusters_do_not_depend_on_how_tokens_come(seed: int, frames: list[int], threshold: int) -> None:
    everything = Everything(organiser := ReSV(WIDTH, threshold=threshold))
    for new in stream(seed, frames):
        everything.add(new)
    assert organiser.table.of_token.tolist() == plain_resv(organiser, everything.key)


@given(
    seed=st.integers(0, 60),
    frames=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    threshold=st.integers(0, 16),
    most=st.integers(1, 5),
)
def test_a_hash_cluster_takes_so_many_tokens_and_the_next_founds_another(
    seed: int, frames: list[int], threshold: int, most: int
) -> None:
    """One token after the other: of the clusters that had room when its frame came, the nearest within the threshold,
    or one founded since, as if none became full; what is too much for it founds others, filled in turn."""
    everything = Everything(organiser := ReSV(WIDTH, threshold=threshold, tokens=most))
    founders: list[torch.Tensor] = []
    wanted: list[int] = []
    for new in stream(seed, frames):
        everything.add(new)
        bits = organiser.hash(new.key) > 0
        open_ones = [n for n in range(len(founders)) if wanted.count(n) < most]
        joined: list[int] = []
        for mine in bits:
            apart = {n: int((mine != founders[n]).sum()) for n in open_ones}
            nearest = min(apart, key=lambda n: apart[n], default=-1)
            if nearest < 0 or apart[nearest] > threshold:
                nearest = len(founders)
                founders.append(mine)
                open_ones.append(nearest)
            joined.append(nearest)
        before, room = len(founders), {n: most - wanted.count(n) for n in set(joined)}
        for number in sorted(room):
            members = [at for at, n in enumerate(joined) if n == number]
            for first in range(room[number], len(members), most):
                for at in members[first : first + most]:
                    joined[at] = len(founders)
                founders.append(bits[members[first]])
        assert len(founders) - before == sum(n >= before for n in set(joined))
        wanted += joined
    assert organiser.table.of_token.tolist() == wanted
    assert not len(organiser.table) or int(organiser.table.count.max()) <= most


def test_a_key_on_a_hyperplane_is_not_above_it() -> None:
    """V-Rex, section IV-B: "values less than or equal to zero are set to 0"."""
    hashed = ReSV(4).hash(torch.stack([torch.zeros(4), torch.ones(4)]))
    assert set(hashed[0].tolist()) == {-1.0}
    assert set(hashed[1].tolist()) == {-1.0, 1.0}


def test_equal_keys_are_one_cluster_and_opposite_ones_are_two() -> None:
    organiser = ReSV(WIDTH)
    key = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    joined = organiser.add(tokens(torch.cat([key, key, -key, 2 * key])), lambda _: None)
    assert joined.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("name", ["resv", "kvmu"])
def test_what_all_keys_of_a_head_share_changes_no_cluster(name: str) -> None:
    """Adding a vector to all keys changes no softmax over them (MagicPIG, arXiv 2410.16179, centres keys for its hashes
    for this reason). All sums here are exact in float32, and so is the mean of 512 keys."""
    rng = torch.Generator().manual_seed(0)
    around = torch.randn(40, 128, generator=rng)
    key = around[torch.randint(40, (1024,), generator=rng)] + 0.3 * torch.randn(1024, 128, generator=rng)
    key = (key * 64).round() / 64
    shared = 64.0 * (torch.arange(128) % 16 == 3)
    plain, moved = (organisers.get(name)(128, centred=True) for _ in range(2))
    for at in (0, 512):
        for organiser, keys in ((plain, key), (moved, key + shared)):
            organiser.add(tokens(keys[at : at + 512], at), lambda clusters: clusters >= 0)
    assert torch.equal(moved.table.of_token, plain.table.of_token)
    assert len(plain.table) >= 40


def test_a_cluster_keeps_its_founders_hash_when_those_before_it_go() -> None:
    everything = Everything(organiser := ReSV(WIDTH))
    key = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    everything.add(tokens(torch.cat([key, -key])))
    everything.keep(torch.tensor([1]))
    assert everything.add(tokens(torch.cat([-key, key]), 1)).tolist() == [0, 1]
    assert organiser.table.uid.tolist() == [1, 2]


def test_a_frame_that_comes_in_two_calls_is_one_cluster() -> None:
    everything = Everything(organisers.get("frames")(WIDTH))
    assert everything.add(tokens(torch.randn(2, WIDTH), 4)).tolist() == [0, 0]
    assert everything.add(tokens(torch.randn(1, WIDTH), 4)).tolist() == [0]
    assert everything.add(tokens(torch.randn(1, WIDTH), 5)).tolist() == [1]


def test_every_token_is_its_own_cluster() -> None:
    everything = Everything(organisers.get("tokens")(WIDTH))
    everything.add(tokens(torch.ones(3, WIDTH)))
    everything.keep(torch.tensor([0, 2]))
    assert everything.add(tokens(torch.ones(2, WIDTH), 1)).tolist() == [2, 3]
    assert organisers.get("tokens")(WIDTH).pending.tolist() == []


@pytest.mark.parametrize("options", [{"bits": 0}, {"threshold": -1}, {"tokens": 0}])
def test_hashes_of_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="bits and tokens must be at least 1 and threshold not negative"):
        ReSV(WIDTH, **options)
