"""Which incidents a rule would have made of given scores: production's tracker, without anything behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.alerts.incident import Incident
from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.tracker import IncidentTracker, Rule
from cluster.types import MICROSECONDS, Answer, TokenCount

_NO_TOKENS = TokenCount(0, 0, 0, 0, 0, 0, 0)
_CAMERA, _QUESTION = "rehearsed", "rehearsed"


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """A window ``[start_s, end_s)`` on any one clock, and its score, 0..1."""

    start_s: float
    end_s: float
    score: float


def rehearse(windows: Sequence[ScoredWindow], rule: Rule) -> list[Incident]:
    """Incidents that these windows, oldest first, make under ``rule``, oldest first. Times of the incidents are
    microseconds of the windows' clock; one that goes on has no ``ended_s``."""
    kept = OpenIncidents("rehearsal")
    tracker = IncidentTracker(kept, lambda *_: rule)
    for number, window in enumerate(windows):
        answer = Answer(
            stream=_CAMERA,
            window=number,
            start=round(window.start_s * MICROSECONDS),
            end=round(window.end_s * MICROSECONDS),
            question=_QUESTION,
            score=window.score,
            positive=window.score >= rule.threshold,
            text="",
            gated=False,
            tokens=_NO_TOKENS,
        )
        tracker.add_answer(answer, window.end_s)
    return sorted(kept.pop_changes().incidents.values(), key=lambda incident: incident.start)
