"""What a simulated city tells people: when things happened, and which part of the time counts."""

import numpy as np

from cluster.control.costs import CostModel
from cluster.lab.city.city import simulate
from cluster.lab.city.mix import ActivitySection, Burst, CameraClass, Mix
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing, parse_event
from cluster.lab.city.report import city_charts, facts, verdict
from cluster.lab.city.result import Objective

COSTS = CostModel("m", "d", "made", 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
RAIN = Burst(name="rain", every_s=20.0, duration_s=30.0, share=0.5)


def made(seconds=180.0, bin_s=60.0, bursts=(), **changes):
    quiet = CameraClass(name="c", share=1, activity=ActivitySection(busy=0.1))
    plan = CityPlan(
        cameras=4,
        pools=(PoolPlan("made", 2, COSTS),),
        mix=Mix(classes=[quiet], bursts=list(bursts)),
        mix_name="quiet",
        ladder=FULL,
        ladder_name="none",
        timing=Timing(seconds, bin_s=bin_s),
        **{"warmup_s": 30.0} | changes,
    )
    return simulate(plan)


def told(**changes):
    result = made(**changes)
    return dict(facts(result)), result.as_json()


def test_events_stand_at_the_minutes_that_the_charts_have():
    shown, body = told(events=(parse_event("90:kill:1"), parse_event("120:wake:0.5")))
    assert shown["events"] == "minute 1.5: kill 1, minute 2: wake 0.5"
    assert body["events"] == ["90:kill:1", "120:wake:0.5"]
    assert "bursts" not in shown


def test_bursts_that_fell_into_the_time_are_told():
    shown, body = told(bursts=[RAIN])
    assert len(body["bursts"]) >= 1
    first = body["bursts"][0]
    assert first["to_s"] - first["from_s"] == 30.0
    minutes = f"minutes {first['from_s'] / 60:.4g} to {first['to_s'] / 60:.4g}"
    assert shown["bursts"].startswith(f"{minutes}: rain at 50.00 %")


def test_what_does_not_count_is_whole_stretches():
    shown, _ = told(seconds=180.0, bin_s=60.0, warmup_s=70.0)
    assert "3 min; the first 2 min do not count" in shown["time"]
    shown, _ = told(seconds=100.0, bin_s=10.0, warmup_s=15.0)
    assert "100 s; the first 20 s do not count" in shown["time"]


def test_a_stretch_without_windows_is_a_gap_in_the_chart_of_quality():
    drawn = city_charts(made(seconds=60.0, bin_s=1.0, warmup_s=10.0))
    [load] = [figure for figure in drawn if figure.get_label() == "Load and quality"]
    [quality] = [line for line in load.axes[0].get_lines() if line.get_label() == "quality"]
    assert np.isnan(np.array(quality.get_ydata(), dtype=float)).any()


def test_cameras_that_were_refused_are_why_the_objective_is_not_held():
    result = made()
    result.admitted.refused = 1
    assert verdict(result, Objective()).endswith("1 cameras were refused.")
