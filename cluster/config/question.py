"""``questions:`` — what is asked of every window."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section
from cluster.types import Question


class QuestionConfig(Section):
    """One standing yes/no question."""

    id: str = Field(
        min_length=1,
        max_length=64,
        pattern=r"^[\w.-]+$",
        description="Short name of the question: letters, digits, _ . -",
    )
    text: str = Field(
        min_length=1, max_length=2000, description="The question in plain words, to be answered by yes or no."
    )
    threshold: float = Field(
        default=0.5, gt=0, lt=1, description="Answers with a score at or above it are positive, 0..1."
    )
    explain: bool = Field(default=False, description="Also decode a sentence; costs time on every window.")

    def question(self) -> Question:
        """The same as the engine takes it."""
        return Question(self.id, self.text, self.threshold, self.explain)
