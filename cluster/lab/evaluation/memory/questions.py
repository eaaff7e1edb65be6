"""What is asked about the past: a short conversation, or one question with options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ConfigError

LETTERS = "ABCDEFGHIJ"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PastQuestion:
    """A conversation of one or more ``turns`` and what is right for each.

    ``kind``: what it is reported under. ``at_s``: when it is asked, seconds from the first picture. ``since_s``: what
    was seen before does not count; None for all of it. ``evidence``: spans of time that the answers rest on; empty
    where they are not known, or where the answer is that something never happened.

    Raises:
        ConfigError: no turn, or not one answer for each.
    """

    kind: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    at_s: float
    since_s: float | None = None
    evidence: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns or len(self.turns) != len(self.answers):
            raise ConfigError(f"{len(self.turns)} turns with {len(self.answers)} answers: each turn needs one answer")


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """One question with options; ``answer`` is the index of the right one. The rest as in ``PastQuestion``.

    Raises:
        ConfigError: fewer than two options, more than there are letters for, or an answer that is none of them.
    """

    kind: str
    text: str
    options: tuple[str, ...]
    answer: int
    at_s: float
    since_s: float | None = None
    evidence: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= len(self.options) <= len(LETTERS):
            raise ConfigError(f"a choice is between 2 and {len(LETTERS)} options, not {len(self.options)}")
        if not 0 <= self.answer < len(self.options):
            raise ConfigError(f"option {self.answer} cannot be right: there are {len(self.options)}")

    @property
    def turns(self) -> tuple[str, ...]:
        """The one prompt: question, lettered options, and what form the answer is to have."""
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, self.options, strict=False))
        return (f"{self.text}\n{listed}\nAnswer with the option's letter from the given choices directly.",)

    @property
    def answers(self) -> tuple[str, ...]:
        """The letter of the right option."""
        return (LETTERS[self.answer],)


Question = PastQuestion | MultipleChoice
