"""UCF-Crime as published, or a user's own footage laid out like it.

Folders named after the classes hold the videos, at any depth (the archives put ``Anomaly-Videos-Part-1/`` and the
like above them); ``Anomaly_Test.txt`` and ``Temporal_Anomaly_Annotation_for_Testing_Videos.txt`` lie anywhere in the
directory. The official test split is what is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import Dataset, reasons
from cluster.lab.evaluation.datasets.probe import VIDEO_SUFFIXES, UnreadableVideoError, VideoFacts, probe_video
from cluster.lab.evaluation.datasets.ucf_annotations import (
    ANNOTATIONS,
    SPLITS,
    FrameSpans,
    VideoKey,
    read_annotations,
    read_split,
)
from cluster.lab.evaluation.datasets.ucf_classes import ANOMALY_CLASSES, NORMAL, class_of, prompt
from cluster.lab.evaluation.datasets.video import LabelledVideo, Skipped


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
