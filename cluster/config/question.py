"""``questions:`` — what is asked of every window."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from cluster.config.base import Section
from cluster.config.quantity import Duration
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

    consecutive: int | None = Field(
        default=None, ge=1, le=1000, description="Positive windows in a row that open an incident; null: as in alerts."
    )
    cooldown_s: Duration | None = Field(
        default=None, ge=0, description="For so long after an incident none is opened; null: as in alerts."
    )
    severity: Literal["info", "warning", "critical"] | None = Field(
        default=None, description="Severity of its incidents; null: as in alerts."
    )

    @field_validator("id")
    @classmethod
    def _not_a_state(cls, name: str) -> str:
        from cluster.types.cameras import HEALTH_SUBJECTS

        if name in HEALTH_SUBJECTS:
            raise ValueError(f"must not be {name!r}, which names a state of the camera itself (docs/alerts.md)")
        return name

    def question(self) -> Question:
        """The same as the engine takes it."""
        return Question(self.id, self.text, self.threshold, self.explain)
