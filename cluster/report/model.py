"""What a report holds. ``report.json`` is these dataclasses; ``report.html`` shows the same numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.types import Question


@dataclass(frozen=True, slots=True)
class Cost:
    """What windows cost: tokens through the language model, seconds on this machine, floating-point operations."""

    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, self.flops + other.flops)


def total(costs: Iterable[Cost]) -> Cost:
    """Their sum."""
    return sum(costs, Cost())


def ratio(above: float, below: float) -> float | None:
    """``above / below``; None when there is nothing to divide by."""
    return above / below if below else None


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """One window answered while the cluster ran. Times in seconds since the camera's first frame; scores by question.

    ``computed`` counts tokens through the language model, questions included; 0 for a gated window.
    """

    start_s: float
    end_s: float
    scores: dict[str, float]
    gated: bool
    full: int
    kept: int
    computed: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class ComparedWindow:
    """The same window computed in full and our way, one after the other on the same machine."""

    end_s: float
    full: Cost
    ours: Cost
    gated: bool
    full_scores: dict[str, float]
    our_scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class SampleFrame:
    """One sampled frame with its keep-mask drawn over it. ``jpeg`` goes into the page, not into the JSON."""

    time_s: float
    kept: float
    anchor: bool
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CameraRecord:
    """One camera: how it was fed, what it answered, what it cost, and what was lost on the way.

    ``compared``: windows after the first whole one, which has nothing to reuse and comes once in a camera's life.
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

    @property
    def gated(self) -> int:
        """Live windows whose last answer stood."""
        return sum(window.gated for window in self.live)

    @property
    def comparison(self) -> Comparison:
        return Comparison.of(self.compared, self.questions)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Totals over compared windows. ``agreeing`` of ``answers`` fall on the same side of their threshold;
    ``score_difference`` is the sum of their scores' absolute differences."""

    windows: int
    full: Cost
    ours: Cost
    answers: int
    agreeing: int
    score_difference: float

    @classmethod
    def of(cls, windows: Iterable[ComparedWindow], questions: Iterable[Question]) -> Comparison:
        """Compare every answer that both ways gave."""
        thresholds = {question.id: question.threshold for question in questions}
        windows = list(windows)
        pairs = [
            (window.full_scores[id], window.our_scores[id], thresholds[id])
            for window in windows
            for id in window.full_scores
            if id in window.our_scores
        ]
        return cls(
            windows=len(windows),
            full=total(window.full for window in windows),
            ours=total(window.ours for window in windows),
            answers=len(pairs),
            agreeing=sum((full >= limit) == (ours >= limit) for full, ours, limit in pairs),
            score_difference=sum(abs(full - ours) for full, ours, _ in pairs),
        )

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.windows + other.windows,
            self.full + other.full,
            self.ours + other.ours,
            self.answers + other.answers,
            self.agreeing + other.agreeing,
            self.score_difference + other.score_difference,
        )

    @property
    def speedup(self) -> float | None:
        """Full seconds per second of ours."""
        return ratio(self.full.seconds, self.ours.seconds)

    @property
    def flops_ratio(self) -> float | None:
        """Full operations per operation of ours."""
        return ratio(self.full.flops, self.ours.flops)

    @property
    def tokens_share(self) -> float | None:
        """Our tokens as a share of the full ones, 0..1."""
        return ratio(self.ours.tokens, self.full.tokens)

    def summary(self) -> dict[str, float | None]:
        """The ratios, as the JSON names them."""
        return {
            "speedup": self.speedup,
            "flops_ratio": self.flops_ratio,
            "tokens_share": self.tokens_share,
            "agreement": ratio(self.agreeing, self.answers),
            "mean_score_difference": ratio(self.score_difference, self.answers),
        }


NOTHING = Comparison(0, Cost(), Cost(), 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. ``created`` is local time in ISO 8601; ``settings`` and ``machine`` are shown as they are."""

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
        """Over all cameras."""
        return sum((camera.comparison for camera in self.cameras), NOTHING)

    @property
    def live_windows(self) -> int:
        return sum(len(camera.live) for camera in self.cameras)

    @property
    def live_gated(self) -> int:
        return sum(camera.gated for camera in self.cameras)

    @property
    def live_missing(self) -> int:
        """Windows dropped or lost while the cluster ran."""
        return sum(camera.windows_dropped + camera.windows_lost for camera in self.cameras)

    def to_json(self) -> str:
        """Everything but the pictures."""
        body = asdict(self)
        for camera, record in zip(body["cameras"], self.cameras, strict=True):
            for frame in camera["frames"]:
                del frame["jpeg"]
            camera["comparison"] = asdict(record.comparison) | record.comparison.summary()
        body["comparison"] = asdict(self.comparison) | self.comparison.summary()
        return json.dumps(body, indent=2)
