"""What was true beside what was answered: who was right, and which alerts were raised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.types import Question

# CodecSight's rule: one positive window may be a slip, two in a row are an alert.
ALERT_AFTER = 2

Truth = Mapping[str, bool | None]
"""By question: whether the window shows what is asked for; None where too little of it lies in the window to tell.
A question that is missing is one nobody knows the truth of."""

Verdict = Literal["right", "wrong", "open"]


class Scored(Protocol):
    """A window with its answers and their truth."""

    @property
    def end_s(self) -> float: ...
    @property
    def truth(self) -> Truth: ...
    @property
    def scores(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class EventInterval:
    """Something that a question asks for did happen from ``start_s`` to ``end_s``."""

    question: str
    start_s: float
    end_s: float


def verdict(score: float, threshold: float, truth: bool | None) -> Verdict:
    """Whether an answer is right; ``open`` where nobody can tell."""
    if truth is None:
        return "open"
    return "right" if (score >= threshold) == truth else "wrong"


@dataclass(frozen=True, slots=True)
class Tally:
    """So many answers are ``right`` of those ``judged``: where the truth is known and plain."""

    judged: int = 0
    right: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.judged + other.judged, self.right + other.right)

    @property
    def share(self) -> float | None:
        """0..1; None when nothing was judged."""
        return self.right / self.judged if self.judged else None


def tally(answers: Iterable[tuple[Mapping[str, float], Truth]], questions: Iterable[Question]) -> Tally:
    """Count over windows, each given as its scores by question and its truth."""
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
    """Raised at ``at_s``, when a window is positive for the ``ALERT_AFTER``-th time in a row. ``verdict``: right if
    any of those windows shows what is asked for, open if none does for certain and some may."""

    question: str
    at_s: float
    verdict: Verdict


def alerts(windows: Sequence[Scored], question: Question) -> tuple[Alert, ...]:
    """The alerts of one question, one for each run of positive windows; unanswered windows break no run."""
    found: list[Alert] = []
    run: list[Scored] = []
    for window in windows:
        if question.id not in window.scores:
            continue
        run = [*run, window] if window.scores[question.id] >= question.threshold else []
        if len(run) == ALERT_AFTER:
            told = [each.truth.get(question.id) for each in run]
            judged: Verdict = "right" if True in told else "open" if None in told else "wrong"
            found.append(Alert(question.id, window.end_s, judged))
    return tuple(found)
