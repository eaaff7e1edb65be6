import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec.timeline import AnchorRule
from cluster.types import MICROSECONDS


def anchors(
    gop_s: float | None,
    *,
    interval_s: float = 8.0,
    first_s: float | None = None,
    until_s: float = 60.0,
    fps: int = 20,
) -> list[float]:
    """Times of the anchors of a camera with an I-frame every ``gop_s`` (None: only the first), sampled at 2 FPS."""
    rule = AnchorRule(interval_s, MICROSECONDS // 4, first_s)
    taken = []
    step = MICROSECONDS // fps
    for index in range(int(until_s * fps)):
        time = index * step
        if index == 0 or (gop_s is not None and index % round(gop_s * fps) == 0):
            rule.note_intra_picture(time)
        if index % (fps // 2) == 0 and rule.is_anchor(time):
            taken.append(time / MICROSECONDS)
    return taken


@pytest.mark.parametrize(
    ("gop_s", "expected"),
    [
        # Short GOPs do not un-prune the camera.
        (0.5, [0, 8, 16, 24, 32, 40, 48, 56]),
        (2.0, [0, 8, 16, 24, 32, 40, 48, 56]),
        # The first I-frame at least 8 s after the last anchor.
        (3.0, [0, 9, 18, 27, 36, 45, 54]),
        (8.0, [0, 8, 16, 24, 32, 40, 48, 56]),
        # An I-frame between two samples: the next sample.
        (4.3, [0, 9, 17.5, 26, 34.5, 43, 52]),
        # Forced: no second I-frame, or too far apart.
        (None, [0, 8, 16, 24, 32, 40, 48, 56]),
    ],
)
def test_anchors_follow_i_frames_no_closer_than_the_interval(gop_s: float | None, expected: list[float]) -> None:
    assert anchors(gop_s) == expected


@pytest.mark.parametrize(
    ("gop_s", "expected"),
    [
        (2.0, [0, 8, 24, 40, 56]),
        # No anchor is forced before the regular interval: the I-frame is waited for.
        (10.0, [0, 10, 30, 50]),
        (None, [0, 16, 32, 48]),
    ],
)
def test_the_first_interval_can_be_shorter(gop_s: float | None, expected: list[float]) -> None:
    assert anchors(gop_s, interval_s=16.0, first_s=8.0) == expected


def test_a_long_gop_is_cut_by_forced_anchors() -> None:
    taken = anchors(12.5, until_s=100)
    assert all(after - before <= 9 for before, after in itertools.pairwise(taken))


def test_reset_makes_the_next_sample_an_anchor() -> None:
    rule = AnchorRule(8.0, 0)
    rule.note_intra_picture(0)
    assert rule.is_anchor(0)
    assert not rule.is_anchor(1)
    rule.reset()
    assert rule.is_anchor(2)


@settings(deadline=None)
@given(st.floats(0.25, 40), st.floats(1, 20))
def test_anchors_are_never_too_close_nor_too_far(gop_s: float, interval_s: float) -> None:
    taken = anchors(gop_s, interval_s=interval_s, until_s=120)
    gaps = [after - before for before, after in itertools.pairwise(taken)]
    assert taken[0] == 0
    assert all(gap >= interval_s - 0.25 for gap in gaps)
    # At worst an I-frame just missed the interval and the next is waited for, but no longer than one interval more.
    assert all(gap <= 2 * interval_s + 1.0 for gap in gaps)
