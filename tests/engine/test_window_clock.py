"""Which windows close when, and what they hold."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.window.windows import LOOKBACK, WindowClock, WindowSpan, covered_until, opening_index, window_time

SECOND = 1_000_000


@dataclass(frozen=True)
class Frame:
    pts: int
    complete: bool = False
    duration: int = SECOND


def clock(window: int = 8, stride: int = 2, origin: int = 0) -> WindowClock:
    made = WindowClock(window * SECOND, stride * SECOND)
    made.restart(origin)
    return made


def test_windows_grow_until_a_full_one_exists_and_then_slide() -> None:
    state = clock()
    spans = [span for second in range(12) for span in clock_feed(state, second)]
    assert [(s.number, s.start // SECOND, s.end // SECOND) for s in spans] == [
        (0, 0, 2),
        (1, 0, 4),
        (2, 0, 6),
        (3, 0, 8),
        (4, 2, 10),
        (5, 4, 12),
    ]


def clock_feed(state: WindowClock, second: int) -> list[WindowSpan]:
    frame = Frame(second * SECOND)
    return state.close(window_time(frame) + frame.duration, covered_until(frame))


def test_a_window_closes_with_its_last_expected_frame() -> None:
    state = clock()
    assert clock_feed(state, 0) == []
    assert [span.number for span in clock_feed(state, 1)] == [0]


def test_a_jump_closes_only_windows_whose_stride_has_video() -> None:
    state = clock()
    day = 86_400 * SECOND
    closed = state.close(day, covered_until(Frame(1 * SECOND)))
    assert [span.end // SECOND for span in closed] == [2]
    # Numbers follow time: what lies between was passed over, and the next window is the one under way.
    assert state.end > day
    assert state.end - day <= state.stride
    assert state.number == (state.end - 0) // state.stride - 1


def test_numbers_go_on_after_a_restart() -> None:
    state = clock()
    state.close(4 * SECOND, 4 * SECOND)
    state.restart(100 * SECOND)
    (span,) = state.close(102 * SECOND, 102 * SECOND)
    assert span == WindowSpan(2, 100 * SECOND, 102 * SECOND)


def test_new_lengths_start_from_the_last_closed_window() -> None:
    state = clock()
    state.close(4 * SECOND, 4 * SECOND)
    state.change_lengths(6 * SECOND, 3 * SECOND)
    (span,) = state.close(7 * SECOND, 7 * SECOND)
    assert span == WindowSpan(2, 1 * SECOND, 7 * SECOND)


@pytest.mark.parametrize("jitter", [-60_000, -1, 0, 1, 60_000])
def test_clock_rounding_moves_no_frame_to_another_window(jitter: int) -> None:
    frame = Frame(8 * SECOND + jitter)
    assert window_time(frame) >= 8 * SECOND
    assert window_time(Frame(7 * SECOND + jitter)) < 8 * SECOND
    assert opening_index([Frame(7 * SECOND), Frame(8 * SECOND + jitter, complete=True)], 8 * SECOND) == 1


def test_a_window_opens_at_the_last_complete_frame_at_or_before_its_start() -> None:
    frames = [Frame(second * SECOND, complete=second in (0, 3, 9)) for second in range(12)]
    assert [opening_index(frames, start * SECOND) for start in (0, 2, 3, 4, 8, 9, 11)] == [0, 0, 3, 3, 3, 9, 9]


def test_without_a_complete_frame_in_reach_a_window_opens_at_its_start() -> None:
    assert opening_index([Frame(s * SECOND) for s in range(5)], 2 * SECOND) == 2
    assert opening_index([], 0) == 0
    assert opening_index([Frame(0)], 5 * SECOND) == 1
    far = LOOKBACK // SECOND + 10
    frames = [Frame(s * SECOND, complete=s == 0) for s in range(far)]
    assert opening_index(frames, (far - 2) * SECOND) == far - 2


@settings(deadline=None)
@given(start=st.integers(0, 60), complete=st.sets(st.integers(0, 59)), gaps=st.sets(st.integers(0, 59)))
def test_opening_against_its_definition(start: int, complete: set[int], gaps: set[int]) -> None:
    frames = [Frame(s * SECOND, complete=s in complete) for s in range(60) if s not in gaps]
    index = opening_index(frames, start * SECOND)
    reachable = [i for i, f in enumerate(frames) if f.complete and start - 30 <= f.pts // SECOND <= start]
    if reachable:
        assert index == reachable[-1]
    else:
        assert index == sum(f.pts // SECOND < start for f in frames)


@settings(deadline=None)
@given(
    pts=st.lists(st.integers(0, 400 * SECOND), min_size=1, max_size=60, unique=True).map(sorted),
    window=st.integers(1, 20),
    stride=st.integers(1, 20),
)
def test_every_closed_window_has_video_in_its_stride_and_numbers_follow_time(
    pts: list[int], window: int, stride: int
) -> None:
    stride = min(stride, window)
    state = clock(window, stride, origin=pts[0])
    closed: list[WindowSpan] = []
    video: int | None = None
    for stamp in pts:
        frame = Frame(stamp)
        closed += state.close(window_time(frame), video)
        video = covered_until(frame)
        until = window_time(frame) + frame.duration
        closed += state.close(until, until)
    for span in closed:
        assert span.end == pts[0] + (span.number + 1) * stride * SECOND
        assert any(p + SECOND > span.end - stride * SECOND and p < span.end for p in pts)
        assert span.start == max(pts[0], span.end - window * SECOND)
    numbers = [span.number for span in closed]
    assert numbers == sorted(set(numbers))
    # None is passed over in which a frame begins; the last may still be open.
    begun = {(window_time(Frame(stamp)) - pts[0]) // (stride * SECOND) for stamp in pts}
    assert {number for number in begun if number < state.number} <= set(numbers)
