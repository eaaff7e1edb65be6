"""The report of an evaluation of memory with its headline figures, and what a reader must know beside them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cluster.lab.evaluation.datasets.video import Skipped
from cluster.lab.evaluation.memory.questions import Question
from cluster.lab.evaluation.memory.report import MemoryReport, memory_report
from cluster.lab.evaluation.memory.run import MemoryResults
from cluster.lab.evaluation.memory.score import credit
from cluster.lab.evaluation.memory.settings import FULL, ours
from cluster.lab.evaluation.report import measured_text
from cluster.models.base import VisionLanguageModel

_ASKED_ALONE = (
    "each question is asked of the memory alone, after what the window held was put into it as well, so that nothing "
    "stands beside the share; shares are of the bytes of all KV at the instant of the question"
)


@dataclass(frozen=True)
class MemorySummary(MemoryReport):
    """``headline``: the figures that stand for all."""

    headline: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The headline, then those of every setting."""
        return self.headline | super().figures


def chance(questions: Sequence[Question]) -> float:
    """Mean credit of who knows the kind of a question and always gives that kind's commonest answer, turn by turn."""
    said: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for question in questions:
        for turn, answer in enumerate(question.answers):
            said[question.kind, turn][answer] += 1
    usual = {place: counts.most_common(1)[0][0] for place, counts in said.items()}
    credits = [
        credit(question, [usual[question.kind, turn] for turn in range(len(question.turns))]) for question in questions
    ]
    return sum(credits) / len(credits)


def summarise(
    title: str,
    found: MemoryResults,
    model: VisionLanguageModel,
    *,
    facts: dict[str, str] | None = None,
    skipped: Sequence[Skipped] = (),
) -> MemorySummary:
    """Measure everything, against full KV where it is among the settings.

    Figures: ``chance``; with full KV ``accuracy_full``; with ours at an eighth as well ``accuracy_drop_at_eighth``,
    the paired difference of both. ``skipped``: what the data set left out before.
    """
    settings = {result.setting: result for result in found.results}
    questions = [question for clip in found.footage for question in clip.questions]
    headline = {"chance": chance(questions)}
    notes = [_ASKED_ALONE]
    if model.settings.open_instruction is None:
        notes.append("the model's sightline.json has no open_instruction: it was not taught to answer free questions")
    report = memory_report(
        title,
        found.results,
        baseline=FULL if FULL in settings else None,
        facts=facts,
        skipped=(*skipped, *found.skipped),
    )
    if FULL in settings:
        full = settings[FULL].accuracy["all"]
        headline["accuracy_full"] = full.value
        low = full.interval.low
        if math.isnan(low) or low <= headline["chance"]:
            notes.insert(
                0,
                f"full KV answers {measured_text(full)} rightly and always giving a kind's commonest answer "
                f"{headline['chance']:.3f}: this model is not clearly above chance here, so a small drop says nothing",
            )
    drop = report.drops.get(ours(1 / 8))
    if drop is not None:
        headline["accuracy_drop_at_eighth"] = drop["all"].value
    if found.incomplete:
        notes.append(f"{found.incomplete} answers were given without all they wanted of the memory, in time or at all")
    body: dict[str, Any] = {each.name: getattr(report, each.name) for each in fields(report)}
    return MemorySummary(**{**body, "notes": tuple(notes)}, headline=headline)
