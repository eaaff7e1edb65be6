"""Readers of published layouts.

* MLVU (Zhou et al. 2024), dev set: ``json/1_plotQA.json`` etc., videos in ``video/1_plotQA/``. Fields: ``video`` (file
  name), ``question``, ``candidates``, ``answer`` (text of a candidate), ``question_type``. Generation tasks have no
  candidates and are skipped: they are graded by another model.
* RVS-Ego and RVS-Movie (VStream-QA, Zhang et al. 2024): questions asked while a video runs, answered in free words.
  ReKV's form: a list of videos with ``video_path`` (or ``video_id``) and ``conversations`` of ``question``, ``answer``,
  ``start_time``, ``end_time``, and optional ``choices``. Published form: ``test_qa_*.json``, a flat list of questions
  with ``video_id``, beside ``rvs_*.json`` with each clip's offset in the original video, which is subtracted. A
  question is asked at ``end_time``; its evidence starts at ``start_time``.
* Video-MME (Fu et al. 2024): one table of questions, Parquet or JSON, videos in ``data/``. Fields: ``videoID`` (file
  name without suffix), ``question``, ``options`` (texts with their letter), ``answer`` (a letter), ``duration`` (short,
  medium, long), ``task_type``. The official evaluation's JSON nests questions under ``questions``.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import VIDEO_SUFFIXES, SkippedVideo
from cluster.lab.evaluation.memory.datasets import Annotation, Entry
from cluster.lab.evaluation.memory.datasets.records import Record, read_records, seconds, text, texts
from cluster.lab.evaluation.memory.questions import LETTERS, MultipleChoice, OpenQuestion, Question

_TIMED_KINDS = ("answer_type", "question_type", "task")
# Tolerance for questions after a container's rounded end.
_SLACK_S = 2.0
_LETTERED = re.compile(r"^\(?([A-J])[.):]\s*")
_YOUTUBE = re.compile(r"(?:v=|youtu\.be/)([\w-]{11})")
_FOLDERS = ("data", "video", "videos", ".")


def _choice(kind: str, record: Record, field: str) -> Callable[..., MultipleChoice]:
    """A question whose answer is the text of an option."""
    options, answer = texts(record, field), text(record, "answer")
    if options.count(answer) != 1:
        raise ConfigError(f"the answer {answer!r} is not one of the {field}")
    return partial(MultipleChoice, kind, text(record, "question"), options, options.index(answer))


def _first_there(folders: list[Path], names: list[Path], default: Path) -> Path:
    """First existing file with one of these names, in any container, else ``default``."""
    for name in names:
        suffixes = [""] if name.suffix.casefold() in VIDEO_SUFFIXES else sorted(VIDEO_SUFFIXES)
        for folder in folders:
            for suffix in suffixes:
                path = folder / f"{name}{suffix}"
                if path.is_file():
                    return path
    return default


def _asked_at_the_end(video: Path, question: Callable[..., MultipleChoice]) -> Entry:
    # Validates the options before the video is searched.
    question(0.0)
    return Entry(video, question)


# -- MLVU -----------------------------------------------------------------------------------------
def read_mlvu(directory: Path) -> Iterator[Annotation | SkippedVideo]:
    """Every multiple-choice question, asked at the end of its video."""
    root = directory / "MLVU" if (directory / "MLVU" / "json").is_dir() else directory
    files = sorted((root / "json").glob("*.json"))
    if not files:
        raise ConfigError(f"{directory} is not in MLVU's layout: it holds no json/*.json")
    for path in files:
        records = list(enumerate(read_records(path)))
        yield from ((path, n, partial(_mlvu, root, path, each)) for n, each in records if "candidates" in each)
        whole = sum("candidates" not in each for _, each in records)
        if whole:
            yield SkippedVideo(path, f"{whole} records without candidates, whose answers only a model can judge")


def _mlvu(root: Path, annotation: Path, record: Record) -> Entry:
    name, kind = text(record, "video"), text(record, "question_type")
    # Some copies include the folder in the record.
    video = root / "video" / name if "/" in name else root / "video" / annotation.stem / name
    return _asked_at_the_end(video, _choice(kind, record, "candidates"))


# -- RVS ------------------------------------------------------------------------------------------
def read_rvs(directory: Path) -> Iterator[Annotation]:
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
    for path, number, record in asked:
        turns = record.get("conversations", [record])
        # Only the flat form counts from the start of the original video.
        begins = 0.0 if "conversations" in record else clips.get(str(record.get("video_id")), 0.0)
        whole = isinstance(turns, list) and any(name in record for name in ("video_path", "video_id"))
        for turn in turns if whole else [None]:
            yield path, number, partial(_rvs, directory, path, record, turn, begins)


def _rvs(directory: Path, annotation: Path, record: Record, turn: object, begins: float) -> Entry:
    named = Path(text(record, "video_path", "video_id"))
    folders = [directory, annotation.parent, annotation.parent / "videos", directory / "videos"]
    # The path is of another checkout: only its last part counts.
    video = _first_there(folders, [named, Path(named.name)], annotation.parent / "videos" / named.name)
    if not isinstance(turn, dict):
        raise ConfigError(f"{turn!r} is no question")
    asked, answer = text(turn, "question"), text(turn, "answer")
    start, end = seconds(turn, "start_time") - begins, seconds(turn, "end_time") - begins
    if not 0 <= start < end:
        raise ConfigError(f"from {start:g} to {end:g} s is not an interval of its clip")
    kind = text(turn, *_TIMED_KINDS) if any(name in turn for name in _TIMED_KINDS) else "open"
    make: Callable[..., Question] = partial(OpenQuestion, kind, (asked,), (answer,))
    if "choices" in turn:
        make = _choice(kind, turn, "choices")
    return Entry(video, partial(_timed, make, start, end))


def _timed(make: Callable[..., Question], start: float, end: float, length: float) -> Question:
    if end > length + _SLACK_S:
        raise ConfigError(f"a question at {end:g} s is after the video's end at {length:.1f} s")
    at = min(end, length)
    return make(at_s=at, evidence=((start, at),) if start < at else ())


# -- Video-MME ------------------------------------------------------------------------------------
def read_videomme(directory: Path) -> Iterator[Annotation | SkippedVideo]:
    """Every question, asked at the end of its video, reported by the video's length class."""
    # JSON first: it needs no extra package.
    patterns = ("*.json", "videomme/*.json", "*.parquet", "videomme/*.parquet")
    tables = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    if not tables:
        raise ConfigError(f"{directory} is not in Video-MME's layout: it holds neither *.json nor videomme/*.parquet")
    table, *others = tables
    yield from (SkippedVideo(path, f"not read: {table.name} holds the questions") for path in others)
    for number, record in enumerate(_flat(read_records(table))):
        yield table, number, partial(_videomme, directory, record)


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
    question = partial(MultipleChoice, kind, text(record, "question"), options, LETTERS.index(letter))
    # Files are named by YouTube id, which the nested form has only in its URL.
    address = _YOUTUBE.search(str(record.get("url", "")))
    names = [text(record, "videoID")] if "videoID" in record else []
    names += [address.group(1)] if address else []
    names += [text(record, "video_id")] if "video_id" in record else []
    if not names:
        raise ConfigError("it has no videoID or video_id")
    folders = [directory / folder for folder in _FOLDERS]
    video = _first_there(folders, [Path(name) for name in names], folders[0] / f"{names[0]}.mp4")
    return _asked_at_the_end(video, question)
