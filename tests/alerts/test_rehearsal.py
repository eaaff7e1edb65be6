"""Incidents that a rule would have made: counted by hand, and the same as production makes of the same answers."""

import random

import pytest

from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.tracker import IncidentTracker, Rule, ScoredWindow, simulate_incidents
from cluster.types import MICROSECONDS, Answer, TokenCount


def windows(*scores: float) -> list[ScoredWindow]:
    return [ScoredWindow(8.0 * number, 8.0 * number + 40.0, score) for number, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("threshold", "consecutive", "wanted"),
    [
        # Two in a row open one; two below threshold less hysteresis end it.
        (0.5, 2, [(8.0, 64.0)]),
        (0.5, 1, [(8.0, 64.0)]),
        (0.5, 4, []),
        (0.95, 1, []),
        (0.05, 1, [(0.0, None)]),
    ],
)
def test_by_hand(threshold: float, consecutive: int, wanted: list[tuple[float, float | None]]) -> None:
    scores = windows(0.1, 0.7, 0.9, 0.6, 0.1, 0.1, 0.1)
    rule = Rule(threshold=threshold, consecutive=consecutive, cooldown_s=0)
    found = simulate_incidents(scores, rule)
    assert [(each.start / MICROSECONDS, None if each.open else each.end / MICROSECONDS) for each in found] == wanted


@pytest.mark.parametrize("seed", range(5))
def test_as_production_makes_them(seed: int) -> None:
    draw = random.Random(seed)
    scored = windows(*(draw.random() for _ in range(200)))
    rule = Rule(threshold=0.6, consecutive=2, cooldown_s=60.0)
    kept = OpenIncidents("site")
    tracker = IncidentTracker(kept, lambda *_: rule)
    made = {}
    for number, each in enumerate(scored):
        start, end = round(each.start_s * MICROSECONDS), round(each.end_s * MICROSECONDS)
        positive = each.score >= rule.threshold
        tokens = TokenCount(1, 1, 1, 0, 0, 0, 0)
        tracker.add_answer(
            Answer("gate", number, start, end, "q", each.score, positive, "", False, tokens), 1e9 + number
        )
        made |= kept.pop_changes().incidents
    wanted = sorted((each.start, each.end, each.score, each.windows) for each in made.values())
    assert len(wanted) > 3
    assert [(each.start, each.end, each.score, each.windows) for each in simulate_incidents(scored, rule)] == wanted


def test_nothing_of_nothing() -> None:
    assert simulate_incidents([], Rule()) == []
