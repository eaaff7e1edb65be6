"""Tiers above each other: nothing wrong comes out, whatever is full, down, or dropped meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState
from cluster.memory.tiers.stack import TierStack

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
CELL = 256


class Distant(Arena):
    """An arena that can be cut off."""

    down = False

    def _refused(self, count: int) -> None:
        self._count("retries", count)

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        if self.down:
            self._refused(len(items))
            return [RETRY] * len(items)
        return super().store(items)

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        return [Loaded(RETRY)] * len(keys) if self.down else super().load(keys)

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        if self.down:
            self._refused(1)
            return None
        return super().drop(stream, keys)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        return RETRY if self.down else super().put_manifest(stream, manifest)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        return (RETRY, None) if self.down else super().manifest(stream)

    def state(self) -> TierState:
        state = super().state()
        state.up = state.up and not self.down
        return state


def key(number: int, stream: str = "yard") -> BlockKey:
    return BlockKey(stream, 0, 0, number)


def block(fill: float, count: int = 1) -> Block:
    kv = torch.full((count, 4), float(fill))
    return Block(kv, -kv, *torch.zeros(2, count, dtype=torch.int32))


def pair(upper_cells: int = 8, lower_cells: int = 64) -> tuple[TierStack, Arena, Distant]:
    """An upper tier of so many cells above a lowest one; 8 cells in a slab."""
    upper = Arena(8 * CELL * 4, slab_bytes=8 * CELL, stream_bytes=upper_cells * CELL, name="host")
    lowest = Distant(lower_cells * CELL, slab_bytes=8 * CELL, evicts=False, name="far")
    return TierStack([upper, lowest]), upper, lowest


def values(stack: TierStack, *keys: BlockKey) -> list[float | Outcome]:
    """What each block is full of, or why it did not come."""
    loaded = stack.load(keys)
    return [each.outcome if each.block is None else float(each.block.key[0, 0]) for each in loaded]


def test_what_the_upper_tier_gave_up_comes_from_below_and_stays() -> None:
    stack, upper, lowest = pair(upper_cells=2)
    stack.store([(key(n), block(n)) for n in range(4)])
    assert upper.lookup([key(n) for n in range(4)]) == [MISS, MISS, HIT, HIT]
    assert values(stack, key(3), key(0), key(9)) == [3.0, 0.0, MISS]
    assert upper.lookup([key(0), key(3)]) == [HIT, HIT]
    lowest.down = True
    assert values(stack, key(0), key(1)) == [0.0, RETRY]
    assert stack.usage("yard") == {"host": 2 * CELL, "far": 4 * CELL}
    assert list(stack.states()) == ["host", "far"]
    assert stack.capacity("yard") == 64 * CELL
    assert stack.counts["promoted"] == 1


def test_what_the_lowest_did_not_take_is_held_and_written_later() -> None:
    stack, upper, lowest = pair(upper_cells=4)
    stack.store([(key(0), block(0))])
    lowest.down = True
    stack.store([(key(1), block(1)), (key(0), block(10))])
    assert stack.dirty == 2
    assert stack.flush(8) == 0
    # The new copy is held above the old one, and promoted blocks cannot push it out.
    lowest.down = False
    stack.store([(key(n), block(n)) for n in range(20, 30)])
    assert values(stack, key(0), key(1), key(20)) == [10.0, 1.0, 20.0]
    assert lowest.lookup([key(1)]) == [MISS]
    assert stack.flush(1) == 1
    assert stack.dirty == 1
    assert stack.flush(8) == 1
    upper.drop("yard")
    assert values(stack, key(0), key(1)) == [10.0, 1.0]
    assert stack.counts["lost"] == 0


def test_beyond_what_may_be_held_the_oldest_is_lost_and_nothing_older_takes_its_place() -> None:
    stack, upper, lowest = pair(upper_cells=3)
    stack.store([(key(0), block(0)), (key(1, "gate"), block(5))])
    lowest.down = True
    stack.store([(key(0), block(10)), (key(2, "gate"), block(6))])
    stack.store([(key(n), block(n)) for n in range(1, 4)])
    assert stack.counts["lost"] == 1
    assert upper.nbytes("yard") == 3 * CELL
    lowest.down = False
    # Block 0 lies below as it was before it was replaced: that is not what was stored last.
    assert values(stack, key(0), key(1), key(2), key(3)) == [MISS, 1.0, 2.0, 3.0]
    assert stack.owed() == {"host": 0, "far": 1}
    assert stack.flush(9) == 4
    assert stack.owed() == {"host": 0, "far": 0}
    assert lowest.lookup([key(0), key(1), key(2, "gate")]) == [MISS, HIT, HIT]
    stack.store([(key(0), block(11))])
    assert values(stack, key(0)) == [11.0]


def test_one_stream_at_its_cap_does_not_hold_up_the_others() -> None:
    stack, _, lowest = pair()
    lowest.down = True
    stack.store([(key(n), block(n)) for n in range(4)] + [(key(0, "gate"), block(7))])
    lowest.down = False
    lowest.set_cap("yard", 2 * CELL)
    assert stack.flush(64) == 3
    assert stack.dirty == 2
    assert lowest.lookup([key(0, "gate")]) == [HIT]


def test_a_drop_is_done_in_every_tier_or_when_the_tier_is_back() -> None:
    stack, upper, lowest = pair()
    stack.store([(key(n, name), block(n)) for n in range(3) for name in ("yard", "gate", "lane")])
    assert stack.drop("yard", [key(0)]) == 1
    assert (upper.lookup([key(0)]), lowest.lookup([key(0)])) == ([MISS], [MISS])
    lowest.down = True
    stack.drop("yard", [key(1)])
    stack.drop("gate")
    lowest.down = False
    assert values(stack, key(1), key(2), key(0, "gate")) == [MISS, 2.0, MISS]
    assert lowest.lookup([key(1), key(0, "gate")]) == [HIT, HIT]
    stack.flush(64)
    assert lowest.lookup([key(1), key(0, "gate"), key(0, "lane")]) == [MISS, MISS, HIT]
    assert stack.owed() == {"host": 0, "far": 0}


def test_a_stream_that_comes_again_is_not_mixed_with_what_is_still_to_be_dropped() -> None:
    stack, _, lowest = pair()
    stack.store([(key(n), block(n)) for n in range(3)])
    assert stack.put_manifest("yard", b"old") is HIT
    lowest.down = True
    stack.drop("yard")
    stack.store([(key(0), block(10))])
    assert stack.put_manifest("yard", b"new") is HIT
    lowest.down = False
    assert values(stack, key(0), key(1)) == [10.0, MISS]
    assert stack.manifest("yard") == (HIT, b"new")
    stack.flush(64)
    assert lowest.lookup([key(0), key(1)]) == [HIT, MISS]
    assert lowest.manifest("yard") == (HIT, b"new")


def test_dropping_more_than_is_remembered_drops_the_stream() -> None:
    upper = Arena(64 * CELL, slab_bytes=8 * CELL, name="host")
    lowest = Distant(64 * CELL, slab_bytes=8 * CELL, evicts=False, name="far")
    stack = TierStack([upper, lowest], owed=4)
    stack.store([(key(n, name), block(n)) for n in range(8) for name in ("yard", "gate")])
    lowest.down = True
    stack.drop("gate", [key(0, "gate")])
    stack.drop("yard", [key(n) for n in range(5)])
    lowest.down = False
    stack.flush(64)
    assert lowest.nbytes("yard") == 0
    assert lowest.nbytes("gate") == 7 * CELL


def test_manifests_come_down_when_the_lowest_is_back() -> None:
    stack, _, lowest = pair()
    assert stack.manifest("yard") == (MISS, None)
    stack.put_manifest("yard", b"1")
    lowest.down = True
    assert stack.manifest("yard") == (RETRY, None)
    assert stack.put_manifest("yard", b"2") is HIT
    assert stack.manifest("yard") == (HIT, b"2")
    stack.flush(1)
    lowest.down = False
    assert stack.manifest("yard") == (HIT, b"2")
    stack.flush(1)
    assert lowest.manifest("yard") == (HIT, b"2")
    # A new process knows only what lies below.
    assert TierStack([Arena(8 * CELL, slab_bytes=8 * CELL), lowest]).manifest("yard") == (HIT, b"2")
    stack.drop("yard")
    assert stack.manifest("yard") == (MISS, None)


def test_what_the_lowest_can_never_hold_is_counted() -> None:
    stack, _, lowest = pair(upper_cells=32)
    lowest.set_cap("yard", 8 * CELL)
    stack.store([(key(1), block(1, count=2))])
    stack.store([(key(1), block(2, count=100))])
    assert stack.counts["refused"] == 1
    assert stack.dirty == 0
    assert lowest.lookup([key(1)]) == [MISS]
    assert values(stack, key(1)) == [2.0]


def test_one_tier_is_a_stack_too() -> None:
    lowest = Distant(64 * CELL, slab_bytes=8 * CELL, evicts=False)
    stack = TierStack([lowest])
    stack.store([(key(1), block(1))])
    assert values(stack, key(1), key(2)) == [1.0, MISS]
    lowest.down = True
    stack.store([(key(1), block(2)), (key(2), block(2))])
    assert stack.counts["lost"] == 2
    assert stack.put_manifest("yard", b"") is RETRY
    lowest.down = False
    assert values(stack, key(1), key(2)) == [MISS, MISS]
    assert stack.flush(8) == 0
    assert lowest.nbytes() == 0
    stack.close()
    assert not stack.states()["host"].up


@pytest.mark.parametrize("count", [0, 2])
def test_no_tiers_and_equal_names_are_refused(count: int) -> None:
    tiers: list[Tier] = [Arena(8 * CELL, slab_bytes=8 * CELL) for _ in range(count)]
    with pytest.raises(ConfigError, match="its own name"):
        TierStack(tiers)


class Gate(Distant):
    """Lets a load take its blocks and keeps it from returning until it is told to."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__(total_bytes, slab_bytes=8 * CELL, evicts=False, name="far")
        self.taken, self.go = threading.Event(), threading.Event()
        self.before_store: Callable[[], None] = lambda: None

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        self.before_store()
        return super().store(items)

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        found = super().load(keys)
        self.taken.set()
        assert self.go.wait(20)
        return found


@pytest.mark.parametrize("meanwhile", ["store", "drop", "drop all"])
def test_a_load_under_way_brings_nothing_back_that_was_replaced_or_dropped(meanwhile: str) -> None:
    upper, lowest = Arena(8 * CELL, slab_bytes=8 * CELL, stream_bytes=2 * CELL), Gate(64 * CELL)
    stack = TierStack([upper, lowest])
    stack.store([(key(n), block(n)) for n in range(4)])
    answer: list[Loaded] = []
    loading = threading.Thread(target=lambda: answer.extend(stack.load([key(0)])))
    loading.start()
    assert lowest.taken.wait(20)
    if meanwhile == "store":
        stack.store([(key(0), block(10)), (key(2), block(2)), (key(3), block(3))])
    else:
        stack.drop("yard", [key(0)] if meanwhile == "drop" else None)
    lowest.go.set()
    loading.join(20)
    # The load began before; a store may come after it, but a drop holds from when it returns.
    assert answer[0].outcome is (HIT if meanwhile == "store" else MISS)
    assert values(stack, key(0)) == [10.0 if meanwhile == "store" else MISS]


def test_a_load_that_began_during_a_store_does_not_put_the_old_block_back() -> None:
    upper, lowest = Arena(8 * CELL, slab_bytes=8 * CELL, stream_bytes=2 * CELL), Gate(64 * CELL)
    stack = TierStack([upper, lowest])
    stack.store([(key(n), block(n)) for n in range(4)])
    answer: list[Loaded] = []
    loading = threading.Thread(target=lambda: answer.extend(stack.load([key(0)])))

    def load_first() -> None:
        loading.start()
        assert lowest.taken.wait(20)

    lowest.before_store = load_first
    stack.store([(key(0), block(10))])
    lowest.go.set()
    loading.join(20)
    assert answer[0].outcome is HIT
    assert values(stack, key(0)) == [10.0]


STEPS = st.tuples(st.sampled_from("sssslllldDfmud"), st.integers(0, 1), st.integers(0, 7), st.integers(1, 40))


@given(st.lists(STEPS, max_size=60), st.booleans())
def test_whatever_happens_no_wrong_block_comes_out_and_no_cap_is_exceeded(
    steps: list[tuple[str, int, int, int]], trouble: bool
) -> None:
    stack, upper, lowest = pair(upper_cells=12, lower_cells=64)
    wanted: dict[BlockKey, float] = {}
    for turn, (what, stream, number, count) in enumerate(steps):
        name = key(number, "ab"[stream])
        if what == "s":
            stack.store([(name, block(turn, count))])
            wanted[name] = float(turn)
        elif what == "d":
            stack.drop(name.stream, [name])
            wanted.pop(name, None)
        elif what == "D":
            stack.drop(name.stream)
            wanted = {other: fill for other, fill in wanted.items() if other.stream != name.stream}
        elif what == "f":
            stack.flush(count)
        elif what in "mu" and trouble:
            lowest.down = what == "m"
        asked = [key(n, s) for s in "ab" for n in range(8)] if what == "l" else [name]
        for other, found in zip(asked, stack.load(asked), strict=True):
            if found.block is not None:
                assert found.block.key.eq(wanted[other]).all()
                assert found.block.value.eq(-wanted[other]).all()
        for tier in (upper, lowest):
            assert all(tier.nbytes(name) <= tier.cap(name) for name in "ab")
            assert tier.nbytes() <= tier.reserved <= tier._slabs.total_bytes
    lowest.down = False
    stack.flush(1000)
    if stack.counts["lost"] + stack.counts["refused"] + stack.dirty == 0:
        # Nothing was given up on the way, so everything is there; the upper tier alone could not hold it.
        upper.drop("a")
        upper.drop("b")
        assert values(stack, *wanted) == list(wanted.values())
