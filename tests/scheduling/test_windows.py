"""The window queue against a list-based model: bounded, newest wins, nothing lost without being counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduling.windows import DropReason, WindowQueue
from cluster.types import WindowRequest


def request(stream: str, window: int, arrived_s: float) -> WindowRequest:
    return WindowRequest(stream, window, window * 8, window * 8 + 40, arrived_s)


def test_newest_window_of_a_camera_replaces_the_waiting_one() -> None:
    queue = WindowQueue()
    assert queue.offer(request("a", 0, 0.0)) == []
    [dropped] = queue.offer(request("a", 1, 8.0))
    assert (dropped.request.window, dropped.reason) == (0, DropReason.REPLACED)
    assert [r.window for r in queue.take(8, 8.0).requests] == [1]


def test_a_deeper_queue_drops_the_oldest_of_that_camera_only() -> None:
    queue = WindowQueue(per_stream=2)
    queue.offer(request("b", 0, 0.0))
    dropped = [d for window in range(4) for d in queue.offer(request("a", window, 1.0 + window))]
    assert [(d.request.stream, d.request.window) for d in dropped] == [("a", 0), ("a", 1)]
    assert (queue.waiting("a"), queue.waiting("b")) == (2, 1)


def test_batch_takes_one_window_per_camera_and_the_earliest_first() -> None:
    queue = WindowQueue()
    for stream, arrived in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.offer(request(stream, 0, arrived))
    assert [r.stream for r in queue.take(2, 3.0).requests] == ["a", "b"]
    assert [r.stream for r in queue.take(2, 3.0).requests] == ["c"]
    assert len(queue) == 0


def test_patient_camera_keeps_every_window_in_order() -> None:
    queue = WindowQueue()
    for window in range(3):
        assert queue.offer(request("file", window, float(window)), late_s=5, patient=True) == []
    assert queue.waiting("file") == 3
    assert [queue.take(4, 100.0).requests[0].window for _ in range(3)] == [0, 1, 2]


def test_late_windows_are_dropped_when_a_batch_is_formed() -> None:
    queue = WindowQueue()
    queue.offer(request("a", 0, 0.0), late_s=10)
    queue.offer(request("b", 0, 5.0), late_s=10)
    batch = queue.take(8, 11.0)
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


def test_a_queue_must_hold_something() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WindowQueue(capacity=0)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.sampled_from("abcde"), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 4), st.floats(0, 3)),
        st.tuples(st.just("discard"), st.sampled_from("abcde"), st.none()),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 6))
@settings(deadline=None, max_examples=150)
def test_every_window_is_answered_dropped_or_discarded_exactly_once(operations, capacity) -> None:
    queue = WindowQueue(capacity=capacity)
    offered, left, now = set(), [], 0.0
    answered: dict[str, list[int]] = {}
    for number, (kind, what, how) in enumerate(operations):
        if kind == "offer":
            now += 0.25
            offered.add((what, number))
            left += [
                (d.request.stream, d.request.window)
                for d in queue.offer(request(what, number, now), late_s=2.0, patient=how)
            ]
        elif kind == "take":
            now += how
            batch = queue.take(what, now)
            streams = [r.stream for r in batch.requests]
            assert len(set(streams)) == len(streams) <= what
            assert [r.arrived_s for r in batch.requests] == sorted(r.arrived_s for r in batch.requests)
            for r in batch.requests:
                answered.setdefault(r.stream, []).append(r.window)
                left.append((r.stream, r.window))
            left += [(d.request.stream, d.request.window) for d in batch.dropped]
        else:
            left += [(r.stream, r.window) for r in queue.discard(what)]
        assert len(queue) <= capacity
    for stream in "abcde":
        left += [(r.stream, r.window) for r in queue.discard(stream)]
    assert len(queue) == 0
    assert sorted(left) == sorted(offered)
    assert all(windows == sorted(windows) for windows in answered.values()), "a camera was answered out of order"
