"""One camera as the engine thread keeps it: frames that wait, and what has been counted."""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cluster.replica.stride_book import StrideBook
from cluster.types import Answer, FrameSample, LastAnswer, StreamSpec
from cluster.types.reports import StreamReport


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


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


@dataclass(slots=True)
class OpenStream:
    """``ending``: its source ended, and it is let go of once nothing waits; ``broken``: why no frame is taken but one
    that needs none before it; ``book``: of its strides; ``before``: counts of earlier times it was open; ``leaving``:
    who waits for it to be handed over; ``incarnation``: another each time that the engine begins it, as windows are
    numbered then; ``run``: of the counts."""

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
    incarnation: str = field(default_factory=_new_id)
    run: str = field(default_factory=_new_id)

    @classmethod
    def after(cls, spec: StreamSpec, last: StreamReport | None) -> OpenStream:
        """A camera that opens; ``last``: what was counted when it was closed here before."""
        stream = cls(spec)
        if last is not None and last.life == spec.life:
            stream.run = last.run
            stream.counts.update(last.counts)
            stream.before.update(last.counts)
        return stream

    def change(self, spec: StreamSpec) -> None:
        """It is asked something else: what was answered to other questions is no answer to these."""
        asked = {(question.id, question.text) for question in self.spec.questions}
        same = {question.id for question in spec.questions if (question.id, question.text) in asked}
        self.last_answers = {each: last for each, last in self.last_answers.items() if each in same}
        self.spec = spec

    def begin_anew(self) -> None:
        """The engine was made to forget it, and has opened it again."""
        self.incarnation = _new_id()

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
        last, spec = tuple(self.last_answers.values()), self.spec
        return StreamReport(spec.stream, self.latency_s, last, dict(self.counts), life=spec.life, run=self.run)
