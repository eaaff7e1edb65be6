"""One simulated replica against closed forms of queueing theory and cases worked out by hand."""

import numpy as np
import pytest

from cluster.control.costs import CostModel
from cluster.lab.city.replica import Arrival, EngineSettings, Facts, Outcome, Replica
from cluster.types.cameras import Priority


def window(at_s, camera, stride_s, expected_s, work_s, **more):
    return Arrival(f"c{camera}", camera, at_s, stride_s, expected_s, work_s, **more)


def cameras(arrivals):
    return [arrival.camera for arrival in arrivals]


def ends(arrivals):
    return [arrival.arrived_s for arrival in arrivals]


def costs(**changes):
    values = {"step_s": 0.0, "window_s": 1.0, "encoded_s": 0.0, "computed_s": 0.0, "attended_s": 0.0}
    return CostModel("m", "d", "made", **(values | {"spread": 0.0, "error": 0.0} | changes))


def facts(count, priority=Priority.NORMAL, late_s=1e12):
    return Facts([priority] * count, [late_s] * count)


def replica(count, settings, **changes):
    return Replica(costs(**changes), settings, facts(count), np.random.default_rng(3))


ONE_BY_ONE = EngineSettings(max_batch=1, per_stream=10**6)


def waits(times, work):
    """Mean wait before a step of windows one by one, each camera sending one."""
    one = replica(len(times), ONE_BY_ONE)
    out = Outcome()
    both = enumerate(zip(times, work, strict=True))
    # Their deadlines pass, after which the queue forgets a camera: it would go through all of them at every step.
    arrivals = [window(at, row, 1.0, takes, takes) for row, (at, takes) in both]
    one.run(arrivals, 0.0, times[-1] + 1e6, out)
    rows = np.array(cameras(out.answered))
    assert len(rows) == len(times)
    return float((np.array(out.finish_s) - np.array(times)[rows] - np.array(work)[rows]).mean())


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mean_wait_is_pollaczek_khinchines_for_constant_work(load):
    times = np.cumsum(np.random.default_rng(7).exponential(1 / load, 20_000)).tolist()
    assert waits(times, [1.0] * len(times)) == pytest.approx(load / (2 * (1 - load)), rel=0.06)


def test_mean_wait_is_pollaczek_khinchines_for_any_work():
    rng, load, spread = np.random.default_rng(8), 0.5, 0.7
    work = rng.lognormal(-spread * spread / 2, spread, 30_000)
    times = np.cumsum(rng.exponential(1 / load, len(work)))
    second_moment = np.exp(spread * spread)
    expected = load * second_moment / (2 * (1 - load))
    assert waits(times.tolist(), work.tolist()) == pytest.approx(expected, rel=0.08)


def test_windows_that_come_while_a_step_runs_share_the_next():
    one = replica(4, EngineSettings(max_batch=8, budget_s=100.0), step_s=0.5)
    out = Outcome()
    arrivals = [window(at, row, 10.0, 1.0, 1.0) for row, at in enumerate([0.0, 0.2, 0.4, 5.0])]
    one.run(arrivals, 0.0, 10.0, out)
    # 0.5 + 1, then 0.5 + 2 of the two that waited, then idle until the last.
    assert list(zip(cameras(out.answered), out.finish_s, strict=True)) == [(0, 1.5), (1, 4.0), (2, 4.0), (3, 6.5)]


def test_a_step_keeps_to_its_budget():
    one = replica(3, EngineSettings(max_batch=8, budget_s=1.5))
    out = Outcome()
    one.run([window(0.0, row, 10.0, 1.0, 1.0) for row in range(3)], 0.0, 10.0, out)
    assert out.finish_s == [1.0, 2.0, 3.0]


def test_cutting_time_into_ticks_changes_nothing():
    times = np.sort(np.random.default_rng(2).uniform(0, 40, 50)).tolist()
    arrivals = [window(at, row, 8.0, 0.7, 0.7) for row, at in enumerate(times)]
    settings = EngineSettings(max_batch=4, budget_s=2.0)
    whole, parts = Outcome(), Outcome()
    replica(50, settings, step_s=0.1, spread=0.3).run(arrivals, 0.0, 100.0, whole)
    cut = replica(50, settings, step_s=0.1, spread=0.3)
    for tick in range(50):
        cut.run([a for a in arrivals if 2 * tick <= a.arrived_s < 2 * tick + 2], 2.0 * tick, 2.0 * tick + 2, parts)
    assert whole.finish_s == pytest.approx(parts.finish_s)
    assert whole.answered == parts.answered


def test_a_step_under_way_is_answered_when_it_ends():
    one = replica(1, EngineSettings())
    first, second = Outcome(), Outcome()
    one.run([window(1.5, 0, 8.0, 1.0, 1.0)], 0.0, 2.0, first)
    assert first.answered == []
    assert one.waiting == 1
    assert one.spend(2.0, 2.0) == pytest.approx(0.5)
    one.run([], 2.0, 4.0, second)
    assert (cameras(second.answered), second.finish_s) == ([0], [2.5])
    assert one.spend(4.0, 2.0) == pytest.approx(0.5)
    assert one.busy_share == pytest.approx(0.25)
    assert one.waiting == 0


def test_the_newest_window_of_a_camera_replaces_its_oldest():
    one = replica(2, EngineSettings(max_batch=1, per_stream=1))
    out = Outcome()
    arrivals = [window(0.0, 0, 8.0, 1.0, 5.0), *(window(0.5 + i, 1, 8.0, 1.0, 1.0) for i in range(3))]
    one.run(arrivals, 0.0, 20.0, out)
    assert ends(out.answered) == [0.0, 2.5]
    assert {reason: ends(gone) for reason, gone in out.dropped.items()} == {"replaced": [0.5, 1.5]}


def test_windows_that_leave_a_replica_are_handed_over():
    one = replica(2, EngineSettings(max_batch=1))
    out = Outcome()
    one.run([window(0.0, 0, 8.0, 1.0, 5.0), window(0.5, 1, 8.0, 1.0, 1.0)], 0.0, 2.0, out)
    assert one.backlog_s(2.0) == pytest.approx(3.0 + 1.0)
    assert cameras(one.release("c1")) == [1]
    assert one.backlog_s(2.0) == pytest.approx(3.0)
    assert cameras(one.die(["c0", "c1"])) == [0]


def test_the_next_window_takes_in_what_a_dropped_one_had():
    one = replica(2, EngineSettings(max_batch=1, per_stream=1))
    out = Outcome()
    arrivals = [window(0.0, 0, 8.0, 1.0, 5.0)]
    arrivals += [window(0.5 + i, 1, 8.0, 1.0, 1.0, strides=1.0, more_s=0.25) for i in range(3)]
    one.run(arrivals, 0.0, 20.0, out)
    assert {reason: ends(gone) for reason, gone in out.dropped.items()} == {"replaced": [0.5, 1.5]}
    assert out.finish_s == [5.0, 6.5]
    assert out.unencoded == []


def test_what_nobody_takes_in_is_unencoded():
    lone = Replica(costs(), EngineSettings(max_batch=1), facts(2, late_s=3.0), np.random.default_rng(3))
    out = Outcome()
    lone.run([window(0.0, 0, 8.0, 1.0, 5.0), window(0.5, 1, 8.0, 1.0, 1.0)], 0.0, 20.0, out)
    assert out.dropped == {"late": out.unencoded}
    assert cameras(out.unencoded) == [1]
