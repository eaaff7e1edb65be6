"""Simulated against measured: reading a load test's JSON, and a comparison whose truth is known."""

import json
from dataclasses import asdict

import pytest

from cluster.control.costs import CostModel
from cluster.control.demand import Demand
from cluster.errors import ConfigError
from cluster.lab.city.against import Compared, Run, compare, read_runs, sim_error
from cluster.lab.city.mix import CameraClass, Mix
from cluster.lab.city.plan import FULL

COSTS = CostModel("m", "d", "made", 0.05, 0.3, 0.0, 0.0, 0.0, 0.1, 0.1)


def run_of(*busy: float, count: int = 10, **changes):
    """A run of so many cameras for each share of windows in ``busy``, of one class where there is none."""
    asked = {"frame_tokens": 100, "query_tokens": 10, "anchor_interval_s": 8.0}
    classes = [
        CameraClass.of(Demand(f"class-{index}", busy=each, **asked), count) for index, each in enumerate(busy or [1.0])
    ]
    return {
        "mix": Mix(classes=classes).model_dump(mode="json"),
        "replicas": 1,
        "seconds": 160.0,
        "warmup_s": 16.0,
        "phases": "even",
        "cost": asdict(COSTS),
        "measured": {"lag_p50_s": 0.35, "lag_p99_s": 0.5, "answered_per_s": 1.25},
    } | changes


def busier_than_ever():
    body = run_of()
    body["mix"]["classes"][0]["activity"]["busy"] = 2.0
    return body


def test_runs_are_read_from_either_form(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"city": run_of(), "figures": {}}))
    (one,) = read_runs(path)
    path.write_text(json.dumps({"runs": [run_of(), {"city": run_of(replicas=2), "more": 1}]}))
    assert [run.replicas for run in read_runs(path)] == [1, 2]
    assert one.cameras == 10


def test_evenly_spread_windows_do_not_wait():
    found = compare(Run.model_validate(run_of()), FULL)
    assert found.simulated.lag_p50_s == pytest.approx(0.35, rel=0.03)
    assert found.simulated.computed_per_s == pytest.approx(10 / 8, rel=0.02)
    assert found.errors["lag_p50_s"] <= 0.03
    assert found.error == max(found.errors.values())


def test_phases_decide_the_lag():
    # Ten windows at once in steps of at most eight: the second step waits for the first.
    found = compare(Run.model_validate(run_of(phases="aligned", budget_s=100.0)), FULL, repeats=3)
    assert found.simulated.lag_p50_s == pytest.approx(0.05 + 8 * 0.3, rel=0.1)
    given = compare(Run.model_validate(run_of(phases=[index / 10 for index in range(10)])), FULL)
    assert given.simulated.lag_p50_s == pytest.approx(0.35, rel=0.03)


def test_a_phase_is_its_own_cameras():
    # Cameras whose windows end together, which all stand still, and others, spread evenly, that move: nobody waits.
    phases = [0.0] * 10 + [index / 10 for index in range(10)]
    found = compare(Run.model_validate(run_of(0.0, 1.0, phases=phases, warmup_s=24.0)), FULL)
    assert found.simulated.computed_per_s == pytest.approx(10 / 8, rel=0.02)
    assert found.simulated.lag_p99_s == pytest.approx(0.35, rel=0.4)


def test_the_gate_lets_through_the_measured_share():
    run = Run.model_validate(run_of(0.5, count=40, seconds=400.0))
    assert compare(run, FULL).simulated.computed_per_s == pytest.approx(40 / 8 * 0.5, rel=0.05)


def test_the_error_is_the_median_of_the_worst():
    def with_p99(value):
        body = run_of(measured={"lag_p50_s": 1.0, "lag_p99_s": value, "answered_per_s": 1.0})
        return Compared(Run.model_validate(body), figures)

    figures = compare(Run.model_validate(run_of()), FULL, repeats=1).simulated
    errors = sorted(with_p99(value).error for value in (0.1, 0.2, 40.0))
    assert sim_error([with_p99(value) for value in (40.0, 0.1, 0.2)]) == errors[1]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("nonsense", "not JSON"),
        ("[]", "neither `city` nor `runs`"),
        ('{"runs": []}', "no runs"),
        ('{"runs": null}', "neither `city` nor `runs`"),
        ('{"runs": [7]}', "run 0"),
        ('{"city": {"measured": [1]}}', "run 0: mix: is missing"),
        (json.dumps({"city": run_of(measured={"lag_p50_s": None})}), "no computed windows"),
        (json.dumps({"city": run_of(replicas=0)}), "run 0: replicas"),
        (json.dumps({"city": busier_than_ever()}), "run 0: mix.classes\\[0\\].activity.busy"),
    ],
)
def test_what_is_no_load_test_is_refused(tmp_path, body, complaint):
    path = tmp_path / "load.json"
    path.write_text(body)
    with pytest.raises(ConfigError, match=complaint):
        read_runs(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cost": {"step_s": 1}}, "must be a cost model"),
        ({"phases": "odd"}, "random, even, aligned"),
        ({"phases": [0.5]}, "10 numbers"),
    ],
)
def test_a_run_that_cannot_be_simulated_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        compare(Run.model_validate(run_of(**changes)), FULL)
