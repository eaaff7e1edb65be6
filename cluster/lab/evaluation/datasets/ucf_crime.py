"""UCF-Crime as published, or other videos in its layout.

Videos are in folders named after the classes, at any depth (the archives add parents such as
``Anomaly-Videos-Part-1/``); ``Anomaly_Test.txt`` and ``Temporal_Anomaly_Annotation_for_Testing_Videos.txt`` may be
anywhere in the directory. The official test split is evaluated.
"""

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import (
    VIDEO_SUFFIXES,
    Dataset,
    LabelledVideo,
    Skipped,
    SkippedVideo,
    format_reasons,
    probe_min_length,
)

# CodecSight, section 2.1, gives the query for abuse; the other classes replace the noun.
PROMPT = "Describe the frames and determine if they show any {what}. Start your response with ‘Yes’ or ‘No’"

# Published folder name -> noun of the prompt.
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
# Training-Normal-Videos-Part-1, Normal_Videos_for_Event_Recognition: archives differ in location and spelling.
_NORMAL_FOLDER = "normalvideos"


def parse_class(name: str) -> str | None:
    """Class of a folder or annotation name; ``NORMAL`` for normal videos, ``None`` if unknown."""
    letters = _LETTERS.sub("", name.casefold())
    if letters == NORMAL.casefold() or _NORMAL_FOLDER in letters:
        return NORMAL
    return _KNOWN.get(letters)


def prompt(kind: str) -> str:
    """Question for one of ``ANOMALY_CLASSES``."""
    return PROMPT.format(what=ANOMALY_CLASSES[kind])


ANNOTATIONS = "Temporal_Anomaly_Annotation_for_Testing_Videos.txt"
SPLIT = "Anomaly_Test.txt"


class VideoKey(NamedTuple):
    """Identity of a video in all files of the dataset: class (``NORMAL`` for any normal folder) and file name."""

    kind: str
    file: str


Spans = tuple[tuple[int, int], ...]
"""First and last frame of each event of one video."""


def read_split(path: Path, skipped: Skipped) -> list[VideoKey]:
    """Videos of a split file, one ``Class/file.mp4`` per line, in order and without duplicates."""
    found = []
    for number, line in _lines(path):
        with skipped.instead(path, f"line {number}: "):
            found.append(_listed_video(line))
    return list(dict.fromkeys(found))


def _listed_video(line: str) -> VideoKey:
    listed = PurePosixPath(line.replace("\\", "/"))
    kind = parse_class(listed.parent.name)
    if kind is None:
        known = "names no class" if not listed.parent.name else f"unknown class {listed.parent.name!r}"
        raise ConfigError(f"{known} ({line!r})")
    return VideoKey(kind, listed.name)


def read_annotations(path: Path, skipped: Skipped) -> dict[VideoKey, Spans]:
    """Read the temporal annotation: per line ``file class start1 end1 start2 end2`` in frame numbers, -1 for none."""
    found = []
    for number, line in _lines(path):
        with skipped.instead(path, f"line {number}: "):
            found.append(_annotation(line))
    return dict(found)


def _annotation(line: str) -> tuple[VideoKey, Spans]:
    fields = line.split()
    if len(fields) < 4 or len(fields) % 2:
        raise ConfigError(f"not a file, a class and pairs of frame numbers ({line!r})")
    kind = parse_class(fields[1])
    if kind is None:
        raise ConfigError(f"unknown class {fields[1]!r} ({line!r})")
    try:
        frames = [int(each) for each in fields[2:]]
    except ValueError:
        raise ConfigError(f"frame numbers are not whole numbers ({line!r})") from None
    spans = tuple((a, b) for a, b in zip(frames[::2], frames[1::2], strict=True) if a >= 0 or b >= 0)
    for first, last in spans:
        if not 0 <= first < last:
            raise ConfigError(f"an event from frame {first} to frame {last} ({line!r})")
    return VideoKey(kind, PurePosixPath(fields[0].replace("\\", "/")).name), spans


def _lines(path: Path) -> list[tuple[int, str]]:
    # The published files mix line endings, and some copies have a byte-order mark.
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def read_ucf_crime(directory: Path, min_seconds: float) -> Dataset:
    """The official test split; without its list, the annotated videos.

    Normal videos are judged on every class, others only on their own, as their labels cover no other. Raises
    ``ConfigError``: the directory has neither list nor annotation, or no video with an event is left.
    """
    split_file, annotation_file = _find(directory, SPLIT), _find(directory, ANNOTATIONS)
    skipped = Skipped()
    on_disk = _videos(directory, skipped)
    annotated: dict[VideoKey, Spans] = {}
    if annotation_file is not None:
        annotated = read_annotations(annotation_file, skipped)
    elif split_file is not None:
        skipped.append(SkippedVideo(directory / ANNOTATIONS, "missing: videos of the classes have no event times"))
    else:
        raise ConfigError(f"{directory} is not in UCF-Crime's layout: it holds neither {SPLIT} nor {ANNOTATIONS}")
    wanted = list(annotated)
    if split_file is not None:
        wanted = read_split(split_file, skipped)
        others = len(on_disk.keys() - set(wanted))
        if others:
            skipped.append(SkippedVideo(split_file, f"{others} more videos on disk are not in the test split"))
    videos = []
    for key in wanted:
        with skipped.instead(on_disk.get(key, directory / key.kind / key.file)):
            videos.append(_labelled(key, on_disk.get(key), annotated.get(key, ()), min_seconds))
    if not any(video.events for video in videos):
        raise ConfigError(
            f"no video with an event is left in {directory}, so recall is undefined: {format_reasons(skipped)}"
        )
    questions = {kind: prompt(kind) for kind in ANOMALY_CLASSES}
    return Dataset("ucf-crime", directory, tuple(videos), questions, tuple(skipped))


def _find(directory: Path, name: str) -> Path | None:
    return min(directory.rglob(name), key=lambda path: (len(path.parts), path), default=None)


def _videos(directory: Path, skipped: Skipped) -> dict[VideoKey, Path]:
    """All videos below the directory; duplicates of a name (as in the event folder) are ignored."""
    found: dict[VideoKey, Path] = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix.casefold() not in VIDEO_SUFFIXES or not path.is_file():
            continue
        folders = path.relative_to(directory).parts[:-1]
        kind = next((kind for folder in reversed(folders) if (kind := parse_class(folder)) is not None), None)
        if kind is None:
            reason = f"unknown class {path.parent.name!r}; there are {', '.join(ANOMALY_CLASSES)}"
            skipped.append(SkippedVideo(path, reason))
        else:
            found.setdefault(VideoKey(kind, path.name), path)
    return found


def _labelled(key: VideoKey, path: Path | None, spans: Spans, min_seconds: float) -> LabelledVideo:
    if path is None:
        raise ConfigError("in the test split, not on disk")
    if key.kind != NORMAL and not spans:
        raise ConfigError(f"has no event in {ANNOTATIONS}")
    facts = probe_min_length(path, min_seconds)
    name = f"{key.kind}/{Path(key.file).stem}"
    if key.kind == NORMAL:
        return LabelledVideo(path, name, (), tuple(ANOMALY_CLASSES))
    timed = ((key.kind, first / facts.fps, min(last / facts.fps, facts.seconds)) for first, last in spans)
    events = tuple(event for event in timed if event[1] < event[2])
    if not events:
        raise ConfigError(f"all its events are after its end at {facts.seconds:.1f} s")
    return LabelledVideo(path, name, events, (key.kind,))
