"""MLVU (Zhou et al. 2024): ``json/1_plotQA.json`` and the like, videos in ``video/1_plotQA/``; the dev set.

Each record: ``video`` (a file name), ``question``, ``candidates``, ``answer`` (one of the candidates' texts),
``question_type``. The tasks that are answered in whole sentences have no candidates and are skipped: the published
measure of those is another model's opinion.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import Skipped
from cluster.lab.evaluation.memory.asking import MultipleChoice
from cluster.lab.evaluation.memory.loaders.base import Entry
from cluster.lab.evaluation.memory.loaders.records import BadRecordError, Record, read_records, text, texts


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
