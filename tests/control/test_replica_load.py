"""What a replica is taken to carry: its predicted load, corrected by reports of seconds of which each is chance."""

import random

import pytest

from cluster.control.ladder import CameraOnLadder
from cluster.control.replica_load import AVERAGE_S, ReplicaLoad
from cluster.types.cameras import Priority


def replica(load: float) -> ReplicaLoad:
    made = ReplicaLoad()
    change_load(made, load)
    return made


def change_load(made: ReplicaLoad, load: float) -> None:
    made.cameras["c"] = CameraOnLadder(Priority.NORMAL, (load,))
    made.changed()


class Engine:
    """Reports once a second what it was given to do, and what of it is left over."""

    def __init__(self, made: ReplicaLoad) -> None:
        self.made = made
        self.second = 0
        self.backlog_s = 0.0
        made.report(0.0, 0.0, 0.0)

    def second_of(self, work_s: float, *, unshared_s: float = 0.0) -> None:
        self.second += 1
        left = self.backlog_s + work_s + unshared_s
        busy = min(1.0, left)
        self.backlog_s = left - busy
        self.made.report(busy, self.backlog_s, float(self.second), unshared_s=unshared_s, settle_s=4.0)


def test_seconds_that_scatter_around_what_was_predicted_correct_nothing() -> None:
    """Work comes in bursts: what one second brings too much the next one lacks."""
    engine = Engine(replica(0.9))
    draw = random.Random(1)
    seen = []
    for _ in range(300):
        share = draw.uniform(0.3, 1.5)
        engine.second_of(share)
        engine.second_of(1.8 - share)
        seen.append(engine.made.ratio)
    assert sum(seen[50:]) / len(seen[50:]) == pytest.approx(1.0, abs=0.05)
    assert max(seen[50:]) < 1.15


def test_strides_of_which_one_part_brings_more_windows_than_the_other_correct_nothing() -> None:
    engine = Engine(replica(0.9))
    seen = []
    for second in range(160):
        engine.second_of(1.2 if second % 16 < 8 else 0.6)
        seen.append(engine.made.ratio)
    assert max(seen[32:]) < 1.05
    assert min(seen[32:]) > 0.95


def test_windows_that_end_together_are_no_overload() -> None:
    """Cameras that started together bring a stride's work at once; heartbeats come a little late."""
    made = replica(0.9)
    made.report(0.0, 0.0, 0.0)
    backlog_s = ended_s = 0.0
    most = 0.0
    for beat in range(1, 300):
        now_s = 1.03 * beat
        work_s = 0.9 * 8.0 * (now_s // 8.0 - ended_s // 8.0)
        busy_s = min(1.03, backlog_s + work_s)
        backlog_s, ended_s = backlog_s + work_s - busy_s, now_s
        made.report(busy_s / 1.03, backlog_s, now_s, settle_s=4.0)
        most = max(most, made.utilisation)
    assert most < 0.97


def test_work_that_was_not_predicted_is_seen_within_seconds_and_forgotten_when_it_is_over() -> None:
    engine = Engine(replica(0.7))
    for _ in range(10):
        engine.second_of(0.7)
    assert engine.made.ratio == pytest.approx(1.0)
    for _ in range(12):
        engine.second_of(1.4)
    assert engine.made.predicted > 1.2
    for _ in range(60):
        engine.second_of(0.7)
    assert engine.made.ratio == pytest.approx(1.0, abs=0.03)


def test_a_correction_fades_at_a_load_at_which_the_replica_is_always_busy() -> None:
    engine = Engine(replica(0.97))
    for _ in range(16):
        engine.second_of(1.3)
    high = engine.made.ratio
    for _ in range(60):
        engine.second_of(0.97)
    assert high > 1.2
    assert engine.made.ratio == pytest.approx(1.0, abs=0.02)


def test_time_that_steps_took_because_they_were_small_is_no_load() -> None:
    engine = Engine(replica(0.5))
    for _ in range(60):
        engine.second_of(0.5, unshared_s=0.3)
    assert engine.made.ratio == pytest.approx(1.0, abs=0.01)


def test_what_came_before_many_cameras_stepped_down_says_nothing_of_those_that_are_left() -> None:
    engine = Engine(replica(1.5))
    for _ in range(6):
        engine.second_of(1.5)
    before = engine.made.ratio
    change_load(engine.made, 0.9)
    for _ in range(3):
        # Windows of before still come.
        engine.second_of(1.5)
    assert engine.made.ratio == pytest.approx(before)
    for _ in range(round(AVERAGE_S) + 5):
        engine.second_of(1.5)
    assert engine.made.ratio > 1.3, "it was not that"


def test_what_came_before_many_cameras_came_does_not_make_them_cheap() -> None:
    engine = Engine(replica(0.3))
    for _ in range(10):
        engine.second_of(0.3)
    change_load(engine.made, 0.8)
    for _ in range(3):
        engine.second_of(0.3)
    assert engine.made.ratio == pytest.approx(1.0)
    for _ in range(20):
        engine.second_of(0.8)
    assert engine.made.ratio == pytest.approx(1.0), "the seconds before were not theirs"


def test_a_backlog_counts_as_far_as_it_lasts_for_a_stride() -> None:
    made = replica(0.5)
    for second in range(8):
        made.report(0.5, 3.0 if second == 4 else 6.0, float(second))
        assert made.utilisation == made.predicted
    made.report(0.5, 6.0, 8.0)
    assert made.utilisation == pytest.approx(made.predicted + 2 / 16)
    for second in range(9, 18):
        made.report(0.5, 30.0, float(second))
    assert made.utilisation == pytest.approx(made.predicted + 0.4)
    made.report(0.5, 0.5, 18.0)
    assert made.utilisation == made.predicted
