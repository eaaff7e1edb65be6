"""What a check found, as data that goes into an issue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["right", "wrong", "measured"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One comparison: ``sentence`` says what was found and the limit; ``error``: traceback where it failed."""

    name: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]
    error: str = ""


@dataclass(frozen=True, slots=True)
class AskedWindow:
    """One question about one window: score in full and pruned, what is said of either, and what is true (``None``:
    undecidable or unknown)."""

    start_s: float
    end_s: float
    question: str
    truth: bool | None
    full_score: float
    pruned_score: float
    full: bool
    pruned: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """``config``: the checkpoint's ``config.json``, empty for a preset; ``machine`` as benches print it."""

    model: str
    family: str
    parameters: int
    random_weights: bool
    device: str
    dtype: str
    clip: str
    window_s: float
    stride_s: float
    stages: tuple[Stage, ...]
    answers: tuple[AskedWindow, ...]
    config: dict[str, Any]
    machine: dict[str, Any]

    @property
    def wrong(self) -> tuple[Stage, ...]:
        """The stages that failed."""
        return tuple(stage for stage in self.stages if stage.verdict == "wrong")

    def to_json(self) -> dict[str, Any]:
        """All of it, the verdict first."""
        return {"verdict": "wrong" if self.wrong else "right", **asdict(self)}
