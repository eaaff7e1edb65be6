"""What an evaluation of memory found: every question under every setting, and one row for each setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

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

# Points of a distribution that are kept: its percentiles.
_PERCENTS = 101


@dataclass(frozen=True, slots=True)
class EvidenceRecall:
    """``inside``: share of the retrieved tokens whose frames lie in the evidence. ``spans``: share of the evidence's
    spans of which at least one token was retrieved. ``found``: whether any token of it was."""

    inside: float
    spans: float
    found: bool


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One question under one setting.

    * ``judged``: which it is, and how right ``said`` was
    * ``ttft_s``: from the question until its first word, mean over turns; ``history_s``: footage seen before it
    * ``retrieved``, ``held``: tokens of a layer and head, mean over layers, heads and turns
    * ``bytes_moved``: KV brought to where it is computed with, for all turns; ``bytes_held``: KV held when asked
    * ``recall``: None where the question has no evidence
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


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well what was kept stands for what was there: ``area`` under the distribution function of the distances up to
    ``furthest``, and their ``percentiles`` 0 to 100."""

    area: float
    furthest: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True)
class SettingResult:
    """All questions under one setting, in the same order as under the others; ``coverage`` where it was measured."""

    setting: MemorySetting
    answered: tuple[AnswerRecord, ...]
    coverage: Mapping[Space, Coverage] = field(default_factory=dict)

    @cached_property
    def judged(self) -> tuple[GradedAnswer, ...]:
        return tuple(each.judged for each in self.answered)

    @cached_property
    def accuracy(self) -> dict[str, Estimate]:
        """Of all questions and by kind; see ``accuracy_by_kind``."""
        return accuracy_by_kind(self.judged)

    def drop_from(self, full: SettingResult) -> dict[str, Estimate]:
        """How much less accurate this is than ``full``.

        Raises:
            ConfigError: they answered different questions.
        """
        try:
            return accuracy_drop(full.judged, self.judged)
        except ValueError as error:
            raise ConfigError(f"{self.setting.name} and {full.setting.name}: {error}") from None

    @property
    def retrieval_ratio(self) -> float:
        """Tokens retrieved over tokens held, mean over questions that anything was held for."""
        return _mean(each.retrieved / each.held for each in self.answered if each.held)

    def mean(self, name: str) -> float:
        """Mean over questions of one of ``AnswerRecord``'s numbers."""
        return _mean(float(getattr(each, name)) for each in self.answered)

    def recall(self, name: str) -> float:
        """Mean over questions with evidence of one of ``EvidenceRecall``'s numbers."""
        return _mean(float(getattr(each.recall, name)) for each in self.answered if each.recall is not None)

    def row(self) -> dict[str, Any]:
        """The setting's line of the table, flat."""
        found: dict[str, Any] = {**asdict(self.setting), "questions": len(self.answered)}
        for kind, measured in self.accuracy.items():
            found[f"accuracy_{kind}"] = measured.value
            found[f"accuracy_{kind}_low"], found[f"accuracy_{kind}_high"] = measured.interval
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
    history_s: float,
    retrieved: float,
    held: float,
    bytes_moved: int,
    bytes_held: int,
    retrieved_at: Sequence[float] | None = None,
) -> AnswerRecord:
    """Judge one conversation; the numbers are those of ``AnswerRecord``.

    Args:
        video: name of what was asked about.
        number: of the question in it.
        question: what was asked.
        said: the answer to each turn.
        ttft_s: seconds until the first word.
        history_s: seconds of footage before the question.
        retrieved: tokens.
        held: tokens.
        bytes_moved: for all turns.
        bytes_held: when asked.
        retrieved_at: seconds of the frame of every retrieved token, of any layers and heads; None if unknown.

    Raises:
        ValueError: not one answer for each turn.
    """
    judged = GradedAnswer(video, number, question.kind, credit(question, said))
    known = retrieved_at is not None and bool(question.evidence)
    recall = evidence_recall(retrieved_at or (), question.evidence) if known else None
    return AnswerRecord(judged, tuple(said), ttft_s, history_s, retrieved, held, bytes_moved, bytes_held, recall)


def evidence_recall(retrieved_at: Sequence[float], evidence: Sequence[Span]) -> EvidenceRecall:
    """How much of what was retrieved is evidence and how much evidence was retrieved.

    Args:
        retrieved_at: seconds of the frame of every retrieved token ``[n]``.
        evidence: spans from first to last second, both included; at least one.
    """
    times = np.asarray(retrieved_at, dtype=np.float64)
    hits = np.array([(times >= start) & (times <= end) for start, end in evidence], dtype=np.bool_)
    spans = hits.any(axis=1)
    inside = float(hits.any(axis=0).mean()) if len(times) else 0.0
    return EvidenceRecall(inside, float(spans.mean()), bool(spans.any()))


def make_coverage(distances: Tensor, furthest: float) -> Coverage:
    """The distribution of ``nearest_distances`` (any shape). ``furthest`` must be that of all settings compared.

    Raises:
        ValueError: no distance.
    """
    if not distances.numel():
        raise ValueError("coverage needs at least one distance")
    ordered = distances.flatten().float().sort().values
    # Nearest ranks: torch.quantile takes no more than 16 million values.
    ranks = torch.linspace(0, len(ordered) - 1, _PERCENTS, dtype=torch.float64).round().long()
    percentiles = ordered[ranks.to(ordered.device)].tolist()
    return Coverage(coverage_area(distances.float(), furthest), furthest, tuple(float(each) for each in percentiles))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("nan")
