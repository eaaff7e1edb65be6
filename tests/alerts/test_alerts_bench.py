"""The alerts bench, small: what it expects, and one kill."""

import argparse

import pytest

from cluster.lab.bench import alerts
from cluster.lab.bench.alerts import expected


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


@pytest.mark.timeout(150)
def test_a_small_run():
    args = argparse.Namespace(cameras=4, period=1.0, seconds=4.0, kills=1, seed=3)
    result = alerts.run(args)
    assert (result.figures["alerts_lost"], result.figures["alerts_duplicated_beyond"]) == (0, 0)
    assert result.figures["alert_latency_ms"] > 0
    assert [row["part"] for row in result.rows] == ["spread", "at once", "kills"]
    # One pattern of four windows: each camera's incident begins and ends once.
    assert result.rows[0]["alerts"] == 8
