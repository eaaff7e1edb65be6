"""Annotation files as lists of records, from JSON or Parquet, and their fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import VIDEO_SUFFIXES, Skipped
from cluster.lab.evaluation.memory.asking import MultipleChoice, PastQuestion, Question
from cluster.lab.evaluation.memory.loaders.base import Entry

Record = dict[str, Any]


class BadRecordError(Exception):
    """A record lacks a field or has one of another type; the message says which."""


def read_records(path: Path) -> list[Record]:
    """Every record of an annotation file: a JSON list of objects (or an object with one list in it), or a Parquet
    table.

    Raises:
        ConfigError: unreadable, neither of these, or Parquet without pyarrow to read it.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else body
    if not isinstance(body, list) or not all(isinstance(each, dict) for each in body):
        raise ConfigError(f"{path} is not a list of annotations: each must be an object in one list")
    return body


def _parquet(path: Path) -> list[Record]:
    try:
        # Not everybody has it: nothing else here needs it.
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"{path} is Parquet, which takes pyarrow to read: pip install pyarrow, or save the annotations as JSON"
        ) from None
    try:
        rows: list[Record] = parquet.read_table(str(path)).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return rows


def text(record: Record, *names: str) -> str:
    """The first of these fields, as text.

    Raises:
        BadRecordError: none is there, or it is empty or no text.
    """
    for name in names:
        if name in record:
            value = record[name]
            if isinstance(value, str) and value.strip():
                return value.strip()
            raise BadRecordError(f"{name} is {value!r} and must be text")
    raise BadRecordError(f"it has no {' or '.join(names)}")


def texts(record: Record, *names: str) -> tuple[str, ...]:
    """The first of these fields, as a list of texts.

    Raises:
        BadRecordError: none is there, or it is no list of texts.
    """
    for name in names:
        if name in record:
            value = record[name]
            if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
                return tuple(each.strip() for each in value)
            raise BadRecordError(f"{name} is {value!r} and must be a list of texts")
    raise BadRecordError(f"it has no {' or '.join(names)}")


def seconds(record: Record, name: str) -> float:
    """A field in seconds.

    Raises:
        BadRecordError: it is not there or no number.
    """
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRecordError(f"{name} is {value!r} and must be a number of seconds")
    return float(value)


def read_mlvu(directory: Path) -> tuple[list[Entry], list[Skipped]]:
    """Every multiple-choice question, asked at the end of its video.

    Raises:
        ConfigError: no annotation file in ``json/``, or one that cannot be read.
    """
    root = directory / "MLVU" if (directory / "MLVU" / "json").is_dir() else directory
    files = sorted((root / "json").glob("*.json"))
    if not files:
        raise ConfigError(f"{directory} is not in MLVU's layout: it holds no json/*.json")
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for path in files:
        whole = 0
        for number, record in enumerate(read_records(path)):
            if "candidates" not in record:
                whole += 1
                continue
            try:
                entries.append(_entry(root, path, record))
            except (BadRecordError, ConfigError) as error:
                skipped.append(Skipped(path, f"record {number}: {error}"))
        if whole:
            skipped.append(Skipped(path, f"{whole} records without candidates, whose answers only a model can judge"))
    return entries, skipped


def _entry(root: Path, annotation: Path, record: Record) -> Entry:
    name, kind = text(record, "video"), text(record, "question_type")
    options, answer = texts(record, "candidates"), text(record, "answer")
    if options.count(answer) != 1:
        raise BadRecordError(f"the answer {answer!r} is not one of the candidates")
    folder = root / "video"
    # Some copies name the folder in the record as well.
    video = folder / name if "/" in name else folder / annotation.stem / name
    question = partial(MultipleChoice, kind, text(record, "question"), options, options.index(answer))
    question(0.0)
    return Entry(video, question)


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
