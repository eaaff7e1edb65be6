"""Published long-video question datasets: one reader per layout, registered in ``question_layouts``.

* MLVU (Zhou et al. 2024), dev set: ``json/1_plotQA.json`` etc., videos in ``video/1_plotQA/``. Fields: ``video`` (file
  name), ``question``, ``candidates``, ``answer`` (text of a candidate), ``question_type``. Generation tasks have no
  candidates and are skipped: another model has to grade them.
* RVS-Ego and RVS-Movie (VStream-QA, Zhang et al. 2024): questions asked while a video runs, with free-form answers.
  ReKV's format: a list of videos with ``video_path`` (or ``video_id``) and ``conversations`` of ``question``,
  ``answer``, ``start_time``, ``end_time``, and optional ``choices``. Published format: ``test_qa_*.json``, a flat list
  of questions with ``video_id``, beside ``rvs_*.json`` with each clip's offset in the original video, which is
  subtracted. A question is asked at ``end_time``; its evidence starts at ``start_time``.
* Video-MME (Fu et al. 2024): one table of questions, Parquet or JSON, videos in ``data/``. Fields: ``videoID`` (file
  name without suffix), ``question``, ``options`` (texts with their letter), ``answer`` (a letter), ``duration`` (short,
  medium, long), ``task_type``. The official evaluation's JSON nests questions under ``questions``.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.files import read_json
from cluster.lab.evaluation.datasets import (
    VIDEO_SUFFIXES,
    Skipped,
    SkippedVideo,
    check_directory,
    format_reasons,
    probe_video,
)
from cluster.lab.evaluation.memory.questions import LETTERS, Footage, Question, Span, multiple_choice
from cluster.registry import Registry

# Tolerance for questions after the (rounded) end of a video.
_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class QuestionDataset:
    """Videos, named by their path in the directory, with questions in order of asking; and skipped videos."""

    videos: tuple[Footage, ...]
    skipped: tuple[SkippedVideo, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One annotation: a video, a question whose time is not set yet, and its time span; without one it is asked at the
    end of the video."""

    video: Path
    question: Question
    span: Span | None = None

    def ask(self, length: float) -> Question:
        """Set the question's time in a video of ``length`` seconds. Raises ``ConfigError``: it is after the end."""
        if self.span is None:
            return replace(self.question, at_s=length)
        start, end = self.span
        if end > length + _SLACK_S:
            raise ConfigError(f"a question at {end:g} s is after the video's end at {length:.1f} s")
        at = min(end, length)
        return replace(self.question, at_s=at, evidence=((start, at),) if start < at else ())


QuestionLayout = Callable[[Path, Skipped], list[Entry]]
"""Reads the annotations of a directory; raises ``ConfigError`` if it has another layout."""

question_layouts: Registry[QuestionLayout] = Registry(
    "layout of questions about the past",
    {name: f"{__name__}:read_{name}" for name in ("mlvu", "rvs", "videomme")},
)


def load_question_dataset(directory: str | Path, layout: str) -> QuestionDataset:
    """Read a directory of videos with questions in one of ``question_layouts``. Raises ``ConfigError``: unknown layout,
    no such directory, another layout, or no video left; the message gives the reasons of the first skipped ones."""
    read = question_layouts.get(layout)
    folder = check_directory(directory)
    skipped = Skipped()
    # Grouped by video, so that an unreadable one is skipped only once.
    by_video: dict[Path, list[Entry]] = defaultdict(list)
    for entry in read(folder, skipped):
        by_video[entry.video].append(entry)
    videos: list[Footage] = []
    for path, asked in by_video.items():
        if not path.exists():
            skipped.append(SkippedVideo(path, f"not on disk; {len(asked)} questions are about it"))
            continue
        questions: list[Question] = []
        with skipped.instead(path):
            length = probe_video(path).seconds
            for each in asked:
                with skipped.instead(path):
                    questions.append(each.ask(length))
        if questions:
            # By relative path, as two folders may hold videos of the same name.
            name, ordered = os.path.relpath(path, folder), sorted(questions, key=lambda each: each.at_s)
            videos.append(Footage(name, path, tuple(ordered)))
    if not videos:
        raise ConfigError(f"no questions left in {folder}: {format_reasons(skipped)}")
    return QuestionDataset(tuple(videos), tuple(skipped))


# -- fields of annotation files -------------------------------------------------------------------
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All records of an annotation file: a JSON list of objects (or an object with a single list in it), or a Parquet
    table. Raises ``ConfigError``: unreadable, another format, or Parquet without pyarrow."""
    if path.suffix == ".parquet":
        return _parquet(path)
    body = read_json(path)
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else body
    if not isinstance(body, list) or not all(isinstance(each, dict) for each in body):
        raise ConfigError(f"{path} is not a list of annotations: a single list of objects is expected")
    return body


def _parquet(path: Path) -> list[Record]:
    try:
        # Optional dependency.
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"{path} is Parquet, which needs pyarrow: pip install pyarrow, or save the annotations as JSON"
        ) from None
    try:
        rows: list[Record] = parquet.read_table(str(path)).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return rows


def text(record: Record, *names: str) -> str:
    """Value of the first of these fields that exists. Raises ``ConfigError``: missing, empty or not a string."""
    found = [name for name in names if name in record]
    if not found:
        raise ConfigError(f"it has no {' or '.join(names)}")
    value = record[found[0]]
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ConfigError(f"{found[0]} is {value!r} and must be text")


def texts(record: Record, name: str) -> tuple[str, ...]:
    """Value of a field that lists strings. Raises ``ConfigError``: missing, or of another type."""
    value = record.get(name)
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return tuple(each.strip() for each in value)
    raise ConfigError(f"{name} is {value!r} and must be a list of texts")


def seconds(record: Record, name: str) -> float:
    """Value of a numeric field. Raises ``ConfigError``: missing, or of another type."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r} and must be a number of seconds")
    return float(value)


_TIMED_KINDS = ("answer_type", "question_type", "task")
_LETTERED = re.compile(r"^\(?([A-J])[.):]\s*")
_YOUTUBE = re.compile(r"(?:v=|youtu\.be/)([\w-]{11})")
_FOLDERS = ("data", "video", "videos", ".")


def _choice(kind: str, record: Record, field: str) -> Question:
    """A question whose answer is the text of an option."""
    options, answer = texts(record, field), text(record, "answer")
    if options.count(answer) != 1:
        raise ConfigError(f"the answer {answer!r} is not one of the {field}")
    return multiple_choice(kind, text(record, "question"), options, options.index(answer))


def _first_existing(folders: list[Path], names: list[Path], default: Path) -> Path:
    """First existing file with one of these names and any video suffix, else ``default``."""
    for name in names:
        suffixes = [""] if name.suffix.casefold() in VIDEO_SUFFIXES else sorted(VIDEO_SUFFIXES)
        for folder in folders:
            for suffix in suffixes:
                path = folder / f"{name}{suffix}"
                if path.is_file():
                    return path
    return default


# -- MLVU -----------------------------------------------------------------------------------------
def read_mlvu(directory: Path, skipped: Skipped) -> list[Entry]:
    """Every multiple-choice question, asked at the end of its video."""
    root = directory / "MLVU" if (directory / "MLVU" / "json").is_dir() else directory
    files = sorted((root / "json").glob("*.json"))
    if not files:
        raise ConfigError(f"{directory} is not in MLVU's layout: it holds no json/*.json")
    found = []
    for path in files:
        records = read_records(path)
        if whole := sum("candidates" not in each for each in records):
            reason = f"{whole} records without candidates, whose answers only a model can grade"
            skipped.append(SkippedVideo(path, reason))
        for number, record in enumerate(records):
            if "candidates" not in record:
                continue
            with skipped.instead(path, f"record {number}: "):
                name, kind = text(record, "video"), text(record, "question_type")
                # Some copies include the folder in the record.
                video = root / "video" / name if "/" in name else root / "video" / path.stem / name
                found.append(Entry(video, _choice(kind, record, "candidates")))
    return found


# -- RVS ------------------------------------------------------------------------------------------
def read_rvs(directory: Path, skipped: Skipped) -> list[Entry]:
    """Every question with times in seconds."""
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
    found = []
    for path, number, record in asked:
        turns = record.get("conversations", [record])
        # Only the flat format counts time from the start of the original video.
        begins = 0.0 if "conversations" in record else clips.get(str(record.get("video_id")), 0.0)
        whole = isinstance(turns, list) and any(name in record for name in ("video_path", "video_id"))
        for turn in turns if whole else [None]:
            with skipped.instead(path, f"record {number}: "):
                found.append(_rvs(directory, path, record, turn, begins))
    return found


def _rvs(directory: Path, annotation: Path, record: Record, turn: object, begins: float) -> Entry:
    named = Path(text(record, "video_path", "video_id"))
    folders = [directory, annotation.parent, annotation.parent / "videos", directory / "videos"]
    # The path may be from another checkout, so its last part is tried alone, too.
    video = _first_existing(folders, [named, Path(named.name)], annotation.parent / "videos" / named.name)
    if not isinstance(turn, dict):
        raise ConfigError(f"{turn!r} is not a question")
    asked, answer = text(turn, "question"), text(turn, "answer")
    start, end = seconds(turn, "start_time") - begins, seconds(turn, "end_time") - begins
    if not 0 <= start < end:
        raise ConfigError(f"from {start:g} to {end:g} s is not an interval of its clip")
    kind = text(turn, *_TIMED_KINDS) if any(name in turn for name in _TIMED_KINDS) else "open"
    question = _choice(kind, turn, "choices") if "choices" in turn else Question(kind, (asked,), (answer,), 0.0)
    return Entry(video, question, (start, end))


# -- Video-MME ------------------------------------------------------------------------------------
def read_videomme(directory: Path, skipped: Skipped) -> list[Entry]:
    """Every question, asked at the end of its video and reported by the video's duration class."""
    # JSON first: Parquet needs an extra package.
    patterns = ("*.json", "videomme/*.json", "*.parquet", "videomme/*.parquet")
    tables = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    if not tables:
        raise ConfigError(f"{directory} is not in Video-MME's layout: it holds neither *.json nor videomme/*.parquet")
    table, *others = tables
    skipped += [SkippedVideo(path, f"not read: {table.name} holds the questions") for path in others]
    found = []
    for number, record in enumerate(_flat(read_records(table))):
        with skipped.instead(table, f"record {number}: "):
            found.append(_videomme(directory, record))
    return found


def _flat(records: list[Record]) -> Iterator[Record]:
    for record in records:
        nested = record.get("questions")
        if isinstance(nested, list):
            shared = {key: value for key, value in record.items() if key != "questions"}
            yield from ({**shared, **each} for each in nested if isinstance(each, dict))
        else:
            yield record


def _videomme(directory: Path, record: Record) -> Entry:
    kind = text(record, "duration", "duration_category", "task_type")
    options = tuple(_LETTERED.sub("", each) for each in texts(record, "options"))
    letter = text(record, "answer").strip("(). ").upper()
    if len(letter) != 1 or letter not in LETTERS[: len(options)]:
        raise ConfigError(f"the answer {record['answer']!r} is not the letter of one of {len(options)} options")
    question = multiple_choice(kind, text(record, "question"), options, LETTERS.index(letter))
    # Files are named by YouTube id, which the nested format has only in its URL.
    address = _YOUTUBE.search(str(record.get("url", "")))
    names = [text(record, "videoID")] if "videoID" in record else []
    names += [address.group(1)] if address else []
    names += [text(record, "video_id")] if "video_id" in record else []
    if not names:
        raise ConfigError("it has no videoID or video_id")
    folders = [directory / folder for folder in _FOLDERS]
    video = _first_existing(folders, [Path(name) for name in names], folders[0] / f"{names[0]}.mp4")
    return Entry(video, question)
