"""RVS-Ego and RVS-Movie (VStream-QA, Zhang et al. 2024): questions asked while a video runs, answered in free words.

Two forms are read. As ReKV keeps it: a list of videos, each with ``video_path`` (or ``video_id``) and
``conversations`` of ``question``, ``answer``, ``start_time``, ``end_time``, and ``choices`` where there are options.
As published: ``test_qa_*.json``, a flat list of questions with ``video_id``, beside ``rvs_*.json``, which says where in
the original video each clip begins; times are then turned into the clip's own. A question is asked at ``end_time``,
and what it is about lies between ``start_time`` and that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import VIDEO_SUFFIXES, Skipped
from cluster.lab.evaluation.memory.asking import MultipleChoice, PastQuestion, Question
from cluster.lab.evaluation.memory.loaders.base import Entry
from cluster.lab.evaluation.memory.loaders.records import BadRecordError, Record, read_records, seconds, text, texts

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
