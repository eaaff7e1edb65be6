"""Counting windows under way from frames sent and windows settled."""

import numpy as np

from cluster.scheduling.in_flight import InFlight
from cluster.types import FrameSample, PatchGrid

GRID = PatchGrid(2, 2, 14, 2, 2)
SECOND = 1_000_000


def sample(pts_s: float, *, fresh: bool = False) -> FrameSample:
    mask = np.ones((2, 2), dtype=bool)
    patches = np.zeros((4, 2, 3, 14, 14), dtype=np.uint8)
    return FrameSample("cam", 0, int(pts_s * SECOND), SECOND, fresh, fresh, GRID, mask, patches, 0.0, "")


def send(counter: InFlight, first_s: float, last_s: float) -> None:
    for second in range(int(first_s), int(last_s)):
        counter.sent(sample(second, fresh=second == first_s))


def test_nothing_sent_is_nothing_lost() -> None:
    assert InFlight(8).lose() == 0


def test_a_stride_that_has_begun_is_a_window_under_way() -> None:
    counter = InFlight(8)
    send(counter, 100, 101)
    assert counter.count() == 1
    send(counter, 100, 108)
    assert counter.count() == 1
    counter.sent(sample(108))
    assert counter.count() == 2


def test_settled_windows_are_not_lost() -> None:
    counter = InFlight(8)
    send(counter, 0, 20)
    counter.settled(2)
    assert counter.lose() == 1
    assert counter.count() == 0
    send(counter, 20, 22)
    counter.settled(0)
    assert counter.lose() == 1


def test_window_cut_short_by_a_fresh_start_is_not_counted_twice() -> None:
    counter = InFlight(8)
    send(counter, 0, 20)
    send(counter, 50, 54)
    assert counter.count() == 2 + 1


def test_settling_more_than_was_begun_never_goes_below_zero() -> None:
    counter = InFlight(8)
    send(counter, 0, 8)
    counter.settled(5)
    assert counter.count() == 0
