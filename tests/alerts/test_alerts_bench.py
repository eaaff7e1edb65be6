"""The alerts bench, small: what it expects, and one kill."""

import argparse
import math

import pytest

from cluster.lab.bench import alerts
from cluster.lab.bench.alerts import alert_latencies, expected


def test_what_must_be_told(make):
    """Two incidents and a half: positive windows 1-2 and 5-7, and one that never has a second."""
    scores = [0.0, 0.9, 0.9, 0.0, 0.0, 0.9, 0.9, 0.9, 0.0, 0.0, 0.9, 0.0]
    told = expected([make.answer(window, score) for window, score in enumerate(scores)])
    assert told == {
        ("gate", 0, "new"),
        ("gate", 0, "end"),
        ("gate", 8_000_000, "new"),
        ("gate", 8_000_000, "end"),
    }


def test_what_never_came_is_infinitely_late():
    """The alert of the window that ends at 16 s took 0.5 s and came twice; its end is told at 32 s and is not there."""
    published = {("gate", 16_000_000): 100.0, ("gate", 32_000_000): 116.0}
    new = {"camera": "gate", "start": 0, "event": "new", "end": 16_000_000}
    received = [{**new, "at": 100.5}, {**new, "at": 107.0}]
    assert alert_latencies({("gate", 0, "new")}, received, published) == [0.5]
    both = alert_latencies({("gate", 0, "new"), ("gate", 0, "end")}, received, published)
    assert sorted(both) == [0.5, math.inf]
    end = {**new, "event": "end", "at": 116.25}
    assert sorted(alert_latencies({("gate", 0, "new"), ("gate", 0, "end")}, [*received, end], published)) == [0.25, 0.5]


@pytest.mark.timeout(150)
def test_a_small_run():
    args = argparse.Namespace(cameras=4, period=1.0, seconds=4.0, kills=1, seed=3)
    result = alerts.run(args)
    assert (result.figures["alerts_lost"], result.figures["alerts_duplicated_beyond"]) == (0, 0)
    assert 0 < result.figures["alert_latency_ms"] < math.inf
    assert result.figures["alerts_missing"] == 0
    assert [row["part"] for row in result.rows] == ["spread", "at once", "kills"]
    # One pattern of four windows: each camera's incident begins and ends once.
    assert result.rows[0]["alerts"] == 8
