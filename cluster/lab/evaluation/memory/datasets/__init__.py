"""Published sets of questions about long videos: one reader per layout, registered in ``question_layouts``."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import SkippedVideo, check_directory, collect_or_skip, format_reasons, probe_video
from cluster.lab.evaluation.memory.questions import Question
from cluster.registry import Registry


@dataclass(frozen=True, slots=True)
class VideoQuestions:
    """One video and its questions in order of asking."""

    path: Path
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class QuestionDataset:
    """Videos with questions, and skipped ones."""

    directory: Path
    videos: tuple[VideoQuestions, ...]
    skipped: tuple[SkippedVideo, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One annotation: path of the video, and a factory of the question given the video's length in seconds, which
    raises ``ConfigError`` for an invalid annotation."""

    video: Path
    question: Callable[[float], Question]


Annotation = tuple[Path, int, Callable[[], Entry]]
"""File, record number, and parser, which raises ``ConfigError`` for an invalid record."""

QuestionLayout = Callable[[Path], Iterator[Annotation | SkippedVideo]]
"""Finds the annotations of a directory; raises ``ConfigError`` if it has another layout."""

question_layouts: Registry[QuestionLayout] = Registry(
    "layout of questions about the past",
    {name: f"cluster.lab.evaluation.memory.datasets.layouts:read_{name}" for name in ("mlvu", "rvs", "videomme")},
)


def load_question_dataset(directory: str | Path, layout: str) -> QuestionDataset:
    """Read a directory of videos with questions.

    Args:
        directory: holds videos and annotations.
        layout: one of ``question_layouts``.

    Raises:
        ConfigError: unknown layout, no such directory, another layout, or no video left; the message names the first
            skipped ones.
    """
    read = question_layouts.get(layout)
    folder = check_directory(directory)
    annotations = list(read(folder))
    skipped = [each for each in annotations if isinstance(each, SkippedVideo)]
    entries, bad = collect_or_skip(
        (path, f"record {number}: ", entry)
        for path, number, entry in (each for each in annotations if not isinstance(each, SkippedVideo))
    )
    # Per video, so that an unreadable one is skipped once.
    by_video: dict[Path, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_video[entry.video].append(entry)
    skipped += bad
    videos: list[VideoQuestions] = []
    for path, asked in by_video.items():
        if not path.exists():
            skipped.append(SkippedVideo(path, f"not on disk; {len(asked)} questions are about it"))
            continue
        probed, unreadable = collect_or_skip([(path, "", partial(probe_video, path))])
        questions, bad = collect_or_skip(
            (path, "", partial(each.question, facts.seconds)) for facts in probed for each in asked
        )
        skipped += unreadable + bad
        if questions:
            videos.append(VideoQuestions(path, tuple(sorted(questions, key=lambda each: each.at_s))))
    if not videos:
        raise ConfigError(f"no questions left in {folder}: {format_reasons(skipped)}")
    return QuestionDataset(folder, tuple(videos), tuple(skipped))
