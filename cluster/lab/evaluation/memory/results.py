"""Results of a memory evaluation: graded answers, accuracy by kind with confidence intervals, paired drops between
settings, and a row per setting."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from cluster.lab.evaluation.memory.questions import LETTERS, Question, Span
from cluster.lab.evaluation.memory.settings import ShareSetting
from cluster.lab.evaluation.metrics import RESAMPLES, Estimate, bootstrap_weights, estimate
from cluster.lab.scenes.questions import NUMBERS

_WORD = re.compile(r"\w+(?:'\w+)?")
_ARTICLES = frozenset({"a", "an", "the"})
# "B", "(B)", "B.", "B: text"; "A" and "I" are words too ("A man …") and must stand alone.
_LEADING = re.compile(r"^\W*(?:([B-HJ])(?=[\s.):,]|$)|([AI])(?=\s*$|[.):,]))", re.IGNORECASE)
_STATED = re.compile(r"\b(?:answer|option)(?:\s+is)?\s*:?\s*\(?(?:([B-HJ])\b|([AI])\b(?!\s+\w))", re.IGNORECASE)
ENOUGH_VIDEOS = 10
"""Minimum number of videos for a confidence interval: questions about one video are not independent, and a few videos
say little about others."""


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """Grade of one answer: ``video``, ``number`` of the question within it, its kind, and ``credit`` in 0..1."""

    video: str
    number: int
    kind: str
    credit: float


def words(text: str) -> list[str]:
    """Case-folded words without articles and punctuation; numbers up to six are spelled out."""
    found = (word.casefold() for word in _WORD.findall(text))
    return [
        NUMBERS[int(word)] if word.isascii() and word.isdigit() and int(word) < len(NUMBERS) else word
        for word in found
        if word not in _ARTICLES
    ]


def first_word_matches(said: str, truth: str) -> bool:
    """Whether the first words are equal, which grades one-word answers."""
    ours, right = words(said)[:1], words(truth)[:1]
    return bool(right) and ours == right


def chosen_option(said: str, options: Sequence[str]) -> int | None:
    """Index of the option that an answer names: a letter at its start or after "answer is", or the text of exactly one
    option; None if none or several."""
    for pattern in (_LEADING, _STATED):
        match = pattern.search(said)
        if match:
            index = LETTERS.index(next(group for group in match.groups() if group).upper())
            return index if index < len(options) else None
    ours = words(said)
    named = [index for index, option in enumerate(options) if _contains(ours, words(option))]
    # "red car" does not name "car".
    longest = [i for i in named if not any(i != j and _contains(words(options[j]), words(options[i])) for j in named)]
    return longest[0] if len(longest) == 1 else None


def word_overlap(said: str, truth: str) -> float:
    """Word F1 of a free-form answer as in SQuAD (Rajpurkar et al. 2016), in 0..1.

    Stands in for the grading by another model that RVS was published with; not comparable with published numbers.
    """
    ours, right = words(said), words(truth)
    shared = sum(min(ours.count(word), right.count(word)) for word in set(ours))
    return 2 * shared / (len(ours) + len(right)) if shared else 0.0


def credit(question: Question, said: Sequence[str]) -> float:
    """Grade of a conversation in 0..1: share of turns answered correctly; word overlap for answers of several words.
    Raises ``ValueError``: not exactly one answer per turn."""
    if len(said) != len(question.turns):
        raise ValueError(f"{len(said)} answers to {len(question.turns)} turns")
    if question.options:
        return float(chosen_option(said[0], question.options) == LETTERS.index(question.answers[0]))
    pairs = zip(said, question.answers, strict=True)
    right = (first_word_matches(a, b) if len(words(b)) == 1 else word_overlap(a, b) for a, b in pairs)
    return sum(right) / len(said)


def accuracy_by_kind(judged: Sequence[GradedAnswer]) -> dict[str, Estimate]:
    """Mean credit over all questions (``all``) and by kind, with bootstrap intervals over videos if there are at least
    ``ENOUGH_VIDEOS``."""
    return _means(judged, [each.credit for each in judged])


def accuracy_drop(full: Sequence[GradedAnswer], other: Sequence[GradedAnswer]) -> dict[str, Estimate]:
    """Mean credit of ``full`` minus that of ``other`` on the same questions, over all and by kind, with paired
    intervals. Raises ``ValueError``: not the same questions in the same order."""
    if [(each.video, each.number, each.kind) for each in full] != [(e.video, e.number, e.kind) for e in other]:
        raise ValueError("a drop needs the same questions in the same order under both settings")
    return _means(full, [ours.credit - theirs.credit for ours, theirs in zip(full, other, strict=True)])


def _contains(text: Sequence[str], part: Sequence[str]) -> bool:
    size = len(part)
    return size > 0 and any(list(text[i : i + size]) == list(part) for i in range(len(text) - size + 1))


def _means(judged: Sequence[GradedAnswer], values: Sequence[float]) -> dict[str, Estimate]:
    """Mean of the questions' ``values``, over all (first) and by kind; resamplings without a kind count as ``nan``."""
    videos = sorted({each.video for each in judged})
    resamples = RESAMPLES if len(videos) >= ENOUGH_VIDEOS else 0
    weights = bootstrap_weights(len(videos), resamples)[:, [videos.index(each.video) for each in judged]]
    found: dict[str, Estimate] = {}
    for kind in ("all", *sorted({each.kind for each in judged})):
        rows = [row for row, each in enumerate(judged) if kind in ("all", each.kind)]
        counted, total = weights[:, rows].sum(axis=1), weights[:, rows] @ np.array(values)[rows]
        found[kind] = estimate(np.where(counted > 0, total / np.maximum(counted, 1e-12), np.nan))
    return found


@dataclass(frozen=True, slots=True)
class EvidenceRecall:
    """``inside``: share of retrieved tokens whose frames lie in the evidence (precision). ``spans``: share of evidence
    spans with at least one retrieved token (recall). ``found``: whether there is such a span."""

    inside: float
    spans: float
    found: bool


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One question under one setting.

    * ``judged``: grade of ``said``
    * ``ttft_s``: time to first token, mean over turns; ``history_s``: footage seen before the question
    * ``retrieved``, ``held``: tokens per layer and head, mean over layers, heads and turns
    * ``bytes_moved``: KV loaded, sum over turns; ``bytes_held``: KV held when asked
    * ``recall``: None without evidence
    * ``yes``: P(yes) of each turn
    """

    judged: GradedAnswer
    said: tuple[str, ...]
    ttft_s: float
    history_s: float
    retrieved: float
    held: float
    bytes_moved: int
    bytes_held: int
    recall: EvidenceRecall | None
    yes: tuple[float, ...] = ()


@dataclass(frozen=True)
class SettingResult:
    """All questions under one setting, in the order shared by all settings."""

    setting: ShareSetting
    answered: tuple[AnswerRecord, ...]

    @cached_property
    def judged(self) -> tuple[GradedAnswer, ...]:
        return tuple(each.judged for each in self.answered)

    @cached_property
    def accuracy(self) -> dict[str, Estimate]:
        """See :func:`accuracy_by_kind`."""
        return accuracy_by_kind(self.judged)

    def of_kinds(self, kinds: Sequence[str]) -> Self:
        return replace(self, answered=tuple(each for each in self.answered if each.judged.kind in kinds))

    def drop_from(self, full: Self) -> dict[str, Estimate]:
        """Accuracy of ``full`` minus that of this setting; see :func:`accuracy_drop`."""
        return accuracy_drop(full.judged, self.judged)

    @property
    def retrieval_ratio(self) -> float:
        """Retrieved tokens over held ones, mean over questions with any held."""
        return _mean_of(each.retrieved / each.held for each in self.answered if each.held)

    def mean(self, name: str) -> float:
        """Mean of an ``AnswerRecord`` field over questions."""
        return _mean_of(float(getattr(each, name)) for each in self.answered)

    def recall(self, name: str) -> float:
        """Mean of an ``EvidenceRecall`` field over questions with evidence."""
        return _mean_of(float(getattr(each.recall, name)) for each in self.answered if each.recall is not None)

    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {**asdict(self.setting), "questions": len(self.answered)}
        for kind, measured in self.accuracy.items():
            found |= measured.row(f"accuracy_{kind}")
        return found | {
            "retrieval_ratio": self.retrieval_ratio,
            "evidence_inside": self.recall("inside"),
            "evidence_spans": self.recall("spans"),
            "evidence_found": self.recall("found"),
            "ttft_s": self.mean("ttft_s"),
            "bytes_moved": self.mean("bytes_moved"),
            "bytes_held": self.mean("bytes_held"),
        }


def evidence_recall(retrieved_at: Sequence[float], evidence: Sequence[Span]) -> EvidenceRecall:
    """Precision and recall of retrieved tokens. ``retrieved_at`` ``[n]``: times of their frames in seconds;
    ``evidence``: at least one span, both ends inclusive."""
    times = np.asarray(retrieved_at, dtype=np.float64)
    hits = np.array([(times >= start) & (times <= end) for start, end in evidence], dtype=np.bool_)
    spans = hits.any(axis=1)
    inside = float(hits.any(axis=0).mean()) if len(times) else 0.0
    return EvidenceRecall(inside, float(spans.mean()), bool(spans.any()))


def _mean_of(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("nan")
