"""The same blocks with a prediction and without, and a true account of what it was good for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.memory.prefetch import FetchEvent, Prefetcher
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome

WAIT_S = 5.0


def key(cluster: int, layer: int = 1) -> BlockKey:
    return BlockKey("gate", layer, 0, cluster)


def keys(*clusters: int, layer: int = 1) -> list[BlockKey]:
    return [key(cluster, layer) for cluster in clusters]


def block(of: BlockKey, tokens: int = 2) -> Block:
    number = torch.full((tokens,), of.block, dtype=torch.int32)
    return Block(torch.full((tokens, 4), float(of.layer)), torch.full((tokens, 4), float(of.block)), number, number)


class Store:
    """Holds every block; ``gate`` closed, its loads wait for it to open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[list[BlockKey]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.first_answers: dict[BlockKey, Outcome] = {}

    def load(self, wanted: Sequence[BlockKey]) -> list[Loaded]:
        with self.lock:
            self.calls.append(list(wanted))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.gate.wait(WAIT_S)
        with self.lock:
            self.at_once -= 1
            return [
                Loaded(self.first_answers.pop(one)) if one in self.first_answers else Loaded(Outcome.HIT, block(one))
                for one in wanted
            ]

    def asked(self) -> list[BlockKey]:
        with self.lock:
            return sorted(one for call in self.calls for one in call)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def clusters(loaded: list[Loaded]) -> list[int]:
    assert all(one.outcome is Outcome.HIT and one.block is not None for one in loaded)
    return [int(one.block.frame[0]) for one in loaded if one.block is not None]


numbers = st.lists(st.integers(0, 9), max_size=8)


@settings(max_examples=40, deadline=None)
@given(question=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5))
def test_what_is_taken_never_depends_on_what_was_predicted(question: list[tuple[list[int], list[int]]]) -> None:
    store = Store()
    with Prefetcher(store.load) as fetcher:
        wanted = 0
        for layer, (predicted, true) in enumerate(question):
            fetcher.prefetch(keys(*predicted, layer=layer))
            loaded = fetcher.fetch(keys(*true, layer=layer))
            assert clusters(loaded) == true
            assert all(one.block is not None and int(one.block.key[0, 0]) == layer for one in loaded)
            wanted += len(set(true))
        fetcher.discard_predictions()
        stats = fetcher.stats
        assert stats.used + stats.missed == wanted
        assert stats.used + stats.wasted == stats.predicted
        assert stats.expired == 0


def test_a_right_prediction_is_loaded_once_and_costs_no_wait() -> None:
    store = Store()
    with Prefetcher(store.load) as fetcher:
        fetcher.prefetch(keys(1, 2, 3))
        fetcher.prefetch(keys(3, 2, 1))
        until(lambda: store.asked() == keys(1, 2, 3) and fetcher.stats.bytes == 3 * block(key(1)).nbytes)
        assert clusters(fetcher.fetch(keys(3, 1, 2))) == [3, 1, 2]
        stats = fetcher.stats
        assert (stats.predicted, stats.used, stats.late, stats.missed, stats.wasted) == (3, 3, 0, 0, 0)
        assert store.asked() == keys(1, 2, 3)


def test_what_is_on_its_way_is_waited_for_and_what_was_not_predicted_travels_beside_it() -> None:
    store = Store()
    store.gate.clear()
    with Prefetcher(store.load) as fetcher:
        fetcher.prefetch(keys(1))
        until(lambda: store.asked() == keys(1))
        # Opens only once the second load runs too: one after the other, this would never end.
        opener = threading.Thread(target=lambda: (until(lambda: store.at_once == 2), store.gate.set()))
        opener.start()
        assert clusters(fetcher.fetch(keys(1, 2))) == [1, 2]
        opener.join()
        stats = fetcher.stats
        assert (stats.used, stats.late, stats.missed) == (1, 1, 1)
        assert 0 < stats.waited_s <= stats.transfer_s + 0.5


def test_predictions_for_another_layer_stay() -> None:
    store = Store()
    with Prefetcher(store.load) as fetcher:
        fetcher.prefetch(keys(1, 2, layer=1) + keys(1, layer=2))
        assert clusters(fetcher.fetch(keys(1, layer=1))) == [1]
        assert fetcher.stats.wasted == 1
        assert clusters(fetcher.fetch(keys(1, layer=2))) == [1]
        assert (fetcher.stats.used, fetcher.stats.missed) == (2, 0)


def test_a_load_that_stalls_costs_the_deadline_and_is_answered_retry() -> None:
    store = Store()
    store.gate.clear()
    with Prefetcher(store.load, deadline_s=0.05) as fetcher:
        fetcher.prefetch(keys(1))
        loaded = fetcher.fetch(keys(1, 2))
        assert [one.outcome for one in loaded] == [Outcome.RETRY, Outcome.RETRY]
        assert fetcher.stats.expired == 2
        assert 0.05 <= fetcher.stats.waited_s < WAIT_S
        store.gate.set()
        assert clusters(fetcher.fetch(keys(1, 2))) == [1, 2]


@pytest.mark.parametrize("first", [Outcome.RETRY, Outcome.MISS])
def test_only_an_answer_that_may_have_changed_is_asked_for_again(first: Outcome) -> None:
    store = Store()
    store.first_answers[key(1)] = first
    events: list[FetchEvent] = []
    with Prefetcher(store.load, on_event=events.append) as fetcher:
        fetcher.prefetch(keys(1))
        until(lambda: bool(events))
        (loaded,) = fetcher.fetch(keys(1))
        assert loaded.outcome is (Outcome.MISS if first is Outcome.MISS else Outcome.HIT)
        assert len(store.calls) == (1 if first is Outcome.MISS else 2)


def test_a_defect_in_the_load_reaches_who_takes_and_the_next_question_goes_on() -> None:
    broken = [True]

    def load(wanted: Sequence[BlockKey]) -> list[Loaded]:
        if broken:
            raise ValueError("no such tier")
        return [Loaded(Outcome.HIT, block(one)) for one in wanted]

    with Prefetcher(load) as fetcher:
        with pytest.raises(ValueError, match="no such tier"):
            fetcher.fetch(keys(1))
        fetcher.prefetch(keys(2))
        until(lambda: all(load.done() for load in fetcher._expected.values()))
        broken.clear()
        assert clusters(fetcher.fetch(keys(1, 2))) == [1, 2]


def test_a_load_that_does_not_answer_every_block_is_a_defect() -> None:
    with Prefetcher(lambda wanted: []) as fetcher, pytest.raises(ValueError, match="1 blocks were asked for and 0"):
        fetcher.fetch(keys(1))


def test_a_layer_is_split_into_loads_that_are_worth_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.memory.prefetch.MIN_LOAD_BLOCKS", 2)
    for blocks, calls in {
        3: [keys(0, 1, 2)],
        4: [keys(0, 2), keys(1, 3)],
        9: [keys(0, 2, 4, 6, 8), keys(1, 3, 5, 7)],
    }.items():
        store = Store()
        with Prefetcher(store.load) as fetcher:
            fetcher.fetch(keys(*range(blocks)))
        assert sorted(store.calls) == calls


def test_only_so_many_loads_run_ahead_and_as_many_more_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.memory.prefetch.MIN_LOAD_BLOCKS", 1)
    store = Store()
    store.gate.clear()
    with Prefetcher(store.load) as fetcher:
        for layer in range(2, 8):
            fetcher.prefetch(keys(1, 2, 3, layer=layer))
        until(lambda: store.at_once == 2)
        opener = threading.Thread(target=lambda: (until(lambda: store.at_once == 4), store.gate.set()))
        opener.start()
        fetcher.fetch(keys(1, 2, 3, layer=1))
        opener.join()
        assert store.most_at_once == 4
        assert fetcher.stats.predicted == 3, "those of later layers were left out"


def test_a_tier_that_hangs_is_not_asked_more() -> None:
    store = Store()
    store.gate.clear()
    with Prefetcher(store.load, deadline_s=0.02) as fetcher:
        for layer in range(6):
            assert fetcher.fetch(keys(1, layer=layer))[0].outcome is Outcome.RETRY
        assert len(store.calls) == 2
        assert fetcher.stats.expired == 6
        store.gate.set()
        until(lambda: not fetcher._running)
        assert clusters(fetcher.fetch(keys(1))) == [1]


def test_events_tell_what_each_load_brought() -> None:
    events: list[FetchEvent] = []
    store = Store()
    store.first_answers[key(2)] = Outcome.MISS
    with Prefetcher(store.load, on_event=events.append) as fetcher:
        fetcher.prefetch(keys(1, 2))
        until(lambda: len(events) == 1)
        fetcher.fetch(keys(1, 2, 3))
    told = [(event.layer, event.blocks, event.bytes, event.predicted) for event in events]
    size = block(key(1)).nbytes
    assert told == [(1, 1, size, True), (1, 1, size, False)]
    assert all(event.began_s <= event.ended_s for event in events)


def test_what_the_process_has_is_not_loaded_from_further_away() -> None:
    store, host = Store(), Arena(2**20)
    host.store([(one, block(one)) for one in keys(1, 2)])
    with Prefetcher(store.load, at_hand=host) as fetcher:
        fetcher.prefetch(keys(1, 3))
        assert clusters(fetcher.fetch(keys(2, 4, 3, 1))) == [2, 4, 3, 1]
        stats = fetcher.stats
    assert store.asked() == keys(3, 4)
    assert (stats.predicted, stats.used, stats.at_hand, stats.missed) == (1, 1, 2, 1)


def test_a_closed_prefetcher_takes_nothing_and_the_next_starts_no_threads() -> None:
    fetcher = Prefetcher(Store().load)
    fetcher.prefetch(keys(1, 2))
    fetcher.close()
    fetcher.close()
    threads = set(threading.enumerate())
    with Prefetcher(Store().load) as another:
        another.fetch(keys(3))
        assert set(threading.enumerate()) <= threads
    assert fetcher.stats.wasted == 2
    with pytest.raises(RuntimeError, match="closed"):
        fetcher.prefetch(keys(1))
    with pytest.raises(RuntimeError, match="closed"):
        fetcher.fetch(keys(1))
