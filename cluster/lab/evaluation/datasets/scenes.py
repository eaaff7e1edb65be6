"""A directory as ``sightline scenes make`` writes it: every clip with its truth beside it, and an index."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import Dataset, LabelledVideo, Skipped, UnreadableVideoError, probe_video
from cluster.lab.scenes.dataset import INDEX
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS


def read_scenes(directory: Path, min_seconds: float) -> Dataset:
    """Every clip in the directory; a scene's truth covers every kind of event, so each is judged on all."""
    clips = {path.stem: path for path in directory.glob("*.mp4")}
    videos: list[LabelledVideo] = []
    skipped: list[Skipped] = []
    for name in sorted(clips.keys() | set(_indexed(directory))):
        result = _labelled(clips.get(name, directory / f"{name}.mp4"), min_seconds)
        if isinstance(result, Skipped):
            skipped.append(result)
        else:
            videos.append(result)
    questions = {kind: standing_question(kind) for kind in EVENT_KINDS}
    return Dataset("scenes", directory, tuple(videos), questions, tuple(skipped))


def _indexed(directory: Path) -> list[str]:
    """Names in the index; without one, whatever lies there counts."""
    path = directory / INDEX
    if not path.exists():
        return []
    try:
        return [str(clip["name"]) for clip in json.loads(path.read_text(encoding="utf-8"))["clips"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not an index of scenes; remove it to use the clips as they lie there") from None


def _labelled(path: Path, min_seconds: float) -> LabelledVideo | Skipped:
    if not path.exists():
        return Skipped(path, "in the index, not on disk")
    if not truth_path(path).exists():
        return Skipped(path, f"its truth {truth_path(path).name} is missing")
    try:
        truth = SceneTruth.load(truth_path(path))
        facts = probe_video(path)
    except (ConfigError, UnreadableVideoError) as error:
        return Skipped(path, str(error))
    if facts.seconds < min_seconds:
        return Skipped(path, f"shorter than a window: {facts.seconds:.1f} of {min_seconds:g} s")
    return LabelledVideo(
        path=path,
        name=truth.name,
        events=tuple((event.kind, event.start_s, event.end_s) for event in truth.events),
        kinds=EVENT_KINDS,
        strata=frozenset(truth.strata),
        motion=truth.mean_motion,
    )
