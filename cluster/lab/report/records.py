"""Records of the demo's report, serialised as ``report.json``; ``report.html`` shows the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from cluster.types import Question

# CodecSight's rule: consecutive positive windows for an alert.
ALERT_AFTER = 2

Truth = Mapping[str, bool | None]
"""By question: whether the window shows the event; None if too little of it lies in the window. Questions without
ground truth are missing."""

Verdict = Literal["right", "wrong", "open"]


@dataclass(frozen=True, slots=True)
class EventInterval:
    """Ground-truth event of a question, from ``start_s`` to ``end_s``."""

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
    """Number of answers ``judged``, which have a known truth, and of those that are ``right``."""

    judged: int = 0
    right: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.judged + other.judged, self.right + other.right)

    @property
    def share(self) -> float | None:
        """0..1; None if nothing was judged."""
        return self.right / self.judged if self.judged else None


def tally(answers: Iterable[tuple[Mapping[str, float], Truth]], questions: Iterable[Question]) -> Tally:
    """Judge the answers of windows, each given as (scores by question, truth)."""
    thresholds = {question.id: question.threshold for question in questions}
    verdicts = [
        verdict(score, thresholds[id], truth.get(id))
        for scores, truth in answers
        for id, score in scores.items()
        if id in thresholds
    ]
    return Tally(len(verdicts) - verdicts.count("open"), verdicts.count("right"))


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of computing windows: tokens through the language model, seconds, floating-point operations."""

    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, self.flops + other.flops)


def ratio(above: float, below: float) -> float | None:
    """``above / below``; None if ``below`` is 0."""
    return above / below if below else None


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """One window answered live. Times in seconds since the camera's first frame; scores by question.

    ``computed``: tokens through the language model, including questions; 0 for a gated window. ``truth``: see
    :data:`Truth`.
    """

    start_s: float
    end_s: float
    scores: dict[str, float]
    gated: bool
    full: int
    kept: int
    computed: int
    latency_s: float
    truth: dict[str, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert raised at ``at_s``, the end of the ``ALERT_AFTER``-th positive window in a row. ``verdict``: right if
    any of these windows shows the event, open if none certainly does but some may."""

    question: str
    at_s: float
    verdict: Verdict


def alerts(windows: Sequence[LiveWindow], question: Question) -> tuple[Alert, ...]:
    """Alerts of one question, one per run of positive windows; unanswered windows do not break a run."""
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


@dataclass(frozen=True, slots=True)
class ComparedWindow:
    """The same window computed in full and our way, one after the other on the same machine. Times in seconds since the
    clip's first sample; ``truth`` as in ``LiveWindow``."""

    start_s: float
    end_s: float
    full: Cost
    ours: Cost
    gated: bool
    full_scores: dict[str, float]
    our_scores: dict[str, float]
    truth: dict[str, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleFrame:
    """A sampled frame with its keep-mask drawn over it; ``kept``: share of patches. The JSON omits ``jpeg``."""

    time_s: float
    kept: float
    anchor: bool
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CameraRecord:
    """One camera: source, answers, cost and losses.

    ``compared``: windows after the first whole one, which has nothing to reuse. ``live_events``, ``compared_events``:
    ground-truth events, on the clock of ``live`` and ``compared`` windows.
    """

    name: str
    description: str
    fed_by: str
    codec: str
    width: int
    height: int
    cue: str
    state: str
    reason: str
    questions: tuple[Question, ...]
    live: tuple[LiveWindow, ...]
    compared: tuple[ComparedWindow, ...]
    frames: tuple[SampleFrame, ...]
    windows_dropped: int = 0
    windows_lost: int = 0
    packets_dropped: int = 0
    decode_errors: int = 0
    gaps: int = 0
    live_events: tuple[EventInterval, ...] = ()
    compared_events: tuple[EventInterval, ...] = ()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(alert for question in self.questions for alert in alerts(self.live, question))

    @property
    def live_truth(self) -> Tally:
        return self.live_truth_of(*self.questions)

    def live_truth_of(self, *questions: Question) -> Tally:
        return tally(((window.scores, window.truth) for window in self.live), questions)

    @property
    def gated(self) -> int:
        """Live windows that kept the previous answer."""
        return sum(window.gated for window in self.live)

    @property
    def comparison(self) -> Comparison:
        return Comparison.of(self.compared, self.questions)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Totals over compared windows. ``agreeing``: number of ``answers`` on the same side of their threshold both ways;
    ``score_difference``: sum of absolute score differences; ``full_truth``, ``our_truth``: correct answers."""

    windows: int
    full: Cost
    ours: Cost
    answers: int
    agreeing: int
    score_difference: float
    full_truth: Tally
    our_truth: Tally

    @classmethod
    def of(cls, windows: Iterable[ComparedWindow], questions: Iterable[Question]) -> Comparison:
        """Compare the answers to ``questions`` that were given both ways."""
        questions = list(questions)
        thresholds = {question.id: question.threshold for question in questions}
        windows = list(windows)
        pairs = [
            (window.full_scores[id], window.our_scores[id], thresholds[id])
            for window in windows
            for id in window.full_scores
            if id in window.our_scores and id in thresholds
        ]
        return cls(
            windows=len(windows),
            full=sum((window.full for window in windows), Cost()),
            ours=sum((window.ours for window in windows), Cost()),
            answers=len(pairs),
            agreeing=sum((full >= limit) == (ours >= limit) for full, ours, limit in pairs),
            score_difference=sum(abs(full - ours) for full, ours, _ in pairs),
            full_truth=tally(((window.full_scores, window.truth) for window in windows), questions),
            our_truth=tally(((window.our_scores, window.truth) for window in windows), questions),
        )

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def speedup(self) -> float | None:
        """Time of full computation over ours."""
        return ratio(self.full.seconds, self.ours.seconds)

    @property
    def flops_ratio(self) -> float | None:
        """Operations of full computation over ours."""
        return ratio(self.full.flops, self.ours.flops)

    @property
    def tokens_share(self) -> float | None:
        """Our tokens as a share of those of full computation."""
        return ratio(self.ours.tokens, self.full.tokens)

    def summary(self) -> dict[str, float | None]:
        """Ratios by JSON key."""
        return {
            "speedup": self.speedup,
            "flops_ratio": self.flops_ratio,
            "tokens_share": self.tokens_share,
            "agreement": ratio(self.agreeing, self.answers),
            "mean_score_difference": ratio(self.score_difference, self.answers),
            "full_right": self.full_truth.share,
            "our_right": self.our_truth.share,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the demo. ``created``: local time in ISO 8601; ``settings`` and ``machine`` are shown as they are."""

    created: str
    command: str
    model: str
    random_weights: bool
    live_seconds: float
    settings: dict[str, Any]
    machine: dict[str, Any]
    cameras: tuple[CameraRecord, ...]
    notes: tuple[str, ...] = ()

    @property
    def comparison(self) -> Comparison:
        return sum((camera.comparison for camera in self.cameras), Comparison.of((), ()))

    @property
    def live_truth(self) -> Tally:
        return sum((camera.live_truth for camera in self.cameras), Tally())

    @property
    def live_windows(self) -> int:
        return sum(len(camera.live) for camera in self.cameras)

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        body = asdict(self)
        for camera, record in zip(body["cameras"], self.cameras, strict=True):
            for frame in camera["frames"]:
                del frame["jpeg"]
            camera["comparison"] = asdict(record.comparison) | record.comparison.summary()
            camera["alerts"] = [asdict(alert) for alert in record.alerts]
            camera["live_truth"] = asdict(record.live_truth)
        body["comparison"] = asdict(self.comparison) | self.comparison.summary()
        body["live_truth"] = asdict(self.live_truth)
        return body
