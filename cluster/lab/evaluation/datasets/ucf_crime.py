"""UCF-Crime as published, or a user's own footage laid out like it.

Folders named after the classes hold the videos, at any depth (the archives put ``Anomaly-Videos-Part-1/`` and the
like above them); ``Anomaly_Test.txt`` and ``Temporal_Anomaly_Annotation_for_Testing_Videos.txt`` lie anywhere in the
directory. The official test split is what is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import (
    VIDEO_SUFFIXES,
    Dataset,
    LabelledVideo,
    Skipped,
    UnreadableVideoError,
    VideoFacts,
    probe_video,
    reasons,
)

# CodecSight, section 2.1, gives the query for abuse; the other classes differ in the noun alone.
PROMPT = "Describe the frames and determine if they show any {what}. Start your response with ‘Yes’ or ‘No’"

# Folder name as published -> what the prompt calls it.
ANOMALY_CLASSES: dict[str, str] = {
    "Abuse": "abuse",
    "Arrest": "arrest",
    "Arson": "arson",
    "Assault": "assault",
    "Burglary": "burglary",
    "Explosion": "explosion",
    "Fighting": "fighting",
    "RoadAccidents": "road accident",
    "Robbery": "robbery",
    "Shooting": "shooting",
    "Shoplifting": "shoplifting",
    "Stealing": "stealing",
    "Vandalism": "vandalism",
}

NORMAL = "Normal"

_LETTERS = re.compile(r"[^a-z]")
_KNOWN = {name.casefold(): name for name in ANOMALY_CLASSES}
# Training_Normal_Videos_Anomaly, Testing_Normal_Videos_Anomaly, Normal_Videos_event, z_Normal_Videos_event,
# Training-Normal-Videos-Part-1, Normal_Videos_for_Event_Recognition: archives differ in where and how they spell it.
_NORMAL_FOLDER = "normalvideos"


def class_of(name: str) -> str | None:
    """The class a folder's or an annotation's name stands for; ``NORMAL`` for normal videos, ``None`` if unknown."""
    letters = _LETTERS.sub("", name.casefold())
    if letters == NORMAL.casefold() or _NORMAL_FOLDER in letters:
        return NORMAL
    return _KNOWN.get(letters)


def prompt(kind: str) -> str:
    """The question for one of ``ANOMALY_CLASSES``."""
    return PROMPT.format(what=ANOMALY_CLASSES[kind])


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


def read_ucf_crime(directory: Path, min_seconds: float) -> Dataset:
    """The official test split; without its list, the videos that the temporal annotation names.

    A normal video is judged on every class, one of a class on that class alone, as the labels allow no more.

    Raises:
        ConfigError: neither list nor annotation in the directory, or no video with an event left.
    """
    split_file, annotation_file = _find(directory, SPLITS["test"]), _find(directory, ANNOTATIONS)
    on_disk, skipped = _videos(directory)
    annotated: dict[VideoKey, FrameSpans] = {}
    if annotation_file is not None:
        annotated, bad = read_annotations(annotation_file)
        skipped += bad
    elif split_file is not None:
        skipped.append(Skipped(directory / ANNOTATIONS, "missing: no video of a class has its events' times"))
    else:
        raise ConfigError(
            f"{directory} is not in UCF-Crime's layout: it holds neither {SPLITS['test']} nor {ANNOTATIONS}"
        )
    wanted = list(annotated)
    if split_file is not None:
        wanted, bad = read_split(split_file)
        skipped += bad
        others = len(on_disk.keys() - set(wanted))
        if others:
            skipped.append(Skipped(split_file, f"{others} more videos on disk are not in the test split"))
    videos = []
    for key in wanted:
        result = _labelled(directory, key, on_disk.get(key), annotated.get(key), min_seconds)
        if isinstance(result, Skipped):
            skipped.append(result)
        else:
            videos.append(result)
    if not any(video.events for video in videos):
        raise ConfigError(
            f"no video with an event is left in {directory}, so there is no recall to measure: {reasons(skipped)}"
        )
    questions = {kind: prompt(kind) for kind in ANOMALY_CLASSES}
    return Dataset("ucf-crime", directory, tuple(videos), questions, tuple(skipped))


def _find(directory: Path, name: str) -> Path | None:
    return min(directory.rglob(name), key=lambda path: (len(path.parts), path), default=None)


def _videos(directory: Path) -> tuple[dict[VideoKey, Path], list[Skipped]]:
    """Every video below, by what names it; a second copy of a name (as in the event folder) is left aside."""
    found: dict[VideoKey, Path] = {}
    skipped: list[Skipped] = []
    for path in sorted(directory.rglob("*")):
        if path.suffix.casefold() not in VIDEO_SUFFIXES or not path.is_file():
            continue
        kind = _class_above(path.relative_to(directory).parts[:-1])
        if kind is None:
            skipped.append(Skipped(path, f"unknown class {path.parent.name!r}; there are {_listed(ANOMALY_CLASSES)}"))
        else:
            found.setdefault(VideoKey(kind, path.name), path)
    return found, skipped


def _class_above(folders: tuple[str, ...]) -> str | None:
    return next((kind for folder in reversed(folders) if (kind := class_of(folder)) is not None), None)


def _labelled(
    directory: Path, key: VideoKey, path: Path | None, annotation: FrameSpans | None, min_seconds: float
) -> LabelledVideo | Skipped:
    if path is None:
        return Skipped(directory / key.kind / key.file, "in the test split, not on disk")
    if key.kind != NORMAL and (annotation is None or not annotation.spans):
        return Skipped(path, f"no event of it in {ANNOTATIONS}")
    try:
        facts = probe_video(path)
    except UnreadableVideoError as error:
        return Skipped(path, str(error))
    if facts.seconds < min_seconds:
        return Skipped(path, f"shorter than a window: {facts.seconds:.1f} of {min_seconds:g} s")
    if key.kind == NORMAL:
        return LabelledVideo(path, _name(key), (), tuple(ANOMALY_CLASSES))
    events = _events(key.kind, annotation, facts)
    if not events:
        return Skipped(path, f"its events lie behind its end at {facts.seconds:.1f} s")
    return LabelledVideo(path, _name(key), events, (key.kind,))


def _events(kind: str, annotation: FrameSpans | None, facts: VideoFacts) -> tuple[tuple[str, float, float], ...]:
    """Frame numbers in seconds of this file, cut at its end."""
    spans = annotation.spans if annotation is not None else ()
    timed = ((kind, first / facts.fps, min(last / facts.fps, facts.seconds)) for first, last in spans)
    return tuple(event for event in timed if event[1] < event[2])


def _name(key: VideoKey) -> str:
    return f"{key.kind}/{Path(key.file).stem}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
