"""Placement keeps its bound, moves as little as it may, and is the same in every process."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.control.placement import Placement

MEMBERS = [f"replica-{i}" for i in range(5)]
KEYS = [f"camera-{i}" for i in range(40)]


def bound(keys: int, members: int) -> int:
    return math.ceil(1.25 * keys / members) if members else 0


def share(keys: int, members: int) -> int:
    return max(math.ceil(keys / members), math.floor(1.05 * (keys / members)))


class PlacementMachine(RuleBasedStateMachine):
    """Any order of joins, leaves, adds and removes; the model is the set of keys and members."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Placement()
        self.members: set[str] = set()
        self.keys: set[str] = set()

    def owners(self) -> dict[str, str | None]:
        return {key: self.table.owner(key) for key in self.keys}

    def check_report(self, before: dict[str, str | None], moved: dict[str, str | None]) -> None:
        after = self.owners()
        really = {key for key in after if key in before and before[key] != after[key]}
        assert really <= set(moved)
        assert all(after[key] == owner for key, owner in moved.items())

    @rule(key=st.sampled_from(KEYS))
    def add(self, key: str) -> None:
        if key in self.keys:
            return
        before = self.owners()
        owner = self.table.add(key)
        self.keys.add(key)
        assert (owner is None) == (not self.members)
        assert {k: v for k, v in self.owners().items() if k in before} == before, "adding a key moved another"

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        if key not in self.keys:
            return
        before = self.owners()
        full = bound(len(self.keys), len(self.members))
        moved = self.table.remove(key)
        self.keys.discard(key)
        self.check_report(before, moved)
        assert self.table.owner(key) is None
        for k in moved:
            assert sum(1 for owner in before.values() if owner == before[k]) == full, "moved off a member with room"

    @rule(member=st.sampled_from(MEMBERS))
    def join(self, member: str) -> None:
        before, is_new = self.owners(), member not in self.members
        moved = self.table.join(member)
        self.members.add(member)
        self.check_report(before, moved)
        if not is_new:
            assert not moved
        excess = sum(
            max(0, sum(1 for owner in before.values() if owner == other) - share(len(self.keys), len(self.members)))
            for other in self.members - {member}
        )
        homeless = sum(1 for owner in before.values() if owner is None)
        assert len(moved) <= excess + homeless, "more moved than the bound asks for"

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        if member not in self.members:
            return
        before = self.owners()
        moved = self.table.leave(member)
        self.members.discard(member)
        self.check_report(before, moved)
        assert set(moved) == {key for key, owner in before.items() if owner == member}

    @invariant()
    def bounded_and_consistent(self) -> None:
        assert set(self.table.members) == self.members
        limit = bound(len(self.keys), len(self.members))
        for member in self.members:
            owned = self.table.keys(member)
            assert len(owned) <= limit
            assert owned == {key for key in self.keys if self.table.owner(key) == member}
        if self.members:
            assert all(self.table.owner(key) in self.members for key in self.keys)


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=60), st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_rebuilding_in_the_same_order_gives_the_same_table(keys: list[str], members: int) -> None:
    def build() -> dict[str, str | None]:
        table = Placement()
        for i in range(members):
            table.join(f"m{i}")
        return {key: table.add(key) for key in keys}

    assert build() == build()


def test_a_member_that_leaves_and_returns_gets_its_share_back() -> None:
    table = Placement()
    table.join("a"), table.join("b")
    for key in KEYS[:8]:
        table.add(key)
    table.leave("b")
    assert table.keys("a") == set(KEYS[:8])
    moved = table.join("b")
    assert len(moved) == 8 - 4
    assert set(moved.values()) == {"b"}


@pytest.mark.parametrize("members_first", [True, False])
@pytest.mark.parametrize(("members", "keys"), [(2, 2), (2, 4), (4, 4), (3, 6)])
def test_few_cameras_are_spread_evenly(members: int, keys: int, members_first: bool) -> None:
    table = Placement()
    joining = [lambda m=m: table.join(f"decoder-{m}") for m in range(members)]
    adding = [lambda key=key: table.add(key) for key in KEYS[:keys]]
    for step in joining + adding if members_first else adding + joining:
        step()
    assert {len(table.keys(member)) for member in table.members} == {keys // members}


def test_large_fleet_is_spread_evenly() -> None:
    """New keys go to members within 5 % of the mean, whatever load makes placed ones move."""
    table = Placement()
    for i in range(20):
        table.join(f"replica-{i}")
    for i in range(2000):
        table.add(f"camera-{i}")
    loads = [len(table.keys(member)) for member in table.members]
    assert max(loads) <= 105
    assert min(loads) >= 70


def test_a_known_ownership_is_taken_over_and_never_stolen() -> None:
    table = Placement()
    table.join("a"), table.join("b")
    for key in KEYS[:4]:
        assert table.add(key, prefer="b") == "b", "the bound does not undo what runs already"
    assert table.add(KEYS[4], prefer="nobody") == "a"


def test_no_members_keeps_keys_homeless_until_one_joins() -> None:
    table = Placement()
    assert table.add("camera") is None
    assert table.join("a") == {"camera": "a"}
    assert table.leave("a") == {"camera": None}
