"""Who was right, and when an operator was told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.report.records import LiveWindow, Tally, alerts, tally, verdict
from cluster.types import Question

QUESTION = Question("q", "?", threshold=0.6)


def windows(scores, truths):
    return [
        LiveWindow(4.0 * k, 20.0 + 4 * k, {} if score is None else {"q": score}, False, 1, 1, 1, 0.1, {"q": truth})
        for k, (score, truth) in enumerate(zip(scores, truths, strict=True))
    ]


@pytest.mark.parametrize(
    ("score", "truth", "told"),
    [(0.6, True, "right"), (0.59, True, "wrong"), (0.6, False, "wrong"), (0.0, False, "right"), (0.9, None, "open")],
)
def test_an_answer_is_positive_at_its_threshold(score, truth, told):
    assert verdict(score, 0.6, truth) == told


def test_only_what_can_be_judged_counts():
    given = [
        ({"q": 0.9, "other": 0.9}, {"q": True}),
        ({"q": 0.1}, {"q": True}),
        ({"q": 0.9}, {"q": None}),
        ({"q": 0.9}, {}),
        ({}, {"q": True}),
    ]
    found = tally(given, [QUESTION])
    assert found == Tally(judged=2, right=1)
    assert found.share == 0.5
    assert Tally().share is None
    assert tally(given, []) == Tally()


def test_one_positive_window_is_no_alert_and_a_long_run_is_one():
    found = alerts(windows([0.9, 0.1, 0.7, 0.8, 0.9, 0.2, 0.6, 0.6], [False] * 8), QUESTION)
    assert [(alert.at_s, alert.verdict) for alert in found] == [(32.0, "wrong"), (48.0, "wrong")]


@pytest.mark.parametrize(
    ("truths", "told"),
    [((False, True), "right"), ((None, True), "right"), ((None, False), "open"), ((False, False), "wrong")],
)
def test_an_alert_is_right_if_any_of_its_windows_shows_it(truths, told):
    (alert,) = alerts(windows([0.9, 0.9], truths), QUESTION)
    assert alert.verdict == told


def test_a_window_without_an_answer_breaks_no_run():
    (alert,) = alerts(windows([0.9, None, 0.9], [True] * 3), QUESTION)
    assert alert.at_s == 28.0


@given(st.lists(st.floats(0, 1), max_size=20))
def test_alerts_are_the_runs_of_two_and_more(scores):
    positive = "".join("1" if score >= 0.6 else "0" for score in scores)
    runs = [run for run in positive.split("0") if len(run) >= 2]
    assert len(alerts(windows(scores, [True] * len(scores)), QUESTION)) == len(runs)
