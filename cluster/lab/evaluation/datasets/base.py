"""What a directory of labelled footage is to the evaluator, whatever its layout on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.video import LabelledVideo, Skipped
from cluster.registry import Registry

# So many reasons are named in an error; the rest are counted.
_REASONS_TOLD = 3


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

layouts: Registry[Layout] = Registry(
    "dataset layout",
    {
        "scenes": "cluster.lab.evaluation.datasets.scenes:read_scenes",
        "ucf-crime": "cluster.lab.evaluation.datasets.ucf_crime:read_ucf_crime",
    },
)


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
