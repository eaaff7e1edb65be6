"""Whole simulated cities: nothing goes missing, the same seed gives the same city, and cases worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.control.costs import CostModel
from cluster.control.demand import window_tokens
from cluster.control.ladder import Rung, Step, default
from cluster.errors import ConfigError
from cluster.lab.city.city import carries, simulate, split_districts
from cluster.lab.city.district import District
from cluster.lab.city.mix import MIXES, ActivitySection, CameraClass, Mix
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing, parse_event
from cluster.lab.city.replica import EngineSettings
from cluster.lab.city.report import facts

ALWAYS = ActivitySection(busy=1.0, kept=0.2, spread=0.0)
ALIKE = Mix(classes=[CameraClass(name="c", share=1, static_gate=False, activity=ALWAYS)])
COSTS = CostModel("m", "d", "made", 0.02, 0.6, 0.0, 0.0, 0.0, 0.2, 0.1)


def city(cameras=24, replicas=3, seconds=120.0, mix="city", costs=COSTS, **changes):
    values = {
        "ladder": default(),
        "ladder_name": "default",
        "timing": Timing(seconds, bin_s=30.0),
        "warmup_s": 30.0,
        "mix": MIXES.load(mix) if isinstance(mix, str) else mix,
        "mix_name": str(mix),
    }
    return CityPlan(cameras=cameras, pools=(PoolPlan("made", replicas, costs),), **(values | changes))


def events(*texts):
    return tuple(parse_event(text) for text in texts)


EVENTS = st.lists(
    st.builds(
        lambda at, what: f"{at}:{what}",
        st.integers(0, 110),
        st.sampled_from(["kill:1", "join:1", "join:2", "drain:1", "controller:7", "wake:0.7"]),
    ),
    max_size=4,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cameras=st.integers(1, 60),
    replicas=st.integers(2, 4),
    happening=EVENTS,
    seed=st.integers(0, 9),
    ladder=st.booleans(),
    force=st.booleans(),
    per_controller=st.sampled_from([10, 10_000]),
)
def test_every_window_is_accounted_for(cameras, replicas, happening, seed, ladder, force, per_controller):
    plan = city(
        cameras,
        replicas,
        seed=seed,
        events=events(*happening),
        force=force,
        per_controller=per_controller,
        ladder=default() if ladder else FULL,
    )
    try:
        found = simulate(plan)
    except ConfigError as error:
        assert "replicas are to leave" in str(error)  # noqa: PT017
        return
    assert found.balance.missing == 0
    assert found.balance.expected > 0
    tally = found.tally
    assert (tally.due == tally.gated + tally.answered + tally.dropped.sum(axis=2)).all() == (found.balance.waiting == 0)
    # Nobody is busier than the clock allows.
    assert (tally.busy_s <= tally.capacity_s + 1e-6).all()


def test_the_same_seed_gives_the_same_city():
    plan = city(40, events=events("40:kill:1", "60:join:1"))
    first, again, other = simulate(plan), simulate(plan), simulate(replace(plan, seed=1))
    assert first.figures == again.figures
    assert first.balance == again.balance
    assert other.balance != first.balance


def test_an_idle_city_answers_after_one_step():
    costs = replace(COSTS, spread=0.0)
    found = simulate(city(4, 1, costs=costs, mix=ALIKE, phases=(0.0, 0.25, 0.5, 0.75)))
    # Four windows in eight seconds, spread out: nobody waits.
    assert found.figures.lag_p50_s == pytest.approx(0.62, rel=0.012)
    assert found.figures.lag_p99_s == pytest.approx(0.62, rel=0.012)
    assert found.figures.busy == pytest.approx(4 * 0.62 / 8, rel=0.05)
    assert found.figures.on_time == found.figures.answered == found.figures.quality == 1.0
    assert found.figures.utilisation == pytest.approx(4 * (0.6 + 0.02 / 8) / 8, rel=0.05)


def test_aligned_cameras_wait_for_each_other():
    costs = replace(COSTS, spread=0.0, step_s=0.0)
    engine = EngineSettings(max_batch=1)
    found = simulate(city(10, 1, costs=costs, mix=ALIKE, engine=engine, phases=(0.0,) * 10, ladder=FULL))
    # Ten windows at once, one by one: 0.6, 1.2, ... 6 s.
    assert found.figures.lag_p50_s == pytest.approx(3.0, rel=0.012)
    assert found.figures.lag_p95_s == pytest.approx(6.0, rel=0.012)


def test_a_dead_replicas_windows_are_counted_and_its_cameras_go_on():
    found = simulate(city(24, 3, seconds=240.0, events=events("100:kill:1")))
    lost = found.figures.dropped
    assert lost["replica_lost"] > 0
    last = found.tally.bins - 1
    served = found.tally.answered[last].sum() + found.tally.gated[last].sum() + found.tally.dropped[last].sum()
    assert found.tally.dropped[last, :, -1].sum() == 0, "nobody is sent to a replica that is gone"
    assert served >= 0.9 * found.tally.due[last].sum()


def test_a_drain_loses_nothing():
    found = simulate(city(24, 3, seconds=240.0, events=events("100:drain:1")))
    assert "replica_lost" not in found.figures.dropped
    assert found.tally.moves.sum() > 0


def test_a_drain_of_several_at_once_hands_on_what_one_gave_the_other():
    plan = city(80, 4, seconds=240.0, force=True, ladder=FULL, mix=ALIKE, events=events("100:drain:3"))
    tally = simulate(plan).tally
    open_windows = tally.due - tally.gated - tally.answered - tally.dropped.sum(axis=2)
    assert open_windows[:-1].sum() == 0


def test_a_drain_waits_for_a_controller_that_is_back_within_a_second():
    found = simulate(city(24, 3, events=events("50:controller:5.5", "52:drain:1")))
    assert found.tally.moves.sum() > 0
    assert found.tally.capacity_s[-1] == pytest.approx(2 * found.tally.bin_s)


def test_a_drain_of_the_only_replica_leaves_cameras_without_one():
    found = simulate(city(6, 1, seconds=240.0, events=events("100:drain:1")))
    assert set(found.figures.dropped) == {"no_replica"}


def test_live_cameras_are_not_rebalanced_as_in_production():
    moves = [
        simulate(city(30, 3, mix="night", seconds=240.0, seed=seed, events=events("60:wake:0.5"))).tally.moves.sum()
        for seed in range(3)
    ]
    assert moves == [0, 0, 0]


def test_a_controller_that_was_away_leaves_cameras_where_they_are():
    plan = city(30, 3, seconds=240.0)
    calm, away = simulate(plan), simulate(replace(plan, events=events("100:controller:30")))
    assert away.tally.moves.sum() <= calm.tally.moves.sum() + 2
    assert "replica_lost" not in away.figures.dropped
    assert "no_replica" not in away.figures.dropped


def test_without_replicas_windows_are_dropped_for_that_reason():
    found = simulate(city(6, 1, seconds=240.0, events=events("100:kill:1")))
    assert found.figures.dropped["no_replica"] > 0
    assert found.tally.answered[-1].sum() == 0
    back = simulate(city(6, 1, seconds=240.0, events=events("100:kill:1", "140:join:1")))
    assert back.tally.answered[-1].sum() > 0


def test_overload_is_refused_or_reduced_and_said():
    found = simulate(city(400, 2))
    assert found.admitted.refused > 0
    assert found.admitted.missing_replicas > 0
    assert found.figures.dropped["refused"] > 0
    forced = simulate(city(60, 2, force=True))
    assert forced.admitted.refused == 0


def test_districts_share_cameras_and_replicas_evenly():
    dealt = split_districts(city(25, 7, per_controller=10))
    assert [(each.cameras, each.replicas) for each in dealt] == [(8, 2), (8, 2), (9, 3)]
    assert len(split_districts(city(25, 2, per_controller=10))) == 2


def test_cameras_go_where_they_can_be_carried():
    fast = replace(COSTS, window_s=0.3, step_s=0.01)
    plan = replace(city(90), pools=(PoolPlan("slow", 2, COSTS), PoolPlan("fast", 2, fast)))
    assert [each.cameras for each in split_districts(plan)] == [30, 60]


def test_what_memory_does_not_hold_is_refused_as_in_production():
    """Time would do for twice as many."""
    one = window_tokens(ALIKE.classes[0].demand("c", ALIKE.geometry, 8.0), Rung("full"))
    plan = city(20, 2, mix=ALIKE, costs=replace(COSTS, window_s=0.2, window_tokens=7.5 * one))
    assert carries(ALIKE, plan.pools[0].costs, 8.0)[1] == pytest.approx(7.5)
    found = simulate(plan)
    assert (found.admitted.refused, found.figures.dropped["refused"] > 0) == (5, True)
    told = dict(facts(found))
    assert "holds the windows of 8: memory binds" in told["limit"]
    assert told["admission"].endswith("5 refused, whose windows do not fit into the replicas' memory")
    free = simulate(replace(plan, events=events("60:controller:5"), pools=(PoolPlan("made", 3, plan.pools[0].costs),)))
    assert free.admitted.refused == 0
    boundless = simulate(city(20, 2, mix=ALIKE, costs=replace(COSTS, window_s=0.2)))
    assert boundless.admitted.refused == 0
    assert dict(facts(boundless))["limit"].endswith("no memory limit, so memory is not counted")


def test_mean_load_is_what_a_pool_has_to_carry():
    mix = MIXES.load("steady")
    assert 1 / carries(mix, COSTS, 8.0)[0] == pytest.approx((0.6 + 0.02 / 8) / 8)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"warmup_s": 500.0}, "warm-up"),
        ({"events": events("500:kill:1")}, "after the end"),
        ({"events": events("5:kill:9")}, "replicas are to leave, of 3"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        simulate(city(**changes))


def test_a_burst_wakes_quiet_cameras():
    plan = city(60, 6, mix="night", seconds=300.0)
    calm, woken = simulate(plan), simulate(replace(plan, events=events("150:wake:1")))
    before = np.s_[:4]
    assert (calm.tally.due[before] == woken.tally.due[before]).all()
    assert woken.tally.answered[5:8].sum() > 2 * calm.tally.answered[5:8].sum()


def test_a_window_that_a_shorter_stride_ends_in_the_past_is_not_late(monkeypatch):
    """It closes with the next frame, in production too; its answer counted as late by what was left of the old one."""
    plan = city(1, mix=ALIKE, costs=replace(COSTS, window_s=1.5, spread=0.0), timing=Timing(50.0))
    kinds, costs = np.zeros(1, dtype=np.int64), plan.pools[0].costs
    district = District(plan, kinds, replicas=1, costs=costs, seed=(0,), phases=[0.0])
    # Windows of 16 s end at 16 and 32 s; one second before, they are of 8 again: one ended at 24 s, the next at 32 s.
    at = {7.0: (0, 3), 31.0: (3, 0)}
    take = lambda now_s: [Step(district.names[0], *at[now_s], "", now_s)] if now_s in at else []  # noqa: E731
    monkeypatch.setattr(district.fleet, "tick", take)
    district.run()
    tally = district.tally
    assert (tally.due.sum(), tally.answered.sum(), tally.on_time.sum()) == (5, 5, 5)
