"""Hand-computed ledger, and that nothing can be missing without being found."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.bench.window_accounting import CameraWindows, account, alert_times, percentile, within
from cluster.types import Answer, Timing, TokenCount

NO_TOKENS = TokenCount(0, 0, 0, 0, 0, 0, 0)


def answer(end_s: float, *, window: int = 0, start_s: float = 0.0, question: str = "q", gated: bool = False) -> Answer:
    end, start = round(end_s * 1e6), round(start_s * 1e6)
    return Answer("cam", window, start, end, question, 0.5, True, "", gated, NO_TOKENS, Timing(latency_s=0.1))


def ledger(*ends: float, began_s: float = 100.0, stride_s: float = 2.0, lag_s: float = 0.5) -> CameraWindows:
    found = CameraWindows("cam", began_s, stride_s)
    for end in ends:
        strides = round(end / stride_s)
        found.saw(answer(end, window=strides - 1, start_s=end - strides * stride_s), began_s + end + lag_s)
    return found


def shown(found: CameraWindows, until_s: float) -> list[tuple[float, bool]]:
    return [(round(slot.end_s - found.began_s, 3), slot.seen_s is not None) for slot in found.slots(until_s)]


def test_windows_that_came_are_slots_and_windows_to_come_are_not() -> None:
    found = ledger(2, 4, 6)
    assert shown(found, 107.9) == [(2, True), (4, True), (6, True)]
    assert [slot.lag_s for slot in found.slots(107.9)] == pytest.approx([0.5] * 3)


def test_windows_that_did_not_come_are_missing_at_the_beginning_in_between_and_at_the_end() -> None:
    assert shown(ledger(6, 10), 114.0) == [
        (2, False),
        (4, False),
        (6, True),
        (8, False),
        (10, True),
        (12, False),
        (14, False),
    ]
    assert shown(ledger(), 104.5) == [(2, False), (4, False)]


def test_a_fresh_start_cuts_a_stride_in_pieces_and_only_whole_ones_are_missing() -> None:
    # The camera began anew at 5.3: its next window ends at 7.3, and 1.3 s of a window were never one.
    assert shown(ledger(2, 4, 7.3, 9.3), 110.0) == [(2, True), (4, True), (7.3, True), (9.3, True)]
    # It began anew at 9.5: one whole window and a piece are gone.
    assert shown(ledger(2, 4, 6, 11.5), 112.0) == [(2, True), (4, True), (6, True), (8, False), (11.5, True)]


def numbered(*windows: tuple[int, float, float]) -> CameraWindows:
    """Of (number, start, end)."""
    found = CameraWindows("cam", 100.0, 2.0)
    for number, start_s, end_s in windows:
        found.saw(answer(end_s, window=number, start_s=start_s), 100.0 + end_s + 0.5)
    return found


def test_windows_that_a_longer_stride_leaves_out_were_never_due() -> None:
    lowered = numbered((0, 0, 2), (1, 0, 4), (2, 2, 8), (3, 6, 12))
    assert shown(lowered, 115.9) == [(2, True), (4, True), (8, True), (12, True)]
    # One is missing at the stride of four, and what comes after the last one is due at that stride, too.
    lowered = numbered((0, 0, 2), (1, 0, 4), (2, 2, 8), (4, 10, 16), (5, 14, 20))
    assert shown(lowered, 124.1) == [(2, True), (4, True), (8, True), (12, False), (16, True), (20, True), (24, False)]


def test_a_first_window_at_a_longer_stride_leaves_none_out_before_it() -> None:
    """Whether the quality ladder keeps the stride, raises or lowers it afterwards."""
    assert shown(numbered((0, 0, 4)), 104.1) == [(4, True)]
    assert shown(numbered((0, 0, 4), (1, 0, 6), (2, 2, 8)), 108.1) == [(4, True), (6, True), (8, True)]
    # The second window answers first: one of four seconds is missing before it.
    assert shown(numbered((1, 0, 8), (2, 4, 12)), 112.1) == [(4, False), (8, True), (12, True)]


def test_a_fresh_start_is_no_longer_stride() -> None:
    # The numbers go on, but the later window begins where the video did.
    assert shown(numbered((0, 0, 2), (1, 6, 8)), 108.1) == [(2, True), (4, False), (6, False), (8, True)]


def test_rounded_clocks_make_no_window_appear_or_vanish() -> None:
    assert shown(ledger(1.9997, 3.9994, 6.0003), 106.1) == [(2.0, True), (3.999, True), (6.0, True)]
    assert len(ledger(1.99, 3.98, 7.96).slots(108.0)) == 4


def test_a_second_question_is_the_same_window() -> None:
    found = ledger(2)
    found.saw(answer(2, question="other"), 109.0)
    assert found.seen == 1
    assert found.slots(103.0)[0].lag_s == pytest.approx(0.5)


def test_a_camera_that_left_is_due_nothing_afterwards() -> None:
    found = ledger(2, 4)
    found.until_s = 105.0
    assert shown(found, 200.0) == [(2, True), (4, True)]


def test_what_the_cluster_counted_is_not_silent() -> None:
    slots = ledger(2, 8).slots(110.0)
    assert account(slots, 2, answered=2, listened=True).silent == 3
    assert account(slots, 2, answered=2, given_up=2, listened=True).silent == 1
    # Answered while nobody listened: an excuse only for who was not listening.
    assert account(slots, 2, answered=5, listened=True).silent == 3
    found = account(slots, 2, answered=5, listened=False)
    assert (found.due, found.seen, found.unseen, found.given_up, found.silent) == (5, 2, 3, 0, 0)
    # More given up than were due hides nothing and makes nothing negative.
    assert account(slots, 2, answered=2, given_up=9, listened=True).silent == 0


def test_windows_that_are_counted_more_often_than_they_were_due_are_told() -> None:
    """14 due at a stride of 2 s, of windows of 6 s; after the seventh the cluster began anew, 1 s into the next one."""
    before = [(k, max(0, 2 * k - 4), 2 * k + 2) for k in range(7)]
    after = [(k, max(15, 2 * k - 3), 2 * k + 3) for k in range(7, 14)]
    found = numbered(*before, *after)
    slots = found.slots(129.9)
    assert len(slots) == 14
    # The one that was cut short, and an incomplete last one.
    most = found.most(129.9)
    assert most == 14 + 1 + 1
    assert account(slots, 14, answered=14, given_up=2, listened=True, most=most).extra == 0
    assert account(slots, 14, answered=14, given_up=3, listened=True, most=most).extra == 1
    assert account(slots, 14, answered=14, given_up=14, listened=True, most=most).extra == 12
    assert account(slots, 14, answered=28, listened=True, most=most).extra == 12


def test_a_window_after_the_last_answer_may_be_on_its_way_and_one_before_it_is_not() -> None:
    slots = ledger(2, 8).slots(114.0)
    assert [slot.end_s - 100 for slot in slots] == [2, 4, 6, 8, 10, 12, 14]
    found = account(slots, 2, answered=2, listened=True, since_s=111.0)
    assert (found.due, found.seen, found.overdue, found.silent) == (7, 2, 2, 3)
    assert account(slots, 2, answered=2, listened=True, since_s=100.0).silent == 2, "passed over"
    assert account(ledger().slots(105.0), 0, listened=True, since_s=100.0).overdue == 2


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 0.04))
def test_every_window_is_in_exactly_one_column(came: list[bool], dropped: int, lost: int, off: float) -> None:
    ends = [2.0 * (number + 1) + off for number, yes in enumerate(came) if yes]
    found = ledger(*ends)
    slots = found.slots(100.001 + 2.0 * len(came) + off)
    assert [slot.seen_s is not None for slot in slots] == came
    told = account(slots, found.seen, answered=len(ends), given_up=dropped + lost, listened=True)
    assert told.due == told.seen + told.unseen + told.given_up + told.overdue + told.silent == len(came)
    assert told.silent == max(0, came.count(False) - dropped - lost)


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([3, 1, 2, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([1.0] * 99 + [math.inf], 0.99) == 1
    assert percentile([1.0] * 98 + [math.inf] * 2, 0.99) == math.inf
    assert math.isnan(percentile([], 0.5))


def test_an_alert_waits_for_the_end_of_its_window_and_for_the_answer() -> None:
    slots = ledger(2, 4, 6).slots(106.0)
    times = alert_times(slots, 2.0, 100.0, 104.0)
    assert len(times) == 32
    # Moments lie evenly over a stride: the wait for the window's end is 1 s on average, the lag 0.5 s.
    assert sum(times) / len(times) == pytest.approx(1.5)
    assert (max(times), min(times)) == pytest.approx((2.5 - 1 / 16, 0.5 + 1 / 16))


def test_an_alert_waits_longer_where_a_window_is_missing() -> None:
    slots = ledger(2, 6).slots(106.0)
    times = alert_times(slots, 2.0, 102.0, 104.0)
    assert min(times) == pytest.approx(2.5 + 1 / 16)
    assert alert_times(ledger(2).slots(106.0), 2.0, 104.0, 106.0) == [math.inf] * 16
    # A late answer of this window is overtaken by the next one's.
    found = ledger(2)
    found.saw(answer(4), 120.0)
    found.saw(answer(6), 107.0)
    assert max(alert_times(found.slots(106.0), 2.0, 102.0, 104.0)) < 5.0


def test_within_is_half_open() -> None:
    slots = ledger(2, 4, 6).slots(106.0)
    assert [slot.end_s for slot in within(slots, 102.0, 106.0)] == [102.0, 104.0]
