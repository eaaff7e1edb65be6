"""Strides without video: counted once, whatever the camera's clock, its network or its decoder did."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_parts import SECOND, sample

from cluster.engine.window.windows import WindowClock
from cluster.replica.window_accounting import WindowAccounting
from cluster.types import WindowRequest

STRIDE_S = 2.0


class Replica:
    """A camera's windows as an engine closes them: frames of one second that take ``late_s`` to arrive."""

    def __init__(self) -> None:
        self.accounting = WindowAccounting()
        self.clock = WindowClock(round(4 * SECOND), round(STRIDE_S * SECOND))
        self.ends: list[int] = []
        self.lost: list[int] = []
        self.unanswered = 0
        self._last: int | None = None

    def take(
        self, at_s: float, *, fresh=False, gap=False, arrived_s=None, dropped=0, patient=False, answer=True
    ) -> int:
        made = sample("a", 0, fresh=fresh)
        frame = replace(made, gap=gap, pts=round(at_s * SECOND), windows_dropped=dropped)
        arrived_s = at_s + 1 if arrived_s is None else arrived_s
        lost = 0
        if fresh or (gap and not self.accounting.continues(frame, arrived_s, patient=patient)):
            lost += self.accounting.restart(frame, arrived_s, STRIDE_S, patient=patient)
            self.clock.restart(frame.pts)
            self._last = None
        place = frame.pts + frame.duration // 8
        until = place + frame.duration
        spans = self.clock.close(place, self._last) + self.clock.close(until, until)
        closed = [WindowRequest("a", span.number, span.start, span.end, arrived_s) for span in spans]
        self._last = frame.pts + frame.duration * 7 // 8
        lost += self.accounting.add_frame(frame, arrived_s, closed, STRIDE_S)
        if closed and answer:
            self.accounting.window_answered()
            self.ends += [request.end for request in closed]
        elif closed:
            self.unanswered += len(closed)
        self.lost.append(lost)
        return lost

    def run(self, first_s: float, last_s: float, **first) -> int:
        """Frames of ``[first_s, last_s)``, the first one fresh; what they lost."""
        times = [first_s + second for second in range(math.ceil(last_s - first_s))]
        return sum(self.take(at_s, fresh=at_s == first_s, **(first if at_s == first_s else {})) for at_s in times)


def test_nothing_is_lost_while_frames_come() -> None:
    assert Replica().run(0, 60) == 0


def test_packets_lost_for_longer_than_a_stride_are_as_many_windows() -> None:
    replica = Replica()
    replica.run(0, 6)
    assert replica.run(13, 20) == 3, "those that would have ended at 8, 10 and 12"


def test_a_window_cut_short_is_lost_and_a_piece_that_had_no_frame_is_not() -> None:
    replica = Replica()
    replica.run(0, 7)
    assert replica.run(7.5, 9.5) == 1
    assert replica.run(10.5, 12) == 0, "one closed at 9.5"


def test_many_short_holes_add_up() -> None:
    """Eleven and a half strides without an answer are eleven windows, however often the video began anew."""
    replica = Replica()
    replica.run(0, 2)
    at_s, lost = 2.0, 0
    for _ in range(6):
        at_s += 3.8
        lost += replica.take(at_s, fresh=True, answer=False)
    assert lost == math.floor((at_s - 2.0) / STRIDE_S + 0.05) == 11


def test_what_the_decoder_has_counted_is_not_counted_again() -> None:
    replica = Replica()
    replica.run(0, 6)
    # 6 to 26 was shed: ten windows, of which the decoder has seen nine through.
    assert replica.run(26, 30, dropped=9) == 1
    assert replica.run(40, 44, dropped=14) == 0
    # Another decoder goes on from there; for one that does not, nothing is known to be counted.
    assert replica.run(54, 58, dropped=14 + 2) == 3
    assert replica.run(68, 72, dropped=2) == 5


def test_a_replica_that_meets_a_camera_counts_nothing_of_before() -> None:
    assert Replica().run(5000, 5004, dropped=70) == 0


def test_what_was_missing_before_a_replicas_first_frame_is_its_decoders_to_count() -> None:
    replica = Replica()
    # The engine found a saved window to 6 with its video, which the first frame closes.
    replica.clock.restart(4 * SECOND)
    replica._last = 6 * SECOND
    assert sum(replica.take(at_s, gap=at_s == 50) for at_s in range(50, 56)) == 0
    assert [end / SECOND for end in replica.ends] == [6, 52, 54, 56]
    assert replica.take(61, gap=True) + sum(map(replica.take, (62, 63))) == 2, "to 58 and 60"
    # The camera's clock is set back.
    assert replica.take(0, fresh=True, arrived_s=65) == 0
    assert sum(map(replica.take, range(1, 8))) == 0


def test_the_end_of_the_last_window_is_told_until_they_begin_anew() -> None:
    replica = Replica()
    # The engine found a saved window; those of every two seconds since 1.
    replica.clock.restart(1 * SECOND)
    replica.take(5, gap=True)
    assert replica.accounting.closed == (0, None)
    for at_s in (6, 7, 8):
        replica.take(at_s)
    assert replica.accounting.closed == (2, 9 * SECOND)
    replica.take(20, fresh=True)
    assert replica.accounting.closed == (2, None)


def test_a_clock_that_jumps_is_not_believed() -> None:
    for jump_s in (3600.0, -3600.0):
        replica = Replica()
        replica.run(0, 6)
        assert replica.take(7 + jump_s, fresh=True, arrived_s=8.0) == 0
        replica = Replica()
        replica.run(0, 6)
        assert replica.take(7 + jump_s, fresh=True, arrived_s=16.0) == 4, "nine seconds passed"


def test_the_camera_was_away_for_an_hour() -> None:
    replica = Replica()
    replica.run(0, 6)
    assert replica.take(3606, fresh=True) == 1800
    # Its clock began anew when it was switched on.
    assert replica.take(0, fresh=True, arrived_s=3606 + 7201) == 3600


def test_frames_that_arrive_in_one_burst_hide_nothing() -> None:
    replica = Replica()
    replica.run(0, 6)
    assert replica.take(12, fresh=True, arrived_s=7.01) == 3


def test_a_file_that_waits_loses_what_is_missing_in_it_and_no_time() -> None:
    replica = Replica()
    for second in range(6):
        replica.take(second, fresh=second == 0, patient=True, arrived_s=100.0)
    assert replica.take(11, fresh=True, patient=True, arrived_s=900.0) == 2
    assert replica.take(0, fresh=True, patient=True, arrived_s=1800.0) == 1, "the window that the new round cut short"


def test_windows_that_ended_without_a_frame_are_lost() -> None:
    """The video stood still for nine seconds, and went on without a keyframe."""
    replica = Replica()
    replica.run(0, 6)
    # Nobody has seen anything of those to 8, 10, 12 and 14.
    assert replica.take(15) == 4
    assert [end / SECOND for end in replica.ends] == [2, 4, 6, 16]


def test_after_a_gap_windows_go_on_at_their_phase() -> None:
    replica = Replica()
    replica.run(0, 7)
    # Of the window to 8 there is one frame: it is answered. Those to 10 and 12 are lost.
    assert [replica.take(at_s, gap=at_s == 12.7) for at_s in (12.7, 13.7, 14.7)] == [2, 0, 0]
    assert [end / SECOND for end in replica.ends] == [2, 4, 6, 8, 14]


def test_what_the_decoder_has_counted_of_a_gap_is_not_counted_again() -> None:
    replica = Replica()
    replica.run(0, 6)
    # Ten windows, of which the decoder has dropped and counted nine.
    assert [replica.take(at_s, gap=at_s == 26, dropped=9) for at_s in (26, 27, 28, 29)] == [1, 0, 0, 0]
    # What it counted too much excuses no later loss.
    assert [replica.take(at_s, gap=at_s == 31, dropped=14) for at_s in (31, 32, 33)] == [0, 0, 0]
    assert [replica.take(at_s, gap=at_s == 39, dropped=14) for at_s in (39, 40)] == [2, 0]


@pytest.mark.parametrize("dropped", [0, 3, 4])
def test_windows_that_begin_anew_soon_after_a_gap_count_it_once(dropped: int) -> None:
    replica = Replica()
    replica.run(0, 6)
    # Those to 8, 10, 12 and 14, of which the decoder has counted some; none closes behind the gap.
    assert replica.take(14.2, gap=True, dropped=dropped) == 4 - dropped, "if this replica dies now, nobody else counts"
    assert replica.run(15.2, 20.2, dropped=dropped) == 1, "the one that began at 14"
    assert [end / SECOND for end in replica.ends] == [2, 4, 6, 17.2, 19.2]


@pytest.mark.parametrize(
    ("at_s", "arrived_s", "goes_on"),
    [
        (7.0, 8.0, True),
        (3606.0, 3607.0, True),
        (15.0, 7.5, True),
        (40.0, 8.0, False),
        (86_406.0, 8.0, False),
        (5.0, 8.0, False),
        (4.0, 8.0, False),
        (-86_400.0, 8.0, False),
    ],
    ids=["a second", "an hour away", "a burst", "ahead", "a day ahead", "repeated", "a second back", "a day back"],
)
def test_a_gap_is_believed_as_far_as_time_went(at_s: float, arrived_s: float, goes_on: bool) -> None:
    replica = Replica()
    replica.run(0, 6)
    frame = replace(sample("a", 0, fresh=False), gap=True, pts=round(at_s * SECOND))
    assert replica.accounting.continues(frame, arrived_s) is goes_on
    assert not replica.accounting.continues(replace(frame, fresh=True, gap=False), arrived_s)
    other = replace(frame.grid, rows=2 * frame.grid.rows)
    assert not replica.accounting.continues(replace(frame, grid=other), arrived_s)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 9)), min_size=1, max_size=8),
    counts=st.booleans(),
)
def test_after_gaps_every_window_due_was_answered_or_counted_once(pieces, counts) -> None:
    """Exactly: a window is due every two seconds since the first frame, whatever is missing."""
    replica = Replica()
    replica.run(0, 5)
    at_s, dropped = 5.0, 0
    for hole_s, frames in pieces:
        if counts:
            # As a decoder counts that drops frames: whole windows behind the one that the replica has begun.
            begun_s = math.ceil(at_s / STRIDE_S - 0.02) * STRIDE_S
            dropped += max(0, math.floor((at_s + hole_s + 0.125 - begun_s) / STRIDE_S))
        at_s += hole_s
        for place in range(frames):
            replica.take(at_s + place, gap=place == 0, dropped=dropped)
        at_s += frames
        # Also of those that end behind the last answer.
        due = math.floor((at_s + 0.125) / STRIDE_S)
        assert len(replica.ends) + sum(replica.lost) + dropped == due
    assert all(end % round(STRIDE_S * SECOND) == 0 for end in replica.ends)


def test_a_camera_that_nobody_brings_back_has_lost_its_windows_until_then() -> None:
    replica = Replica()
    assert replica.accounting.count_abandoned(60.0, STRIDE_S) == 0
    replica.run(0, 7)
    assert replica.accounting.in_progress
    assert replica.accounting.count_abandoned(replica_s := 7.0, STRIDE_S) == 1
    assert replica.accounting.count_abandoned(replica_s + 60, STRIDE_S) == 30


def test_what_the_engine_failed_on_was_counted_with_its_windows() -> None:
    replica = Replica()
    replica.run(0, 7)
    replica.accounting.in_progress = False
    assert replica.run(7.5, 8) == 0


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(1, 9), st.booleans()), min_size=1, max_size=8),
    counts=st.booleans(),
)
def test_every_hole_between_two_answers_is_counted(pieces, counts) -> None:
    """As a load test keeps its books: all whole strides of a hole but the one that the later answer closes."""
    replica = Replica()
    replica.run(0, 5)
    at_s, dropped = 5.0, 0
    for hole_s, frames, answers in pieces:
        at_s += hole_s
        if counts:
            dropped += math.floor(hole_s / STRIDE_S)
        for place in range(frames):
            replica.take(at_s + place, fresh=place == 0, dropped=dropped, answer=answers)
        at_s += frames
    replica.run(at_s + 20, at_s + 25, dropped=dropped)
    ends = [0, *(end / SECOND for end in replica.ends)]
    missing = sum(math.floor((b - a) / STRIDE_S - 0.95 + 1e-9) for a, b in itertools.pairwise(ends))
    counted = sum(replica.lost) + dropped + replica.unanswered
    assert missing <= counted <= missing + 2 * len(pieces) + 2, "a fresh start may cut a window short"
