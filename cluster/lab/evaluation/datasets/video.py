"""What every layout of a data set is read into: videos with what happens in them and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LabelledVideo:
    """One video and its truth.

    * ``events``: (kind, start, end), seconds from the video's first picture
    * ``kinds``: what it can be judged on; a kind named here without an event did not happen
    * ``strata``: names of the groups it is also reported in ("night", "noisy" …)
    * ``motion``: mean motion by the data set's own measure, ``None`` where the evaluation is to measure it
    """

    path: Path
    name: str
    events: tuple[tuple[str, float, float], ...]
    kinds: tuple[str, ...]
    strata: frozenset[str] = frozenset()
    motion: float | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A video that is left out, and why, in one sentence."""

    path: Path
    reason: str
