"""One camera as the engine thread keeps it: frames that wait, and what has been counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cluster.scheduling.reports import StreamReport
from cluster.scheduling.stride_book import StrideBook
from cluster.types import Answer, FrameSample, LastAnswer, StreamSpec


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Windows of one camera since it was opened."""

    done: int = 0
    gated: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Departure:
    """How a camera left for another replica: ``saved``, its window can be gone on with there; its last ``counts``."""

    saved: bool
    counts: WindowCounts


@dataclass(frozen=True, slots=True)
class Offer:
    """A frame that waits for the engine thread."""

    sample: FrameSample
    arrived_s: float
    taken: Future[None]


@dataclass(slots=True)
class OpenStream:
    """``ending``: its source ended, and it is let go of once nothing waits; ``broken``: why no frame is taken but one
    that needs none before it; ``book``: of its strides; ``before``: counts of earlier times it was open; ``leaving``:
    who waits for it to be handed over."""

    spec: StreamSpec
    inbox: deque[Offer] = field(default_factory=deque)
    ending: bool = False
    broken: str = ""
    book: StrideBook = field(default_factory=StrideBook)
    before: Counter[str] = field(default_factory=Counter)
    latency_s: float = 0.0
    last_answers: dict[str, LastAnswer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    leaving: Future[Departure] | None = None

    @classmethod
    def after(cls, spec: StreamSpec, last: StreamReport | None) -> OpenStream:
        """A camera that opens; ``last``: what was counted when it was closed here before."""
        stream = cls(spec)
        if last is not None:
            stream.counts.update(last.counts)
            stream.before.update(last.counts)
        return stream

    def windows(self) -> WindowCounts:
        """Its windows since it was opened."""
        names = ("windows_done", "windows_gated", "windows_dropped")
        return WindowCounts(*(self.counts[name] - self.before[name] for name in names))

    def answered(self, answers: Sequence[Answer]) -> None:
        """A window was answered, each question once."""
        first = answers[0]
        self.book.answered()
        self.counts["windows_gated" if first.gated else "windows_done"] += 1
        self.counts["tokens_full"] += first.tokens.full
        self.counts["tokens_kept"] += first.tokens.kept
        self.counts["tokens_computed"] += first.tokens.computed
        self.latency_s = first.timing.latency_s
        for answer in answers:
            self.last_answers[answer.question] = LastAnswer(answer.question, answer.score, answer.positive, answer.end)

    def report(self) -> StreamReport:
        """For the heartbeat."""
        return StreamReport(self.spec.stream, self.latency_s, tuple(self.last_answers.values()), dict(self.counts))
