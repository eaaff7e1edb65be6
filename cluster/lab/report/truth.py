"""Answers against the truth: verdicts, counts and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.types import Question

if TYPE_CHECKING:
    from cluster.lab.report.records import LiveWindow

# CodecSight's rule: consecutive positive windows for an alert.
ALERT_AFTER = 2

Truth = Mapping[str, bool | None]
"""By question: whether the window shows the event; None if too little of it lies in the window. Questions of unknown
truth are missing."""

Verdict = Literal["right", "wrong", "open"]


@dataclass(frozen=True, slots=True)
class EventInterval:
    """A true event of a question, from ``start_s`` to ``end_s``."""

    question: str
    start_s: float
    end_s: float


def verdict(score: float, threshold: float, truth: bool | None) -> Verdict:
    """Whether an answer is right; ``open`` if the truth is undecidable."""
    if truth is None:
        return "open"
    return "right" if (score >= threshold) == truth else "wrong"


@dataclass(frozen=True, slots=True)
class Tally:
    """``right`` answers of those ``judged``, whose truth is known."""

    judged: int = 0
    right: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.judged + other.judged, self.right + other.right)

    @property
    def share(self) -> float | None:
        """0..1; None if nothing was judged."""
        return self.right / self.judged if self.judged else None


def tally(answers: Iterable[tuple[Mapping[str, float], Truth]], questions: Iterable[Question]) -> Tally:
    """Count over windows, each given as scores by question and truth."""
    thresholds = {question.id: question.threshold for question in questions}
    verdicts = [
        verdict(score, thresholds[id], truth.get(id))
        for scores, truth in answers
        for id, score in scores.items()
        if id in thresholds
    ]
    return Tally(len(verdicts) - verdicts.count("open"), verdicts.count("right"))


@dataclass(frozen=True, slots=True)
class Alert:
    """Raised at ``at_s``, when a window is positive for the ``ALERT_AFTER``-th time in a row. ``verdict``: right if any
    of those windows shows the event, open if none certainly does but some may."""

    question: str
    at_s: float
    verdict: Verdict


def alerts(windows: Sequence[LiveWindow], question: Question) -> tuple[Alert, ...]:
    """Alerts of one question, one per run of positive windows; unanswered windows do not end a run."""
    found: list[Alert] = []
    run: list[LiveWindow] = []
    for window in windows:
        if question.id not in window.scores:
            continue
        run = [*run, window] if window.scores[question.id] >= question.threshold else []
        if len(run) == ALERT_AFTER:
            truths = [each.truth.get(question.id) for each in run]
            judged: Verdict = "right" if True in truths else "open" if None in truths else "wrong"
            found.append(Alert(question.id, window.end_s, judged))
    return tuple(found)
