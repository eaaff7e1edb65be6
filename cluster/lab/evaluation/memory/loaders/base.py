"""What a directory of videos with questions about their past is to the evaluator, whatever its layout on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import VIDEO_SUFFIXES, Skipped, UnreadableVideoError, probe_video, reasons
from cluster.lab.evaluation.memory.asking import MultipleChoice, PastQuestion, Question
from cluster.lab.evaluation.memory.loaders.records import BadRecordError, Record, read_records, seconds, text, texts
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


PastLayout = Callable[[Path], tuple[list[Entry], list[Skipped]]]
"""Reads the annotations of a directory; raises ``ConfigError`` when it is not of the layout at all."""

past_layouts: Registry[PastLayout] = Registry(
    "layout of questions about the past",
    {name: f"cluster.lab.evaluation.memory.loaders.{name}:read_{name}" for name in ("mlvu", "rvs", "videomme")},
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
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(f"dataset directory {folder} {what}")
    entries, skipped = read(folder)
    videos, more = _videos(entries)
    skipped += more
    if not videos:
        raise ConfigError(f"nothing left to ask about in {folder}: {reasons(skipped)}")
    return PastDataset(layout, folder, tuple(videos), tuple(skipped))


def _videos(entries: Iterable[Entry]) -> tuple[list[DatasetVideo], list[Skipped]]:
    """Entries by video; a video that cannot be played is left out once, not with every question."""
    by_video: dict[Path, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_video[entry.video].append(entry)
    videos: list[DatasetVideo] = []
    skipped: list[Skipped] = []
    for path, asked in by_video.items():
        if not path.exists():
            skipped.append(Skipped(path, f"not on disk; {len(asked)} questions are about it"))
            continue
        try:
            seconds = probe_video(path).seconds
        except UnreadableVideoError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        questions: list[Question] = []
        for entry in asked:
            try:
                question = entry.question(seconds)
            except ConfigError as error:
                skipped.append(Skipped(path, str(error)))
                continue
            questions.append(question)
        if questions:
            videos.append(DatasetVideo(path, tuple(sorted(questions, key=lambda each: each.at_s))))
    return videos, skipped


# Containers round their length; a question this close behind the end is one at the end.
_SLACK_S = 2.0


def read_rvs(directory: Path) -> tuple[list[Entry], list[Skipped]]:
    """Every question with times in seconds.

    Raises:
        ConfigError: no annotations, or ones that cannot be read.
    """
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    clips: dict[str, float] = {}
    asked: list[tuple[Path, int, Record]] = []
    for path in sorted(directory.rglob("*.json")):
        for number, record in enumerate(read_records(path)):
            if "conversations" in record or "question" in record:
                asked.append((path, number, record))
            elif isinstance(begins := record.get("start_time"), (int, float)) and "video_id" in record:
                clips[str(record["video_id"])] = float(begins)
    if not asked:
        raise ConfigError(f"{directory} is not in RVS's layout: no *.json in it holds questions about videos")
    for path, number, record in asked:
        turns = record.get("conversations", [record])
        try:
            video = _video(directory, path, record)
            # The flat form alone counts from the beginning of the original video.
            begins = 0.0 if "conversations" in record else clips.get(str(record.get("video_id")), 0.0)
            if not isinstance(turns, list):
                raise BadRecordError("conversations is no list")
        except BadRecordError as error:
            skipped.append(Skipped(path, f"record {number}: {error}"))
            continue
        for turn in turns:
            try:
                entries.append(Entry(video, _question(turn, begins)))
            except (BadRecordError, ConfigError) as error:
                skipped.append(Skipped(path, f"record {number}: {error}"))
    return entries, skipped


def _question(turn: object, begins: float) -> Callable[[float], Question]:
    if not isinstance(turn, dict):
        raise BadRecordError(f"{turn!r} is no question")
    asked, answer = text(turn, "question"), text(turn, "answer")
    start, end = seconds(turn, "start_time") - begins, seconds(turn, "end_time") - begins
    if not 0 <= start < end:
        raise BadRecordError(f"from {start:g} to {end:g} s is no stretch of its clip")
    kind = text(turn, "answer_type", "question_type", "task") if _named(turn) else "open"
    if "choices" not in turn:
        return partial(_timed, partial(PastQuestion, kind, (asked,), (answer,)), start, end)
    options = texts(turn, "choices")
    if options.count(answer) != 1:
        raise BadRecordError(f"the answer {answer!r} is not one of the choices")
    return partial(_timed, partial(MultipleChoice, kind, asked, options, options.index(answer)), start, end)


def _named(turn: Record) -> bool:
    return any(name in turn for name in ("answer_type", "question_type", "task"))


def _timed(make: Callable[..., Question], start: float, end: float, length: float) -> Question:
    if end > length + _SLACK_S:
        raise ConfigError(f"a question at {end:g} s lies behind the video's end at {length:.1f} s")
    at = min(end, length)
    return make(at_s=at, evidence=((start, at),) if start < at else ())


def _video(directory: Path, annotation: Path, record: Record) -> Path:
    """Where the file lies, or where it would."""
    named = Path(text(record, "video_path", "video_id"))
    suffixes = [""] if named.suffix.casefold() in VIDEO_SUFFIXES else sorted(VIDEO_SUFFIXES)
    folders = [directory, annotation.parent, annotation.parent / "videos", directory / "videos"]
    # A stated path is that of another machine's checkout: its last part is what counts.
    names = [named, Path(named.name)]
    places = [folder / f"{name}{suffix}" for folder in folders for name in names for suffix in suffixes]
    return next((place for place in places if place.is_file()), annotation.parent / "videos" / named.name)
