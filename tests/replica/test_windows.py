"""The window queue against a list-based model: bounded, newest wins, nothing lost without being counted."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.registry import window_orders
from cluster.replica.window_queue import DropReason, WindowQueue
from cluster.types import WindowRequest
from cluster.types.cameras import Priority


def request(stream: str, window: int, arrived_s: float) -> WindowRequest:
    return WindowRequest(stream, window, window * 8, window * 8 + 40, arrived_s)


def test_newest_window_of_a_camera_replaces_the_waiting_one() -> None:
    queue = WindowQueue()
    assert queue.offer(request("a", 0, 0.0)) == []
    [dropped] = queue.offer(request("a", 1, 8.0))
    assert (dropped.request.window, dropped.reason) == (0, DropReason.REPLACED)
    assert [r.window for r in queue.take_batch(8, 8.0).requests] == [1]


def test_a_deeper_queue_drops_the_oldest_of_that_camera_only() -> None:
    queue = WindowQueue(per_stream=2)
    queue.offer(request("b", 0, 0.0))
    dropped = [d for window in range(4) for d in queue.offer(request("a", window, 1.0 + window))]
    assert [(d.request.stream, d.request.window) for d in dropped] == [("a", 0), ("a", 1)]
    assert (queue.waiting("a"), queue.waiting("b")) == (2, 1)


def test_what_comes_next_is_seen_without_taking_it() -> None:
    queue = WindowQueue(per_stream=2)
    classes = {"c": Priority.NORMAL, "a": Priority.BACKGROUND, "b": Priority.CRITICAL, "d": Priority.NORMAL}
    for place, (stream, priority) in enumerate(classes.items()):
        for window in range(2):
            queue.offer(request(stream, window, 1.0 + place), priority=priority)
    queue.discard("d")
    assert [queue.peek(count) for count in (0, 2)] == [[], queue.take_batch(2, 5.0).requests]
    assert [r.stream for r in queue.peek(8)] == ["b", "c", "a"]
    assert queue.peek(8) == queue.take_batch(8, 5.0).requests


def test_batch_takes_one_window_per_camera_and_the_earliest_first() -> None:
    queue = WindowQueue()
    for stream, arrived in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.offer(request(stream, 0, arrived))
    assert [r.stream for r in queue.take_batch(2, 3.0).requests] == ["a", "b"]
    assert [r.stream for r in queue.take_batch(2, 3.0).requests] == ["c"]
    assert len(queue) == 0


def test_patient_camera_keeps_every_window_in_order() -> None:
    queue = WindowQueue()
    for window in range(3):
        assert queue.offer(request("file", window, float(window)), late_s=5, patient=True) == []
    assert queue.waiting("file") == 3
    assert [queue.take_batch(4, 100.0).requests[0].window for _ in range(3)] == [0, 1, 2]


def test_late_windows_are_dropped_when_a_batch_is_formed() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 0.0), late_s=10)
    queue.offer(request("b", 0, 5.0), late_s=10)
    batch = queue.take_batch(8, 11.0)
    assert [r.stream for r in batch.requests] == ["b"]
    assert [(d.request.stream, d.reason) for d in batch.dropped] == [("a", DropReason.LATE)]


def test_overflow_drops_the_window_that_waited_longest() -> None:
    queue = WindowQueue(capacity=2)
    queue.offer(request("a", 0, 1.0))
    queue.offer(request("b", 0, 0.0))
    [dropped] = queue.offer(request("c", 0, 2.0))
    assert (dropped.request.stream, dropped.reason) == ("b", DropReason.OVERFLOW)
    assert len(queue) == 2


def test_discard_returns_what_waited() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 0.0))
    assert [r.window for r in queue.discard("a")] == [0]
    assert queue.discard("a") == []
    assert len(queue) == 0


def test_the_most_urgent_class_goes_first_whoever_waits_longer() -> None:
    queue = WindowQueue()
    for number, priority in enumerate([Priority.BACKGROUND, Priority.NORMAL, Priority.CRITICAL]):
        queue.offer(request(priority, 0, float(number)), stride_s=8.0, priority=priority)
    assert [r.stream for r in queue.take_batch(8, 3.0).requests] == ["critical", "normal", "background"]


def test_of_one_class_the_earliest_due_goes_first() -> None:
    queue = WindowQueue()
    queue.offer(request("slow", 0, 0.0), stride_s=60.0)
    queue.offer(request("quick", 0, 5.0), stride_s=4.0)
    assert [r.stream for r in queue.take_batch(1, 6.0).requests] == ["quick"]


def test_a_step_is_no_longer_than_its_budget_but_for_its_first_window() -> None:
    queue = WindowQueue()
    for number, seconds in enumerate([3.0, 0.5, 0.4, 0.2]):
        queue.offer(request(f"c{number}", 0, float(number)), seconds=seconds)
    assert [r.stream for r in queue.take_batch(8, 5.0, 1.0).requests] == ["c0"]
    assert [r.stream for r in queue.take_batch(8, 5.0, 1.0).requests] == ["c1", "c2"], "nothing is let past c3"
    assert [r.stream for r in queue.take_batch(8, 5.0, 1.0).requests] == ["c3"]


def test_a_newer_window_takes_the_turn_of_the_one_it_replaces() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 0.0), stride_s=8.0)
    queue.offer(request("b", 0, 1.0), stride_s=8.0)
    queue.offer(request("a", 1, 8.0), stride_s=8.0)
    assert [(r.stream, r.window) for r in queue.take_batch(1, 8.0).requests] == [("a", 1)]


def test_a_camera_that_sends_ten_times_its_rate_takes_no_turns_of_others() -> None:
    """The engine does one window a second; eight honest cameras with a stride of eight seconds ask for all of it."""
    queue = WindowQueue()
    answered: Counter[str] = Counter()
    for tick in range(800):
        now_s = tick / 10
        if tick % 8 == 0:
            queue.offer(request("fast", tick, now_s), stride_s=8.0)
        if tick % 10 == 0:
            queue.offer(request(f"honest-{tick // 10 % 8}", tick, now_s), stride_s=8.0)
        if tick % 10 == 9:
            answered.update(r.stream for r in queue.take_batch(1, now_s).requests)
    assert answered["fast"] <= 80 / 8 + 2
    assert min(answered[f"honest-{n}"] for n in range(8)) >= 8


def test_overflow_drops_of_the_least_urgent_class() -> None:
    queue = WindowQueue(capacity=2)
    queue.offer(request("critical", 0, 0.0), priority=Priority.CRITICAL)
    queue.offer(request("background", 0, 1.0), priority=Priority.BACKGROUND)
    [dropped] = queue.offer(request("normal", 0, 2.0))
    assert (dropped.request.stream, dropped.reason) == ("background", DropReason.OVERFLOW)


def test_a_camera_that_changes_its_class_is_served_in_the_new_one_and_once() -> None:
    queue = WindowQueue(per_stream=2)
    queue.offer(request("a", 0, 0.0), priority=Priority.BACKGROUND)
    queue.offer(request("b", 0, 1.0))
    queue.offer(request("a", 1, 2.0), priority=Priority.CRITICAL)
    assert [(r.stream, r.window) for r in queue.take_batch(8, 3.0).requests] == [("a", 0), ("b", 0)]
    assert [(r.stream, r.window) for r in queue.take_batch(8, 3.0).requests] == [("a", 1)]


def test_late_windows_of_a_starved_class_are_cancelled_though_their_turn_never_comes() -> None:
    queue = WindowQueue()
    queue.offer(request("background", 0, 0.0), late_s=10.0, priority=Priority.BACKGROUND)
    dropped = []
    for second in range(1, 14):
        queue.offer(request("critical", second, float(second)), priority=Priority.CRITICAL)
        dropped += queue.take_batch(1, float(second)).dropped
    assert [(d.request.stream, d.reason) for d in dropped] == [("background", DropReason.LATE)]
    assert len(queue) == 0


def test_a_clock_that_jumps_cancels_what_is_late_and_stops_nothing() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 1000.0), stride_s=8.0, late_s=40.0)
    queue.offer(request("b", 0, 0.5), stride_s=8.0, late_s=40.0)
    batch = queue.take_batch(8, 0.0)
    assert [r.stream for r in batch.requests] == ["b", "a"], "set back: nothing is late"
    queue.offer(request("a", 1, 1.0), stride_s=8.0, late_s=40.0)
    assert [d.reason for d in queue.take_batch(8, 1e9).dropped] == [DropReason.LATE]
    assert len(queue) == 0


def test_cameras_that_went_away_without_a_word_are_forgotten() -> None:
    queue = WindowQueue(capacity=8)
    for number in range(10_000):
        queue.offer(request(f"c{number}", 0, float(number)), stride_s=1.0, late_s=5.0)
        queue.take_batch(8, float(number))
    assert len(queue._cameras) <= 64
    assert sum(map(len, queue._heaps)) <= 256


def test_priorities_have_an_order_and_unknown_ones_are_refused() -> None:
    assert sorted(Priority, key=lambda each: each.rank) == ["critical", "normal", "background"]
    assert Priority.of("critical") is Priority.CRITICAL
    with pytest.raises(ConfigError, match=r"'urgent'.*critical, normal, background"):
        Priority.of("urgent")


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.sampled_from("abcde"),
            st.tuples(st.booleans(), st.sampled_from(list(Priority)), st.sampled_from([0.0, 0.4, 1.0])),
        ),
        st.tuples(st.just("take"), st.integers(1, 4), st.tuples(st.floats(0, 3), st.sampled_from([0.5, 1.0, 99.0]))),
        st.tuples(st.just("discard"), st.sampled_from("abcde"), st.none()),
    ),
    max_size=60,
)


@pytest.mark.parametrize("order", window_orders.names())
@given(OPERATIONS, st.integers(1, 6), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_every_window_is_answered_dropped_or_discarded_exactly_once(order, operations, capacity, per_stream) -> None:
    queue = WindowQueue(capacity=capacity, per_stream=per_stream, order=order)
    offered, left, now = set(), [], 0.0
    answered: dict[str, list[int]] = {}
    classes: dict[str, Priority] = {}
    costs: dict[tuple[str, int], float] = {}
    for number, (kind, what, how) in enumerate(operations):
        if kind == "offer":
            now += 0.25
            patient, priority, seconds = how
            offered.add((what, number))
            classes[what], costs[what, number] = priority, seconds
            left += [
                (d.request.stream, d.request.window)
                for d in queue.offer(
                    request(what, number, now),
                    stride_s=1.0,
                    late_s=2.0,
                    patient=patient,
                    priority=priority,
                    seconds=seconds,
                )
            ]
        elif kind == "take":
            now += how[0]
            batch = queue.take_batch(what, now, how[1])
            streams = [r.stream for r in batch.requests]
            assert len(set(streams)) == len(streams) <= what
            ranks = [classes[stream].rank for stream in streams]
            assert ranks == sorted(ranks), "a less urgent class went first"
            if len(streams) > 1:
                assert sum(costs[r.stream, r.window] for r in batch.requests) <= how[1]
            if not streams:
                assert not any(queue.waiting(stream) for stream in "abcde"), "something was due and was not taken"
            for r in batch.requests:
                answered.setdefault(r.stream, []).append(r.window)
                left.append((r.stream, r.window))
            left += [(d.request.stream, d.request.window) for d in batch.dropped]
        else:
            left += [(r.stream, r.window) for r in queue.discard(what)]
        assert len(queue) == sum(queue.waiting(stream) for stream in "abcde") <= capacity
    for stream in "abcde":
        left += [(r.stream, r.window) for r in queue.discard(stream)]
    assert len(queue) == 0
    assert sorted(left) == sorted(offered)
    assert all(windows == sorted(windows) for windows in answered.values()), "a camera was answered out of order"


def test_first_come_first_served_is_the_baseline() -> None:
    """``b`` came later and is due sooner."""
    for order, first in (("arrival", "a"), ("deadline", "b")):
        queue = WindowQueue(order=order)
        queue.offer(request("a", 0, 1.0), stride_s=8)
        queue.offer(request("b", 0, 2.0), stride_s=2)
        assert [r.stream for r in queue.take_batch(2, 2.0).requests] == [first, {"a": "b", "b": "a"}[first]]


def test_a_window_put_back_is_the_next_of_its_camera_and_keeps_its_turn() -> None:
    queue = WindowQueue(per_stream=2)
    for stream, arrived in (("a", 1.0), ("b", 2.0)):
        queue.offer(request(stream, 0, arrived), stride_s=8)
    [taken] = queue.take_batch(1, 3.0).requests
    queue.offer(request("a", 1, 9.0), stride_s=8)
    assert queue.offer(taken, stride_s=8, again=True) == []
    assert len(queue) == 3
    order = [queue.take_batch(1, 9.0).requests[0] for _ in range(3)]
    assert [(r.stream, r.window) for r in order] == [("a", 0), ("b", 0), ("a", 1)]
    assert len(queue) == 0


def test_a_window_put_back_gives_way_like_any_other() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 0.0))
    [taken] = queue.take_batch(1, 0.0).requests
    queue.offer(request("a", 1, 8.0))
    [dropped] = queue.offer(taken, again=True)
    assert (dropped.request.window, dropped.reason) == (0, DropReason.REPLACED)
    assert [r.window for r in queue.take_batch(8, 8.0).requests] == [1]
    late = request("a", 2, 9.0)
    queue.offer(late, late_s=4, again=True)
    assert [d.reason for d in queue.take_batch(8, 20.0).dropped] == [DropReason.LATE]
