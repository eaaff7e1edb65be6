"""Counting windows under way from frames sent and windows settled."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.decoder.windows_in_flight import UnsentWindows, WindowsInFlight
from cluster.engine.window.windows import WindowClock
from cluster.types import FrameSample, PatchGrid

GRID = PatchGrid(2, 2, 14, 2, 2)
SECOND = 1_000_000


def sample(pts_s: float, *, fresh: bool = False, gap: bool = False) -> FrameSample:
    mask = np.ones((2, 2), dtype=bool)
    patches = np.zeros((4, 2, 3, 14, 14), dtype=np.uint8)
    return FrameSample("cam", 0, int(pts_s * SECOND), SECOND, fresh, fresh, GRID, mask, patches, 0.0, gap=gap)


def send(counter: WindowsInFlight, first_s: float, last_s: float) -> None:
    for second in range(int(first_s), int(last_s)):
        counter.add_frame(sample(second, fresh=second == first_s))


def settle(counter: WindowsInFlight, windows: int, end_s: float | None, *, closed: int | None = None) -> int:
    """The replica has settled so many, and closed as many unless told, the last at ``end_s``."""
    return counter.apply_counts(windows, windows if closed is None else closed, end_s and int(end_s * SECOND))


def lost(counter: WindowsInFlight, next_s: float) -> int:
    """Windows that a replica's death costs when the next frame comes at ``next_s``."""
    return counter.count_lost() + counter.add_frame(sample(next_s, gap=True))


def test_nothing_sent_is_nothing_lost() -> None:
    assert WindowsInFlight(8).count_lost() == 0


def test_a_stride_that_has_begun_is_a_window_under_way() -> None:
    counter = WindowsInFlight(8)
    send(counter, 100, 101)
    assert counter.count() == 1
    send(counter, 100, 108)
    assert counter.count() == 1
    counter.add_frame(sample(108))
    assert counter.count() == 2


def test_a_rounded_clock_begins_no_window() -> None:
    """At 30 pictures a second the eighth second ends a microsecond late."""
    counter = WindowsInFlight(8)
    for number in range(16):
        start, end = round(number * 500_000 * 1.0000001), round((number + 1) * 500_000 * 1.0000002)
        counter.add_frame(replace(sample(0, fresh=number == 0), pts=start, duration=end - start))
    assert counter.count() == 1
    settle(counter, 1, 8)
    assert lost(counter, 8) == 0


def test_settled_windows_are_not_lost() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert lost(counter, 24) == 1
    settle(counter, 0, None)
    assert counter.count() == 1
    assert lost(counter, 32) == 1


@pytest.mark.parametrize("next_s", [24, 30, 3])
def test_the_open_window_is_lost_if_no_frame_comes_before_its_end(next_s: float) -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert counter.count_lost() == 0
    assert counter.last_window_end == 24 * SECOND, "windows that nothing is sent of are counted from there"
    assert counter.count_lost() == 0, "told again"
    assert counter.add_frame(sample(next_s, gap=True)) == 1
    assert settle(counter, 1, 12) == settle(counter, 2, 40) == 0, "once"


@pytest.mark.parametrize(("first_end", "windows"), [(24, 0), (29, 1)])
def test_otherwise_the_next_replica_says_whether_it_went_on_with_it(first_end: int, windows: int) -> None:
    """One that goes on with the saved window has windows to 24 and 32, one that begins anew to 29 and 37."""
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert lost(counter, 21) == settle(counter, 0, None) == 0, "none has closed there"
    for second in range(22, 30):
        counter.add_frame(sample(second))
    assert counter.unsettled == 9 / 8 + 1, "it is not known whether the one to 24 is answered"
    assert settle(counter, 1, first_end) == windows
    assert settle(counter, 1, first_end) == 0, "once"
    assert counter.last_window_end == (first_end + 8) * SECOND
    assert counter.count() == 1


def test_a_decoder_that_takes_a_camera_over_counts_in_the_phase_of_its_replica() -> None:
    counter = WindowsInFlight(8)
    settle(counter, 100, 16)
    for second in range(21, 26):
        counter.add_frame(sample(second, gap=second == 21))
    assert counter.count() == 1, "it is not known which"
    settle(counter, 101, 24)
    assert counter.last_window_end == 32 * SECOND
    assert lost(counter, 32) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_window_that_its_first_frame_closes_is_not_one_of_its_own(waits: bool) -> None:
    """Frames of that window came from another decoder; it may still wait when the next one has closed, too."""
    counter = WindowsInFlight(8)
    counter.add_frame(sample(24, gap=True))
    settle(counter, 100, 16)
    if waits:
        settle(counter, 100, 24, closed=101)
    for second in range(25, 32):
        counter.add_frame(sample(second))
    settle(counter, 101, 32, closed=102)
    assert counter.count() == 1, "the one to 32"
    settle(counter, 102, 32)
    assert counter.count() == 0
    counter.add_frame(sample(32))
    assert lost(counter, 40) == 1


def test_a_clock_that_jumps_ahead_while_nothing_is_sent_is_no_missing_video() -> None:
    unsent = UnsentWindows()
    unsent.begin(0, "shed")
    assert sum(unsent.count(sample(second), 8) for second in range(1, 20)) == 2
    # Keyframes alone come every ten seconds.
    assert [unsent.count(sample(29), 8), unsent.count(sample(3600), 8)] == [1, 0]
    assert sum(unsent.count(sample(second), 8) for second in range(3601, 3620)) == 2
    assert unsent.windows == 5


def test_of_a_replica_that_says_nothing_the_window_is_lost() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert lost(counter, 21) == 0
    assert counter.count_lost() == 1, "to 24; it is not known whether the one to 29 is"
    assert counter.add_frame(sample(40, gap=True)) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 7), st.booleans()), min_size=1, max_size=8))
def test_no_window_goes_uncounted_while_replicas_die(lives: list[tuple[int, int, bool]]) -> None:
    """Each replica gets some seconds of frames and then for less than a stride nobody does; it goes on with the saved
    window, or begins anew, and answers what closes."""
    counter, origin, second, ends, lost = WindowsInFlight(8), 0, 0, [0], 0
    for alive, away, continues in lives:
        here, answered = second, 0
        origin = origin if continues else here
        for _ in range(alive):
            lost += counter.add_frame(sample(second, fresh=second == 0, gap=second == here))
            second += 1
            if (second - origin) % 8 == 0:
                ends.append(second)
                answered += 1
            lost += settle(counter, answered, ends[-1] if answered else None)
        lost += counter.count_lost()
        second += away
    lost += counter.add_frame(sample(second, gap=True)) + counter.count_lost()
    # Between two that were answered, as many as there are whole strides.
    missing = sum(max(0, (end - before) // 8 - 1) for before, end in pairwise(ends)) + (second - ends[-1]) // 8
    assert missing <= lost <= missing + len(lives)


def test_frames_dropped_from_the_queue_are_not_under_way_even_across_scene_cuts() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    for second in range(20, 24):
        counter.add_frame(sample(second))
    # Two rounds of a looped file, and a gap, wait in the queue when it is dropped.
    send(counter, 24, 40)
    send(counter, 40, 50)
    counter.add_frame(sample(70, gap=True))
    counter.truncate(20 * SECOND)
    assert counter.count() == 1, "that of seconds 16 to 24, which began with frames that were sent"
    assert counter.last_window_end == 24 * SECOND


def test_what_a_replica_counts_itself_is_not_counted_again_when_it_dies_later() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 1, 8)
    counter.restart()
    assert counter.count() == 0
    # Another decoder had 3 windows of it answered before this one goes on.
    send(counter, 100, 120)
    settle(counter, 1 + 3, 100)
    assert counter.count() == 3
    settle(counter, 1 + 3 + 2, 116)
    assert lost(counter, 124) == 1


def test_windows_lost_with_a_connection_are_those_of_the_replica_that_lives_on() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 40)
    settle(counter, 2, 16)
    assert counter.count() == 3
    # The frames of seconds 16 to 40 never came. The replica closes the next window at 56 and counts three that it
    # skipped; one that it closed waits.
    for second in range(40, 60):
        counter.add_frame(sample(second, gap=second == 40))
    settle(counter, 3, 56, closed=4)
    assert counter.count() == 1 + 1, "the one that waits and the one of seconds 56 to 64"
    settle(counter, 4, 56)
    assert lost(counter, 64) == 1


def test_a_replica_that_opens_the_camera_anew_counts_from_zero_again() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 48)
    settle(counter, 6, 48)
    counter.restart()
    send(counter, 100, 120)
    settle(counter, 2, 116)
    assert lost(counter, 124) == 1


def test_window_cut_short_by_a_fresh_start_is_not_counted_twice() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    send(counter, 50, 54)
    assert counter.count() == 2 + 1


def test_windows_go_on_after_a_gap_and_those_that_nothing_was_sent_of_are_not_under_way() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    assert counter.last_window_end == 24 * SECOND
    # Ends at 8, 16 and 24 were begun; to 32 and 40 nothing was sent; the one to 48 is in the making.
    counter.add_frame(sample(41.5, gap=True))
    assert counter.count() == 3 + 1
    settle(counter, 3, 24)
    assert counter.count() == 1
    assert counter.last_window_end == 48 * SECOND
    # A short one within a window.
    counter.add_frame(sample(46, gap=True))
    assert counter.count() == 1
    counter.add_frame(sample(48))
    assert counter.count() == 2


def test_a_clock_that_went_back_begins_windows_anew() -> None:
    counter = WindowsInFlight(8)
    send(counter, 100, 120)
    counter.add_frame(sample(3, gap=True))
    assert counter.count() == 2 + 1
    assert counter.last_window_end == 11 * SECOND


def test_settling_more_than_was_begun_never_goes_below_zero() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 8)
    settle(counter, 5, 8)
    assert counter.count() == 0


def test_another_stride_goes_on_from_the_last_closed_window() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    counter.set_stride(4)
    # Ends at 8 and 16 are past; the next is 4 s on, and has come; one more is in the making.
    assert counter.count() == 2 + 1
    counter.add_frame(sample(20))
    assert counter.count() == 2 + 2
    settle(counter, 3, 20)
    counter.set_stride(8)
    assert counter.count() == 1
    for second in range(21, 28):
        counter.add_frame(sample(second))
    assert counter.count() == 1
    counter.add_frame(sample(28))
    assert counter.count() == 2
    assert lost(counter, 36) == 2


def test_another_stride_before_the_first_frame_is_the_one_it_begins_with() -> None:
    counter = WindowsInFlight(8)
    counter.set_stride(2)
    send(counter, 0, 3)
    assert counter.count() == 2


def test_a_camera_that_is_handed_over_goes_on_with_its_windows() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    counter.add_frame(sample(20, gap=True), moved=True)
    for second in range(21, 25):
        counter.add_frame(sample(second))
    assert counter.count() == 2
    settle(counter, 3, 24)
    assert lost(counter, 32) == 1


def outage(counter: WindowsInFlight, first_s: float, *, waited_s: float, moved: bool = False, unsent: int = 0) -> int:
    """Windows lost when video that broke off at 20 s comes again at ``first_s``, after a wait."""
    counter.note_arrival(sample(19), 0.0)
    frame = sample(first_s, gap=True)
    counter.note_arrival(frame, waited_s)
    return counter.add_frame(frame, moved=moved, unsent=unsent)


# At 20 s, the window to 24 is open; those to 32, 40 … 96 have no video.
@pytest.mark.parametrize(
    ("first_s", "waited_s", "unsent", "lost"),
    [(100, 80, 0, 1 + 9), (100, 80, 4, 1 + 5), (23, 3, 0, 0), (25, 5, 0, 1), (86_400, 40, 0, 1 + 5)],
    ids=["an outage", "partly counted as unsent", "soon", "next window", "a clock that jumped ahead"],
)
@pytest.mark.parametrize("moved", [False, True], ids=["replica died", "handed over"])
def test_video_missing_between_two_replicas_is_counted_here(first_s, waited_s, unsent, lost, moved) -> None:
    """The old replica never gets the frame behind it, and the new one has none before it."""
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert moved or counter.count_lost() == 0
    assert outage(counter, first_s, waited_s=waited_s, moved=moved, unsent=unsent) == lost
    assert counter.count() == 1, "of the windows lost, none is in flight"


def test_video_missing_at_one_replica_is_counted_there() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    assert outage(counter, 100, waited_s=80) == 0


def test_one_that_could_not_be_loses_what_was_begun_before_its_first_frame() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    counter.add_frame(sample(20, gap=True), moved=True)
    for second in range(21, 30):
        counter.add_frame(sample(second))
    assert counter.cancel_hand_over(2) == 1
    # Its windows end 8 seconds apart from 20 on.
    assert counter.count() == 2
    settle(counter, 1, 28)
    assert lost(counter, 36) == 1


def test_one_that_sent_nothing_on_its_way_loses_what_was_under_way() -> None:
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    assert counter.cancel_hand_over(2) + counter.add_frame(sample(24)) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([2, 4, 8])), min_size=1, max_size=8))
def test_counts_as_many_windows_as_the_engines_own_clock(segments: list[tuple[int, int]]) -> None:
    stride = segments[0][1]
    counter, clock = WindowsInFlight(stride), WindowClock(40 * SECOND, stride * SECOND)
    clock.restart(0)
    closed = second = 0
    for count, stride in segments:
        counter.set_stride(stride)
        clock.change_lengths(40 * SECOND, stride * SECOND)
        for _ in range(count):
            counter.add_frame(sample(second, fresh=second == 0))
            ends = [window.end for window in clock.close((second + 1) * SECOND, second * SECOND)]
            closed += len(ends)
            second += 1
            if ends:
                counter.apply_counts(closed, closed, ends[-1])
        # What the engine has closed is settled: left is the one in the making, if a frame of it has come.
        assert counter.count() == (second * SECOND > clock.end - stride * SECOND)


def test_windows_of_another_decoder_make_no_loss_good() -> None:
    counter = WindowsInFlight(8)
    # A hundred were answered before this decoder got the camera, and the replica dies with three of its own.
    send(counter, 0, 40)
    settle(counter, 102, 16)
    assert lost(counter, 40) == 3
    settle(counter, 0, None)
    assert lost(counter, 48) == 1


def test_windows_that_another_decoder_sent_in_between_are_not_its_own() -> None:
    """Its process stood still; meanwhile another one had the camera, at the same replica."""
    counter = WindowsInFlight(8)
    send(counter, 0, 20)
    settle(counter, 2, 16)
    counter.add_frame(sample(60, gap=True))
    settle(counter, 7, 56)
    for second in range(61, 76):
        counter.add_frame(sample(second))
    settle(counter, 9, 72)
    assert counter.count() == 1, "the one to 80"
    counter.add_frame(sample(80))
    assert counter.count() == 2
    assert lost(counter, 90) == 2


def test_a_gap_before_the_first_window_closes_is_no_window_of_its_own() -> None:
    counter = WindowsInFlight(8)
    counter.add_frame(sample(0, fresh=True))
    settle(counter, 5, None)
    for second in range(26, 44):
        counter.add_frame(sample(second, gap=second == 26))
    settle(counter, 6, 32)
    settle(counter, 7, 40)
    assert lost(counter, 50) == 1


def test_frames_dropped_from_the_queue_are_not_in_flight() -> None:
    counter = WindowsInFlight(8)
    send(counter, 100, 140)
    assert counter.count() == 5
    counter.truncate(113 * SECOND)
    assert (counter.count(), counter.last_window_end) == (2, 116 * SECOND)
    # What follows the hole: windows 3 and 4 have no frame that reached the replica.
    counter.add_frame(sample(141, gap=True))
    assert counter.count() == 3
    counter.truncate(112 * SECOND)
    assert (counter.count(), counter.last_window_end) == (2, 116 * SECOND)


def test_a_cut_that_begins_with_the_frame_after_a_gap_goes_on_from_there() -> None:
    counter = WindowsInFlight(8)
    send(counter, 100, 112)
    counter.add_frame(sample(141, gap=True))
    counter.truncate(141 * SECOND)
    # The windows up to second 140 have been counted as dropped before.
    assert (counter.count(), counter.last_window_end) == (2, 140 * SECOND)


def test_frames_before_a_clock_that_was_set_back_stay_in_flight() -> None:
    counter = WindowsInFlight(8)
    send(counter, 100, 140)
    send(counter, 4, 20)
    send(counter, 20, 30)
    counter.truncate(3 * SECOND)
    assert counter.count() == 5
