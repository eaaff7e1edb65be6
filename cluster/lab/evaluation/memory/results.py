"""Results of an evaluation of memory: every question under every setting, and a row per setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.questions import Question, Span
from cluster.lab.evaluation.memory.score import (
    GradedAnswer,
    Space,
    accuracy_by_kind,
    accuracy_drop,
    coverage_area,
    credit,
)
from cluster.lab.evaluation.memory.settings import MemorySetting
from cluster.lab.evaluation.metrics import Estimate

# Percentiles 0 to 100.
_PERCENTS = 101


@dataclass(frozen=True, slots=True)
class EvidenceRecall:
    """``inside``: share of retrieved tokens whose frames lie in the evidence. ``spans``: share of evidence spans with
    at least one retrieved token. ``found``: whether there is any."""

    inside: float
    spans: float
    found: bool


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One question under one setting.

    * ``judged``: grade of ``said``
    * ``ttft_s``: time to first token, mean over turns; ``history_s``: footage seen before the question
    * ``retrieved``, ``held``: tokens per layer and head, mean over layers, heads and turns
    * ``bytes_moved``: KV loaded, over all turns; ``bytes_held``: KV held when asked
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


@dataclass(frozen=True, slots=True)
class Coverage:
    """Distances of all tokens to the nearest held one: ``area`` under their distribution function up to ``furthest``,
    and ``percentiles`` 0 to 100."""

    area: float
    furthest: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True)
class SettingResult:
    """All questions under one setting, in the order shared by all settings; ``coverage`` where measured."""

    setting: MemorySetting
    answered: tuple[AnswerRecord, ...]
    coverage: Mapping[Space, Coverage] = field(default_factory=dict)

    @cached_property
    def judged(self) -> tuple[GradedAnswer, ...]:
        return tuple(each.judged for each in self.answered)

    @cached_property
    def accuracy(self) -> dict[str, Estimate]:
        """Over all questions and by kind; see ``accuracy_by_kind``."""
        return accuracy_by_kind(self.judged)

    def of_kinds(self, kinds: Sequence[str]) -> Self:
        """Its questions of some kinds."""
        return replace(self, answered=tuple(each for each in self.answered if each.judged.kind in kinds))

    def drop_from(self, full: Self) -> dict[str, Estimate]:
        """Accuracy of ``full`` minus this.

        Raises:
            ConfigError: they answered different questions.
        """
        try:
            return accuracy_drop(full.judged, self.judged)
        except ValueError as error:
            raise ConfigError(f"{self.setting.name} and {full.setting.name}: {error}") from None

    @property
    def retrieval_ratio(self) -> float:
        """Retrieved over held tokens, mean over questions with any held."""
        return _mean(each.retrieved / each.held for each in self.answered if each.held)

    def mean(self, name: str) -> float:
        """Mean over questions of an ``AnswerRecord`` field."""
        return _mean(float(getattr(each, name)) for each in self.answered)

    def recall(self, name: str) -> float:
        """Mean over questions with evidence of an ``EvidenceRecall`` field."""
        return _mean(float(getattr(each.recall, name)) for each in self.answered if each.recall is not None)

    def row(self) -> dict[str, Any]:
        """Flat row of the table."""
        found: dict[str, Any] = {**asdict(self.setting), "questions": len(self.answered)}
        for kind, measured in self.accuracy.items():
            found |= measured.row(f"accuracy_{kind}")
        for space, coverage in self.coverage.items():
            found[f"coverage_{space}"] = coverage.area
        return found | {
            "retrieval_ratio": self.retrieval_ratio,
            "evidence_inside": self.recall("inside"),
            "evidence_spans": self.recall("spans"),
            "evidence_found": self.recall("found"),
            "ttft_s": self.mean("ttft_s"),
            "bytes_moved": self.mean("bytes_moved"),
            "bytes_held": self.mean("bytes_held"),
        }


def grade_answer(
    video: str,
    number: int,
    question: Question,
    said: Sequence[str],
    *,
    ttft_s: float,
    retrieved: float,
    held: float,
    bytes_moved: int,
    bytes_held: int,
    retrieved_at: Sequence[float] | None = None,
    yes: Sequence[float] = (),
) -> AnswerRecord:
    """Grade one conversation: ``said`` has one answer per turn, numbers are as in ``AnswerRecord``.

    ``retrieved_at``: seconds of the frame of every retrieved token, of all layers and heads; None if unknown.

    Raises:
        ValueError: not one answer per turn.
    """
    judged = GradedAnswer(video, number, question.kind, credit(question, said))
    known = retrieved_at is not None and bool(question.evidence)
    recall = evidence_recall(retrieved_at or (), question.evidence) if known else None
    at_s = question.at_s
    return AnswerRecord(judged, tuple(said), ttft_s, at_s, retrieved, held, bytes_moved, bytes_held, recall, tuple(yes))


def evidence_recall(retrieved_at: Sequence[float], evidence: Sequence[Span]) -> EvidenceRecall:
    """Precision and recall of retrieved tokens against evidence.

    Args:
        retrieved_at: seconds of the frame of every retrieved token ``[n]``.
        evidence: spans from first to last second, inclusive; at least one.
    """
    times = np.asarray(retrieved_at, dtype=np.float64)
    hits = np.array([(times >= start) & (times <= end) for start, end in evidence], dtype=np.bool_)
    spans = hits.any(axis=1)
    inside = float(hits.any(axis=0).mean()) if len(times) else 0.0
    return EvidenceRecall(inside, float(spans.mean()), bool(spans.any()))


def make_coverage(distances: Tensor, furthest: float) -> Coverage:
    """Distribution of ``nearest_distances`` (any shape). ``furthest`` is shared by all compared settings.

    Raises:
        ValueError: no distances.
    """
    if not distances.numel():
        raise ValueError("coverage needs at least one distance")
    ordered = distances.flatten().float().sort().values
    # Nearest ranks, as torch.quantile is limited to 16 million values.
    ranks = torch.linspace(0, len(ordered) - 1, _PERCENTS, dtype=torch.float64).round().long()
    percentiles = ordered[ranks.to(ordered.device)].tolist()
    return Coverage(coverage_area(distances.float(), furthest), furthest, tuple(float(each) for each in percentiles))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("nan")
