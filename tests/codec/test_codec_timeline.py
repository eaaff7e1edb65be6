import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec.timeline import Sampling, Timeline
from cluster.types import MICROSECONDS

FRAME = 40_000


def times(*pts: int | None) -> list[int | None]:
    timeline = Timeline()
    return [timeline.place_picture(each) for each in pts]


def test_a_steady_clock_passes_unchanged() -> None:
    assert times(*range(7, 10 * FRAME, FRAME)) == list(range(7, 10 * FRAME, FRAME))


def test_missing_times_continue_at_the_usual_interval() -> None:
    assert times(0, FRAME, None, None, 4 * FRAME) == [0, FRAME, 2 * FRAME, 3 * FRAME, 4 * FRAME]


def test_the_first_times_may_be_missing() -> None:
    assert times(None, None, 900, 900 + FRAME) == [None, None, 900, 900 + FRAME]


def test_a_stream_without_any_clock_counts_from_zero() -> None:
    got = times(*[None] * 30)
    assert got == [None] * 25 + [0, FRAME, 2 * FRAME, 3 * FRAME, 4 * FRAME]


def test_a_repeated_moment_is_passed_over() -> None:
    assert times(0, FRAME, FRAME, 0, 2 * FRAME) == [0, FRAME, None, None, 2 * FRAME]


def test_a_stuck_clock_is_taken_for_none() -> None:
    got = times(*[5] * 30)
    assert got == [5] + [None] * 25 + [5 + FRAME, 5 + 2 * FRAME, 5 + 3 * FRAME, 5 + 4 * FRAME]


def test_a_clock_stays_stuck_however_long() -> None:
    timeline = Timeline()
    got = [(timeline.place_picture(pts), timeline.jumped) for pts in [0, FRAME] + [FRAME] * 500]
    placed = [0, FRAME] + [None] * 25 + [FRAME * (2 + index) for index in range(475)]
    assert got == [(time, False) for time in placed]
    # It runs again, from where it stood: what was filled in is known to be wrong.
    runs = [(timeline.place_picture(FRAME + FRAME * (1 + index)), timeline.jumped) for index in range(40)]
    assert runs[:24] == [(FRAME * (477 + index), False) for index in range(24)]
    assert runs[24:] == [(FRAME * (26 + index), index == 0) for index in range(16)]


def test_jumps_are_told_and_accepted() -> None:
    for there in (11 * MICROSECONDS, -2 * MICROSECONDS):
        timeline = Timeline()
        timeline.place_picture(0)
        assert timeline.place_picture(there) == there
        assert timeline.jumped
        assert timeline.place_picture(there + FRAME) == there + FRAME
        assert not timeline.jumped


def test_a_pause_is_no_jump() -> None:
    timeline = Timeline()
    for pts in (0, FRAME, 9 * MICROSECONDS):
        timeline.place_picture(pts)
        assert not timeline.jumped
    # Nor does it stretch the interval at which missing times continue.
    assert 0 < timeline.place_picture(None) - 9 * MICROSECONDS < 2 * FRAME


def test_where_video_is_missing_the_next_picture_may_be_any_time_ahead_but_only_that_one() -> None:
    timeline = Timeline()
    timeline.place_picture(0)
    timeline.resume()
    told = [(timeline.place_picture(at_s * MICROSECONDS), timeline.jumped) for at_s in (60, 120)]
    assert told == [(60 * MICROSECONDS, False), (120 * MICROSECONDS, True)]


def test_where_video_and_times_are_missing_some_pictures_are_skipped() -> None:
    timeline = Timeline()
    timeline.place_picture(0)
    timeline.place_picture(FRAME)
    timeline.resume()
    assert [timeline.place_picture(None) for _ in range(27)] == [None] * 25 + [2 * FRAME, 3 * FRAME]


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(-(2**62), 2**62) | st.integers(0, 10**6), max_size=80))
def test_times_only_grow_except_at_told_jumps(pts: list[int | None]) -> None:
    timeline = Timeline()
    last = None
    for each in pts:
        time = timeline.place_picture(each)
        if time is None:
            continue
        assert last is None or timeline.jumped or time > last
        last = time


def test_samples_stand_on_one_grid() -> None:
    sampling = Sampling(2.0)
    # 12.5 frames a second: half a second is 6.25 frames, so the distance alternates and never drifts.
    taken = [index for index in range(126) if sampling.is_sample(index * 80_000)]
    assert len(taken) == 21
    assert {after - before for before, after in itertools.pairwise(taken)} == {6, 7}
    assert taken[-1] in (125, 124)


def test_a_slower_camera_gives_every_frame() -> None:
    sampling = Sampling(2.0)
    assert all(sampling.is_sample(index * MICROSECONDS) for index in range(10))


def test_a_frame_a_little_early_is_the_ticks_own() -> None:
    sampling = Sampling(2.0)
    assert [sampling.is_sample(time) for time in (0, 499_990, 500_010, 999_999)] == [True, True, False, True]


@settings(deadline=None)
@given(
    st.floats(0.2, 30), st.lists(st.integers(1, 2_000_000), min_size=1, max_size=200), st.integers(-(10**12), 10**12)
)
def test_there_is_at_most_one_sample_per_tick_and_none_is_missed(fps: float, steps: list[int], start: int) -> None:
    sampling = Sampling(fps)
    time, first = start, None
    last_tick = -1
    for step in steps:
        first = time if first is None else first
        tick = (time + sampling.period // 20 - first) // sampling.period
        assert sampling.is_sample(time) == (tick > last_tick)
        last_tick = max(last_tick, tick)
        time += step


def test_another_rate_begins_at_the_tick_that_comes_next() -> None:
    sampling = Sampling(2.0)
    taken = []
    for time in range(0, 8 * MICROSECONDS, 100_000):
        if time == 1_200_000:
            sampling.change_fps(1.0)
        if time == 5_200_000:
            sampling.change_fps(4.0)
        if sampling.is_sample(time):
            taken.append(time / MICROSECONDS)
    assert taken[:6] == [0, 0.5, 1.0, 1.5, 2.5, 3.5]
    # 4 Hz does not fit into 10 pictures a second: the first at or after each tick.
    assert taken[6:] == [4.5, 5.5, 5.8, 6.0, 6.3, 6.5, 6.8, 7.0, 7.3, 7.5, 7.8]
