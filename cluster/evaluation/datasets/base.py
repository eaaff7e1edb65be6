"""What a directory of labelled footage is to the evaluator, whatever its layout on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.registry import Registry

# So many reasons are named in an error; the rest are counted.
_REASONS_TOLD = 3


class LabelledEvent(NamedTuple):
    """One event of a video; ``start_s`` and ``end_s`` in seconds from the video's beginning."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LabelledVideo:
    """One video the evaluator can replay.

    Attributes:
        path: of the file.
        name: unique in its dataset.
        events: what happens in it; of each kind in ``kinds`` that is not here, nothing does.
        kinds: the kinds of event it can be judged on. A fight in UCF-Crime says nothing about whether somebody steals
            in it too, so it is judged on fights alone; a normal video is judged on every kind.
        strata: conditions that figures are broken down by, such as ``night``.
        motion: mean motion, in the dataset's own measure; ``None`` where it has to be measured.
        seconds: length.
    """

    path: Path
    name: str
    events: tuple[LabelledEvent, ...]
    kinds: tuple[str, ...]
    strata: frozenset[str] = frozenset()
    motion: float | None = None
    seconds: float = 0.0


class Skipped(NamedTuple):
    """Something in the directory that cannot be evaluated, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Labelled videos, what was left out, and the question that asks for each kind of event (kind -> text)."""

    layout: str
    directory: Path
    videos: tuple[LabelledVideo, ...]
    questions: dict[str, str]
    skipped: tuple[Skipped, ...] = field(default=())


Layout = Callable[[Path, float], Dataset]
"""Reads ``(directory, min_seconds)``; raises ``ConfigError`` when the directory is not of its layout at all."""

layouts: Registry[Layout] = Registry("dataset layout")


def load_dataset(directory: str | Path, layout: str = "scenes", *, min_seconds: float = 0.0) -> Dataset:
    """Read a directory of labelled videos.

    Args:
        directory: holds videos and labels.
        layout: how they lie in it, one of ``layouts``.
        min_seconds: shorter videos are skipped; the evaluator's window length.

    Raises:
        ConfigError: unknown layout, no such directory, one that is not of this layout, or nothing left of it; the
            message then says what was skipped first and why.
    """
    read = layouts.get(layout)
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(f"dataset directory {folder} {what}")
    dataset = read(folder, min_seconds)
    if not dataset.videos:
        raise ConfigError(f"nothing left to evaluate in {folder}: {reasons(dataset.skipped)}")
    return dataset


def reasons(skipped: Sequence[Skipped]) -> str:
    """The first few reasons in one line."""
    if not skipped:
        return "it holds no video of this layout"
    told = "; ".join(f"{each.path.name}: {each.reason}" for each in skipped[:_REASONS_TOLD])
    more = len(skipped) - _REASONS_TOLD
    return f"{told}; and {more} more" if more > 0 else told
