"""A directory as ``sightline scenes make`` writes it: every clip with its truth beside it, and an index."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets.base import Dataset, LabelledVideo, collect, probe_long_enough
from cluster.lab.scenes.dataset import INDEX
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS


def read_scenes(directory: Path, min_seconds: float) -> Dataset:
    """Every clip in the directory; a scene's truth covers every kind of event, so each is judged on all."""
    clips = {path.stem: path for path in directory.glob("*.mp4")}
    paths = [clips.get(name, directory / f"{name}.mp4") for name in sorted(clips.keys() | set(_indexed(directory)))]
    videos, skipped = collect((path, "", partial(_labelled, path, min_seconds)) for path in paths)
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


def _labelled(path: Path, min_seconds: float) -> LabelledVideo:
    if not path.exists():
        raise ConfigError("in the index, not on disk")
    if not truth_path(path).exists():
        raise ConfigError(f"its truth {truth_path(path).name} is missing")
    truth = SceneTruth.load(truth_path(path))
    probe_long_enough(path, min_seconds)
    return LabelledVideo(
        path=path,
        name=truth.name,
        events=tuple((event.kind, event.start_s, event.end_s) for event in truth.events),
        kinds=EVENT_KINDS,
        strata=frozenset(truth.strata),
        motion=truth.mean_motion,
    )
