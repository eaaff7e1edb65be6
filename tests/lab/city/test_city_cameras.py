"""When simulated cameras' windows end, which of them the gate holds, and what wakes them."""

import numpy as np
import pytest

from cluster.engine.window import windows
from cluster.lab.city.cameras import FIRST_WINDOWS, Cameras
from cluster.lab.city.mix import (
    ActivitySection,
    Burst,
    BurstEffect,
    BurstPeriod,
    CameraClass,
    GeometrySection,
    Mix,
    spells,
    wakes,
)


def camera_class(**changes):
    values = {"busy": 1.0, "dwell_s": 60.0} | {k: changes.pop(k) for k in ("busy", "dwell_s") if k in changes}
    return CameraClass(name="c", share=1, activity=ActivitySection(**values), **changes)


def cameras(count=1, **changes):
    made = Cameras([camera_class(**changes)], np.zeros(count, dtype=np.int64), hour=0.0, rng=np.random.default_rng(5))
    for index in range(count):
        made.start(index, 0.0, 0.25)
    return made


def test_the_gate_is_the_engines():
    assert windows.FIRST_WINDOWS == FIRST_WINDOWS


def test_windows_end_at_the_phase_of_every_stride():
    made = cameras(stride_s=8.0)
    ends = [end for tick in range(15) for end in made.due(2.0 * (tick + 1), ()).end_s.tolist()]
    assert ends == [10.0, 18.0, 26.0]


def test_a_long_tick_returns_every_window_in_order():
    made = cameras(3, stride_s=2.0)
    due = made.due(7.0, ())
    assert due.end_s.tolist() == sorted(due.end_s.tolist())
    assert np.bincount(due.camera).tolist() == [3, 3, 3]


def test_a_longer_stride_begins_with_the_next_window():
    made = cameras(stride_s=8.0)
    made.due(11.0, ())
    made.stretch(0, 2.0)
    due = made.due(60.0, ())
    assert due.end_s.tolist() == [26.0, 42.0, 58.0]
    assert due.stride_s.tolist() == [16.0] * 3
    made.stretch(0, 1.0)
    assert made.due(75.0, ()).end_s.tolist() == [66.0, 74.0]


def test_a_camera_that_begins_anew_keeps_its_phase_and_its_windows_grow():
    made = cameras(stride_s=8.0, window_s=24.0)
    assert made.due(50.0, ()).held.tolist() == [1.0, 2.0, 3.0, 3.0, 3.0]
    made.start(0, 51.0, 0.25)
    due = made.due(90.0, ())
    assert (due.end_s.tolist(), due.held.tolist()) == ([66.0, 74.0, 82.0], [1.0, 2.0, 3.0])


def test_a_quiet_camera_is_computed_twice_at_first_and_then_once_in_max_idle():
    made = cameras(stride_s=8.0, busy=0.0, max_idle_s=20.0)
    due = made.due(100.0, ())
    # Windows end at 10, 18, ...; an answer stands at most 20 s, so the third window after it is computed.
    assert due.end_s[~due.gated].tolist() == [10.0, 18.0, 42.0, 66.0, 90.0]
    assert due.strides[~due.gated].tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_cameras_that_became_quiet_together_are_computed_at_different_times():
    due = cameras(300, stride_s=8.0, busy=0.0, max_idle_s=60.0).due(83.0, ())
    # Answers stand 40 to 60 s from the second windows' end at 18 s on: until 66 s where less than 48, 74 s where less
    # than 56.
    again, count = np.unique(due.end_s[~due.gated & (due.end_s > 18.0)], return_counts=True)
    assert again.tolist() == [66.0, 74.0, 82.0]
    assert count == pytest.approx([120, 120, 60], abs=3)


def test_without_the_gate_everything_is_computed():
    due = cameras(stride_s=8.0, busy=0.0, static_gate=False).due(100.0, ())
    assert not due.gated.any()


def test_a_dropped_window_is_made_up_for():
    made = cameras(stride_s=8.0, busy=0.0, max_idle_s=1000.0)
    made.due(20.0, ())
    made.dropped(np.array([0]), np.array([18.0]), np.array([1.0]))
    due = made.due(38.0, ())
    assert due.gated.tolist() == [False, True]
    assert due.strides[0] == 2.0


def test_no_window_takes_in_more_than_it_is_long():
    made = cameras(stride_s=8.0, window_s=24.0, busy=0.0, max_idle_s=100.0)
    due = made.due(400.0, ())
    assert due.strides.max() == 3.0


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_the_busy_share_is_stationary_and_stretches_are_as_long_as_said(share):
    made = cameras(400, stride_s=8.0, busy=share, dwell_s=40.0, max_idle_s=1e6)
    due = made.due(4000.0, ())
    assert (~due.gated).mean() == pytest.approx(share, abs=0.02)
    order = np.lexsort((due.end_s, due.camera))
    busy, camera = ~due.gated[order], due.camera[order]
    same = camera[1:] == camera[:-1]
    fell = (~busy[1:] & busy[:-1] & same).sum() / (busy[:-1] & same).sum()
    # Exact for the chain sampled every stride: P(quiet | busy) = (1 - b) (1 - exp(-s / ((1 - b) d))).
    assert fell == pytest.approx((1 - share) * (1 - np.exp(-8.0 / ((1 - share) * 40.0))), rel=0.05)


@pytest.mark.parametrize("changes", [{"busy": 0.5, "dwell_s": 45.0}, {"busy": 0.08, "dwell_s": 30.0, "stride_s": 16.0}])
def test_a_class_demands_what_its_cameras_show(changes):
    due = cameras(400, **changes).due(6000.0, ())
    wanted = camera_class(**changes).demand("c", GeometrySection(), 0.0)
    order = np.lexsort((due.end_s, due.camera))
    gated, same = due.gated[order], np.diff(due.camera[order]) == 0
    assert (~gated).mean() == pytest.approx(wanted.busy, rel=0.03)
    resumed = (gated[:-1] & ~gated[1:] & same).sum()
    assert resumed / (~gated).sum() == pytest.approx(wanted.resumed, rel=0.03)
    assert gated.sum() / resumed == pytest.approx(wanted.gated, rel=0.03)


def test_a_wake_makes_its_cameras_busy_while_it_lasts():
    made = cameras(2, stride_s=8.0, busy=0.0, max_idle_s=1000.0)
    made.due(24.0, ())
    due = made.due(60.0, [BurstEffect(25.0, 45.0, np.array([True, False]))])
    assert due.end_s[~due.gated].tolist() == [26.0, 34.0, 42.0]
    assert set(due.camera[~due.gated].tolist()) == {0}


def test_spells_come_as_often_as_the_mix_says_and_reach_its_classes():
    classes = [camera_class(), camera_class().model_copy(update={"name": "d"})]
    burst = Burst(name="rain", every_s=100.0, duration_s=10.0, share=0.5, classes=("d",))
    mix = Mix(classes=classes, bursts=[burst])
    found = spells(mix, 200_000.0, np.random.default_rng(1))
    assert len(found) == pytest.approx(2000, rel=0.08)
    kinds = np.arange(4000) % 2
    reached = wakes([BurstPeriod("rain", 0.0, 10.0, 0.5, frozenset({1}))], kinds, np.random.default_rng(2))[0]
    assert not reached.cameras[kinds == 0].any()
    assert reached.cameras[kinds == 1].mean() == pytest.approx(0.5, abs=0.04)
