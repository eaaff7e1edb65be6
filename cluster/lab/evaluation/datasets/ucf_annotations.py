"""UCF-Crime's text files: the split lists and the temporal annotation of the test videos.

Published with Sultani et al., "Real-world Anomaly Detection in Surveillance Videos", CVPR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cluster.lab.evaluation.datasets.ucf_classes import class_of
from cluster.lab.evaluation.datasets.video import Skipped

ANNOTATIONS = "Temporal_Anomaly_Annotation_for_Testing_Videos.txt"
SPLITS = {"test": "Anomaly_Test.txt", "train": "Anomaly_Train.txt"}


class VideoKey(NamedTuple):
    """What names a video in every file of the dataset: its class (any normal folder is one) and file name."""

    kind: str
    file: str


@dataclass(frozen=True, slots=True)
class FrameSpans:
    """First and last frame of each event of one video; none for a normal one."""

    spans: tuple[tuple[int, int], ...]


def read_split(path: Path) -> tuple[list[VideoKey], list[Skipped]]:
    """The videos a split file lists, one ``Class/file.mp4`` per line, in its order and each once."""
    found: dict[VideoKey, None] = {}
    skipped: list[Skipped] = []
    for number, line in _lines(path):
        listed = PurePosixPath(line.replace("\\", "/"))
        kind = class_of(listed.parent.name)
        if kind is None:
            known = "names no class" if not listed.parent.name else f"unknown class {listed.parent.name!r}"
            skipped.append(Skipped(path, f"line {number}: {known} ({line!r})"))
        else:
            found[VideoKey(kind, listed.name)] = None
    return list(found), skipped


def read_annotations(path: Path) -> tuple[dict[VideoKey, FrameSpans], list[Skipped]]:
    """The temporal annotation: ``file class start1 end1 start2 end2`` per line, frame numbers, -1 for none."""
    found: dict[VideoKey, FrameSpans] = {}
    skipped: list[Skipped] = []
    for number, line in _lines(path):
        try:
            key, spans = _annotation(line.split())
        except ValueError as error:
            skipped.append(Skipped(path, f"line {number}: {error} ({line!r})"))
        else:
            found[key] = spans
    return found, skipped


def _annotation(fields: list[str]) -> tuple[VideoKey, FrameSpans]:
    if len(fields) < 4 or len(fields) % 2:
        raise ValueError("not a file, a class and pairs of frame numbers")
    kind = class_of(fields[1])
    if kind is None:
        raise ValueError(f"unknown class {fields[1]!r}")
    try:
        frames = [int(each) for each in fields[2:]]
    except ValueError:
        raise ValueError("frame numbers are not whole numbers") from None
    spans = []
    for first, last in zip(frames[::2], frames[1::2], strict=True):
        if first < 0 and last < 0:
            continue
        if not 0 <= first < last:
            raise ValueError(f"an event from frame {first} to frame {last}")
        spans.append((first, last))
    return VideoKey(kind, PurePosixPath(fields[0].replace("\\", "/")).name), FrameSpans(tuple(spans))


def _lines(path: Path) -> list[tuple[int, str]]:
    # The published files mix line ends and carry a byte-order mark in some copies.
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
