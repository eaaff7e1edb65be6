"""Video-MME (Fu et al. 2024): one table of questions, Parquet as published or the same as JSON, videos in ``data/``.

Each record: ``videoID`` (the file's name without suffix), ``question``, ``options`` (texts that begin with their
letter), ``answer`` (a letter), ``duration`` (short, medium, long), ``task_type``. The JSON of the official evaluation
nests the questions of a video under ``questions``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import VIDEO_SUFFIXES, Skipped
from cluster.lab.evaluation.memory.asking import LETTERS, MultipleChoice
from cluster.lab.evaluation.memory.loaders.base import Entry
from cluster.lab.evaluation.memory.loaders.records import BadRecordError, Record, read_records, text, texts

_LETTERED = re.compile(r"^\(?([A-J])[.):]\s*")
_YOUTUBE = re.compile(r"(?:v=|youtu\.be/)([\w-]{11})")
_FOLDERS = ("data", "video", "videos", ".")


def read_videomme(directory: Path) -> tuple[list[Entry], list[Skipped]]:
    """Every question, asked at the end of its video and reported under the video's class of length.

    Raises:
        ConfigError: no table of questions, or one that cannot be read.
    """
    # JSON first: it takes no further package.
    tables = [
        path
        for pattern in ("*.json", "videomme/*.json", "*.parquet", "videomme/*.parquet")
        for path in sorted(directory.glob(pattern))
    ]
    if not tables:
        raise ConfigError(f"{directory} is not in Video-MME's layout: it holds neither *.json nor videomme/*.parquet")
    table = tables[0]
    entries: list[Entry] = []
    skipped = [Skipped(path, f"not read: {table.name} holds the questions") for path in tables[1:]]
    for number, record in enumerate(_flat(read_records(table))):
        try:
            entries.append(_entry(directory, record))
        except (BadRecordError, ConfigError) as error:
            skipped.append(Skipped(table, f"record {number}: {error}"))
    return entries, skipped


def _flat(records: list[Record]) -> Iterator[Record]:
    for record in records:
        nested = record.get("questions")
        if isinstance(nested, list):
            shared = {key: value for key, value in record.items() if key != "questions"}
            yield from ({**shared, **each} for each in nested if isinstance(each, dict))
        else:
            yield record


def _entry(directory: Path, record: Record) -> Entry:
    kind = text(record, "duration", "duration_category", "task_type")
    lettered = texts(record, "options")
    options = tuple(_LETTERED.sub("", each) for each in lettered)
    letter = text(record, "answer").strip("(). ").upper()
    if len(letter) != 1 or letter not in LETTERS[: len(options)]:
        raise BadRecordError(f"the answer {record['answer']!r} is not the letter of one of {len(options)} options")
    question = partial(MultipleChoice, kind, text(record, "question"), options, LETTERS.index(letter))
    question(0.0)
    return Entry(_video(directory, record), question)


def _video(directory: Path, record: Record) -> Path:
    """Where the file lies, or where it would: files are named after the YouTube id, which the nested form has in its
    address alone."""
    address = _YOUTUBE.search(str(record.get("url", "")))
    names = [text(record, "videoID")] if "videoID" in record else []
    names += [address.group(1)] if address else []
    names += [text(record, "video_id")] if "video_id" in record else []
    if not names:
        raise BadRecordError("it has no videoID or video_id")
    for name in names:
        for folder in _FOLDERS:
            for suffix in sorted(VIDEO_SUFFIXES):
                path = directory / folder / f"{name}{suffix}"
                if path.exists():
                    return path
    return directory / _FOLDERS[0] / f"{names[0]}.mp4"
