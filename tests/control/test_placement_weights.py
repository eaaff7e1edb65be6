"""Placement of keys that weigh unequally: bounded, sticky, and quick to even out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.control.placement import SLACK, Placement

MEMBERS = [f"replica-{i}" for i in range(5)]
KEYS = [f"camera-{i}" for i in range(30)]


class WeightedMachine(RuleBasedStateMachine):
    """Any order of calls; the model is a dictionary of weights and sets of members."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Placement()
        self.weights: dict[str, float] = {}
        self.members: set[str] = set()
        self.drained: set[str] = set()
        self.uneven = False

    def owners(self) -> dict[str, str | None]:
        return {key: self.table.owner(key) for key in self.weights}

    def check(self, before: dict[str, str | None], moved: dict[str, str | None]) -> None:
        after = self.owners()
        assert {key for key in after if key in before and before[key] != after[key]} <= set(moved)
        assert all(after[key] == owner for key, owner in moved.items())

    @rule(key=st.sampled_from(KEYS), weight=st.floats(0, 10))
    def add(self, key: str, weight: float) -> None:
        if key in self.weights:
            return
        before = self.owners()
        self.table.add(key, weight=weight)
        self.weights[key] = weight
        self.check(before, {})

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        if key not in self.weights:
            return
        before = self.owners()
        del self.weights[key]
        self.check({key: before[key] for key in self.weights}, self.table.remove(key))

    @rule(key=st.sampled_from(KEYS), weight=st.floats(0, 10))
    def weigh(self, key: str, weight: float) -> None:
        if key in self.weights:
            before = self.owners()
            self.table.set_weight(key, weight)
            self.weights[key], self.uneven = weight, True
            self.check(before, {})

    @rule(member=st.sampled_from(MEMBERS))
    def join(self, member: str) -> None:
        before = self.owners()
        self.check(before, self.table.join(member))
        self.members.add(member)
        self.drained.discard(member)

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        if member not in self.members:
            return
        before = self.owners()
        moved = self.table.leave(member)
        self.members.discard(member)
        self.drained.discard(member)
        if self.drained == self.members:
            self.drained.clear()
        self.check(before, moved)
        assert set(moved) == {key for key, owner in before.items() if owner == member}

    @rule(member=st.sampled_from(MEMBERS))
    def drain(self, member: str) -> None:
        if member not in self.members:
            return
        before = self.owners()
        moved = self.table.drain(member)
        if self.members - self.drained - {member}:
            self.drained.add(member)
            assert not self.table.keys(member)
        else:
            assert not moved, "nobody else would have taken them"
        self.check(before, moved)

    @invariant()
    def consistent(self) -> None:
        assert set(self.table.members) == self.members
        for member in self.members:
            owned = self.table.keys(member)
            assert owned == {key for key in self.weights if self.table.owner(key) == member}
            assert self.table.load(member) == pytest.approx(sum(self.weights[key] for key in owned), abs=1e-6)
        homeless = [key for key in self.weights if self.table.owner(key) is None]
        assert not homeless or not self.members

    @invariant()
    def bounded(self) -> None:
        """Nobody is above the bound by a whole key, unless weights changed."""
        active = self.members - self.drained
        if self.uneven or not active:
            return
        mean = sum(self.weights.values()) / len(active)
        for member in active:
            heaviest = max((self.weights[key] for key in self.table.keys(member)), default=0.0)
            assert self.table.load(member) <= (1 + SLACK) * mean + heaviest + 1e-6


TestWeightedMachine = WeightedMachine.TestCase
TestWeightedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def table_of(members: int, weights: list[float]) -> Placement:
    table = Placement()
    for number in range(members):
        table.join(f"m{number}")
    for number, weight in enumerate(weights):
        table.add(f"k{number}", weight=weight)
    return table


@given(st.lists(st.floats(0.1, 3), min_size=200, max_size=300))
@settings(deadline=None, max_examples=15)
def test_many_unequal_keys_lie_evenly(weights) -> None:
    table = table_of(4, weights)
    mean = sum(weights) / 4
    assert table.max_over_mean <= 1.05 + 3 / mean
    moved = table.leave("m0")
    assert table.max_over_mean <= 1.05 + 3 / (sum(weights) / 3)
    assert "m0" not in moved.values()
