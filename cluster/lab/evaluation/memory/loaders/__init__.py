"""Published sets of questions about long videos: one file per layout, each with one entry in ``past_layouts``.

What a directory of videos with questions about their past is to the evaluator, whatever its layout on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import Skipped, collect, dataset_folder, probe_video, reasons
from cluster.lab.evaluation.memory.asking import Question
from cluster.registry import Registry


@dataclass(frozen=True, slots=True)
class DatasetVideo:
    """One video and what is asked about it, in the order of asking."""

    path: Path
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class PastDataset:
    """Videos with questions, and what was left out and why."""

    layout: str
    directory: Path
    videos: tuple[DatasetVideo, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One annotation as a layout reads it: where the video must lie, and a function that makes the question once the
    video's length in seconds is known; that raises ``ConfigError`` where the annotation makes no sense."""

    video: Path
    question: Callable[[float], Question]


Annotation = tuple[Path, int, Callable[[], Entry]]
"""File, number in it, and what reads it; that raises ``ConfigError`` where it is none."""

PastLayout = Callable[[Path], Iterator[Annotation | Skipped]]
"""Finds the annotations of a directory; raises ``ConfigError`` when it is not of the layout at all."""

past_layouts: Registry[PastLayout] = Registry(
    "layout of questions about the past",
    {name: f"cluster.lab.evaluation.memory.loaders.layouts:read_{name}" for name in ("mlvu", "rvs", "videomme")},
)


def load_past_dataset(directory: str | Path, layout: str) -> PastDataset:
    """Read a directory of videos and questions about them.

    Args:
        directory: holds videos and annotations.
        layout: how they lie in it, one of ``past_layouts``.

    Raises:
        ConfigError: unknown layout, no such directory, one that is not of this layout, or nothing left of it; the
            message then says what was skipped first and why.
    """
    read = past_layouts.get(layout)
    folder = dataset_folder(directory)
    annotations = list(read(folder))
    skipped = [each for each in annotations if isinstance(each, Skipped)]
    entries, bad = collect(
        (path, f"record {number}: ", entry)
        for path, number, entry in (each for each in annotations if not isinstance(each, Skipped))
    )
    # By video: one that cannot be played is left out once, not with every question.
    by_video: dict[Path, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_video[entry.video].append(entry)
    skipped += bad
    videos: list[DatasetVideo] = []
    for path, asked in by_video.items():
        if not path.exists():
            skipped.append(Skipped(path, f"not on disk; {len(asked)} questions are about it"))
            continue
        probed, unreadable = collect([(path, "", partial(probe_video, path))])
        questions, bad = collect(
            (path, "", partial(each.question, facts.seconds)) for facts in probed for each in asked
        )
        skipped += unreadable + bad
        if questions:
            videos.append(DatasetVideo(path, tuple(sorted(questions, key=lambda each: each.at_s))))
    if not videos:
        raise ConfigError(f"nothing left to ask about in {folder}: {reasons(skipped)}")
    return PastDataset(layout, folder, tuple(videos), tuple(skipped))
