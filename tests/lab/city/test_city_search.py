"""Searching for the fewest replicas or the most cameras, and what a study makes of a question."""

from dataclasses import replace

import pytest

from cluster.control.costs import CostModel
from cluster.control.demand import window_tokens
from cluster.control.ladder import Rung
from cluster.errors import ConfigError, SightlineError
from cluster.lab.city.mix import MIXES
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing, parse_event
from cluster.lab.city.result import Objective
from cluster.lab.city.study import Search, StudyProgress, study

# A window and its part of a full step take 0.8 s: of strides of 8 s one replica has at most ten.
COSTS = CostModel("m", "d", "made", 0.0, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0)
OBJECTIVE = Objective(quality=0.9)


def plan(cameras=1, replicas=1, **changes):
    values = {
        "mix": MIXES.load("steady"),
        "mix_name": "steady",
        "ladder": FULL,
        "ladder_name": "none",
        "timing": Timing(200.0, bin_s=20.0),
        "warmup_s": 40.0,
    }
    return CityPlan(cameras=cameras, pools=(PoolPlan("made", replicas, COSTS),), **(values | changes))


def test_the_most_cameras_of_a_pool():
    search = Search(plan(replicas=2), OBJECTIVE, seconds=160.0)
    found = search.most_cameras()
    assert 16 <= found.plan.cameras <= 20
    assert OBJECTIVE.met(found.figures)
    more = [trial for trial in search.trials if trial.cameras == found.plan.cameras + 1]
    assert more, "the next count was tried"
    assert not more[0].met


def test_the_fewest_replicas_for_cameras():
    search = Search(plan(cameras=35), OBJECTIVE, seconds=160.0)
    found = search.least_replicas()
    assert 4 <= found <= 5
    assert {trial.met for trial in search.trials if trial.replicas == found} == {True}
    assert any(trial.replicas == found - 1 and not trial.met for trial in search.trials)


def test_memory_bounds_both_searches():
    mix = MIXES.load("steady")
    one = window_tokens(mix.classes[0].demand("c", mix.geometry, 8.0), Rung("full"))
    pools = (PoolPlan("made", 2, replace(COSTS, window_s=0.1, window_tokens=4.5 * one)),)
    assert Search(replace(plan(), pools=pools), OBJECTIVE, seconds=60.0).most_cameras().plan.cameras == 9
    assert Search(replace(plan(cameras=35), pools=pools), OBJECTIVE, seconds=60.0).least_replicas() == 8


def test_stretches_of_a_long_time_do_not_take_in_a_trials_warm_up():
    day = plan(replicas=1, timing=Timing(24 * 3600.0, bin_s=1440.0))
    found = Search(day, OBJECTIVE, seconds=160.0).most_cameras()
    assert found.first * found.tally.bin_s == pytest.approx(day.warmup_s, rel=0.7)


def test_one_replica_may_be_enough():
    assert Search(plan(cameras=1), OBJECTIVE, seconds=60.0).least_replicas() == 1


def test_districts_that_are_alike_are_searched_once():
    search = Search(plan(cameras=105, per_controller=35), OBJECTIVE, seconds=160.0)
    assert search.least_replicas() in (12, 15)
    assert {trial.cameras for trial in search.trials} == {35}


def test_a_study_of_cameras_makes_the_pool_larger_when_the_rest_of_the_time_asks_for_it():
    calm = study(plan(cameras=16), OBJECTIVE, cameras=True, replicas=False)
    assert calm.fewer
    assert calm.figures["replicas_at_objective"] == 2
    hit = plan(cameras=16, events=(parse_event("100:kill:1"),))
    assert study(hit, OBJECTIVE, cameras=True, replicas=False).result.plan.replicas > 2


def test_a_number_that_does_not_hold_is_no_figure():
    told = []
    bad = [f"{at}:kill:2" for at in range(50, 190, 20)] + [f"{at}:join:2" for at in range(55, 190, 20)]
    doomed = plan(cameras=12, events=tuple(map(parse_event, bad)))
    never = study(doomed, OBJECTIVE, cameras=True, replicas=False, progress=StudyProgress(begins=told.append))
    assert "replicas_at_objective" not in never.figures
    assert told[1:] == [f"12 cameras on {count} replicas" for count in range(2, 8)], "each a larger pool"


def test_an_objective_that_cannot_be_held_is_said():
    slow = replace(COSTS, window_s=20.0)
    one = replace(plan(), pools=(PoolPlan("slow", 1, slow),))
    with pytest.raises(SightlineError, match="1 replicas do not meet the objective for 1 cameras"):
        Search(one, OBJECTIVE, seconds=60.0).most_cameras()


def test_the_fewest_of_several_kinds_is_no_question():
    two = replace(plan(), pools=(PoolPlan("a", 1, COSTS), PoolPlan("b", 1, COSTS)))
    with pytest.raises(ConfigError, match="one kind only"):
        Search(two, OBJECTIVE).least_replicas()


def test_a_study_of_both_numbers_simulates_them():
    begun = []
    found = study(plan(12, 2), OBJECTIVE, cameras=True, replicas=True, progress=StudyProgress(begins=begun.append))
    assert found.as_json()["cameras"] == 12
    assert found.as_json()["met"] is True
    assert found.as_json()["balance"]["missing"] == 0
    assert begun == ["12 cameras"]


def test_a_study_without_numbers_is_refused():
    with pytest.raises(ConfigError, match="or both"):
        study(plan(), OBJECTIVE, cameras=False, replicas=False)


def test_a_study_of_a_pool_says_how_it_scales():
    found = study(plan(replicas=3), OBJECTIVE, cameras=False, replicas=True)
    figures = found.as_json()["figures"]
    assert figures["streams_at_objective"] == found.result.plan.cameras
    assert figures["streams_per_replica"] == pytest.approx(found.result.plan.cameras / 3)
    assert 0.8 <= figures["scaling_efficiency"] <= 1.2
    assert 0.8 <= figures["utilisation_at_objective"] <= 1.0
