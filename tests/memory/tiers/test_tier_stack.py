"""Tiers above each other: nothing wrong comes out, whatever is full, down, or dropped meanwhile."""

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from kv_parts import drop_everywhere

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
    assert stack.lowest.limit == 64 * CELL
    assert stack.counts["promoted"] == 1


def test_what_the_lowest_did_not_take_is_said_and_copied_nowhere() -> None:
    stack, upper, lowest = pair(upper_cells=4)
    lowest.down = True
    assert stack.store([(key(1), block(1))]) == [RETRY]
    assert upper.lookup([key(1)]) == [MISS]
    lowest.down = False
    assert stack.store([(key(1), block(1))]) == [HIT]
    assert stack.store([(key(2), block(2))], copies=False) == [HIT]
    assert upper.lookup([key(1), key(2)]) == [HIT, MISS]
    assert values(stack, key(1), key(2)) == [1.0, 2.0]
    lowest.set_cap("yard", 8 * CELL)
    assert stack.store([(key(3), block(3, count=100))]) == [MISS]
    assert stack.counts["refused"] == 1
    assert stack.counts["stored"] == 2


def test_blocks_are_deleted_for_certain_or_asked_for_again() -> None:
    stack, upper, lowest = pair()
    stack.store([(key(n), block(n)) for n in range(3)])
    assert drop_everywhere(stack, "yard", [key(0)]) == 1
    assert (upper.lookup([key(0)]), lowest.lookup([key(0)])) == ([MISS], [MISS])
    lowest.down = True
    assert drop_everywhere(stack, "yard", [key(1)]) is None
    assert stack.deleting == frozenset()
    lowest.down = False
    assert drop_everywhere(stack, "yard", [key(1)]) == 1


def test_a_stream_is_being_deleted_until_every_tier_has_done_it() -> None:
    stack, _, lowest = pair()
    stack.store([(key(n, name), block(n)) for n in range(3) for name in ("yard", "gate")])
    assert stack.put_manifest("gate", b"old") is HIT
    lowest.down = True
    assert stack.drop("gate") is None
    assert stack.deleting == {"gate"}
    lowest.down = False
    # Nothing of it is given out, though it is still there, and nothing of a camera that was added under its name is
    # written before it is gone.
    assert lowest.lookup([key(1, "gate")]) == [HIT]
    assert values(stack, key(1, "gate"), key(1)) == [MISS, 1.0]
    lowest.down = True
    assert stack.store([(key(7, "gate"), block(7))]) == [RETRY]
    assert stack.manifest("gate") == (RETRY, None)
    assert stack.put_manifest("gate", b"new") is RETRY
    stack.finish_deletions()
    assert stack.deleting == {"gate"}
    lowest.down = False
    assert stack.store([(key(7, "gate"), block(7)), (key(8), block(8))]) == [HIT, HIT]
    assert stack.deleting == frozenset()
    assert stack.manifest("gate") == (MISS, None)
    assert values(stack, key(0, "gate"), key(7, "gate"), key(2)) == [MISS, 7.0, 2.0]
    stack.finish_deletions()
    assert values(stack, key(7, "gate")) == [7.0]


def test_copies_of_a_stream_that_left_are_deleted_in_every_tier_above_the_lowest() -> None:
    node = Distant(64 * CELL, name="node")
    stack = TierStack([Arena(64 * CELL, name="host"), node, Arena(64 * CELL, name="lowest", evicts=False)])
    stack.store([(key(1), block(1)), (key(2, "gate"), block(2))])
    node.down = True
    stack.drop_copies("yard")
    node.down = False
    assert stack.usage("yard") == {"host": 0, "node": CELL, "lowest": CELL}
    assert stack.deleting == {"yard"}
    stack.finish_deletions()
    assert stack.usage("yard") == {"host": 0, "node": 0, "lowest": CELL}
    assert values(stack, key(1), key(2, "gate")) == [1.0, 2.0]
    stack.drop_copies("gate")
    assert stack.usage("gate") == {"host": 0, "node": 0, "lowest": CELL}
    assert stack.deleting == frozenset()


def test_a_hit_means_that_the_lowest_tier_has_it() -> None:
    stack, _, lowest = pair()
    assert stack.shared
    assert stack.manifest("yard") == (MISS, None)
    assert stack.put_manifest("yard", b"1") is HIT
    lowest.down = True
    assert stack.manifest("yard") == (RETRY, None)
    assert stack.put_manifest("yard", b"2") is RETRY
    lowest.down = False
    assert stack.manifest("yard") == lowest.manifest("yard") == (HIT, b"1")


def test_one_tier_is_a_stack_too() -> None:
    lowest = Distant(64 * CELL, slab_bytes=8 * CELL, evicts=False)
    stack = TierStack([lowest])
    assert not stack.shared
    stack.store([(key(1), block(1))])
    assert values(stack, key(1), key(2)) == [1.0, MISS]
    lowest.down = True
    assert stack.put_manifest("yard", b"") is RETRY
    lowest.down = False
    stack.close()
    assert not stack.states()["host"].up


@pytest.mark.parametrize("count", [0, 2])
def test_no_tiers_and_equal_names_are_refused(count: int) -> None:
    tiers: list[Tier] = [Arena(8 * CELL, slab_bytes=8 * CELL) for _ in range(count)]
    with pytest.raises(ConfigError, match="its own name"):
        TierStack(tiers)


def test_a_load_asks_no_tier_to_delete_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, upper, lower = pair()
    stack.store([(key(0), block(0)), (key(1, "gate"), block(1))])
    upper.drop("yard")
    dropped: list[Sequence[BlockKey] | None] = []
    load, drop = lower.load, upper.drop

    def meanwhile(keys: Sequence[BlockKey]) -> list[Loaded]:
        stack.drop_blocks(1, "gate", [key(1, "gate")])
        return load(keys)

    def noted(stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        dropped.append(keys)
        return drop(stream, keys)

    monkeypatch.setattr(lower, "load", meanwhile)
    monkeypatch.setattr(upper, "drop", noted)
    assert values(stack, key(0)) == [0.0]
    assert dropped == []


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


@pytest.mark.parametrize("meanwhile", ["drop", "drop all"])
def test_a_load_under_way_brings_nothing_back_that_was_deleted(meanwhile: str) -> None:
    upper, lowest = Arena(8 * CELL, slab_bytes=8 * CELL, stream_bytes=2 * CELL), Gate(64 * CELL)
    stack = TierStack([upper, lowest])
    stack.store([(key(n), block(n)) for n in range(4)])
    answer: list[Loaded] = []
    loading = threading.Thread(target=lambda: answer.extend(stack.load([key(0)])))
    loading.start()
    assert lowest.taken.wait(20)
    if meanwhile == "drop":
        drop_everywhere(stack, "yard", [key(0)])
    else:
        stack.drop("yard")
    lowest.go.set()
    loading.join(20)
    assert answer[0].outcome is MISS
    assert upper.lookup([key(0)]) == [MISS]


@pytest.mark.parametrize(("delete", "moment"), [(TierStack.drop, 0), (TierStack.drop, 1), (TierStack.drop_copies, 0)])
def test_a_load_that_begins_within_a_deletion_leaves_no_copy(
    monkeypatch: pytest.MonkeyPatch, delete: Callable[[TierStack, str], object], moment: int
) -> None:
    began: list[threading.Thread] = []
    releases = itertools.count()

    class Lock:
        """Lets a load begin once the deletion has released a lock for the ``moment``-th time."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if deleting and threading.current_thread() is threading.main_thread() and next(releases) == moment:
                began.append(threading.Thread(target=lambda: stack.load([key(0)])))
                began[0].start()
                while began[0].is_alive() and not lowest.taken.wait(0.01):
                    pass

    monkeypatch.setattr("cluster.memory.tiers.stack.threading", SimpleNamespace(Lock=Lock))
    deleting = False
    upper, lowest = Arena(8 * CELL, slab_bytes=8 * CELL, stream_bytes=2 * CELL), Gate(64 * CELL)
    stack = TierStack([upper, lowest])
    stack.store([(key(n), block(n)) for n in range(4)])
    deleting = True
    delete(stack, "yard")
    lowest.go.set()
    began[0].join(20)
    assert upper.lookup([key(0)]) == [MISS]


def test_a_slow_write_of_one_stream_holds_up_nothing_of_another() -> None:
    upper, middle, lowest = (
        Arena(8 * CELL, slab_bytes=8 * CELL),
        Gate(64 * CELL),
        Distant(64 * CELL, slab_bytes=8 * CELL),
    )
    middle.name, lowest.name = "node", "redis"
    stack = TierStack([upper, middle, lowest])
    stack.store([(key(1), block(1))])
    began, end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert end.wait(20)

    middle.before_store = wait
    writing = threading.Thread(target=lambda: stack.store([(key(1, "gate"), block(2))]))
    writing.start()
    assert began.wait(20)
    middle.before_store = lambda: None
    assert values(stack, key(1)) == [1.0]
    assert stack.store([(key(2), block(3))]) == [HIT]
    assert drop_everywhere(stack, "yard", [key(2)]) == 1
    end.set()
    writing.join(20)
    assert lowest.lookup([key(1, "gate")]) == [HIT]
