"""Runs a memory evaluation (clips × settings) in one or several processes, resumable.

Each clip runs through the model once (``recording.py``); every setting is then given the recorded KV (``answer.py``).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.memory.answer import SceneAnswers, answer_scene, read_answers
from cluster.lab.evaluation.memory.questions import Footage
from cluster.lab.evaluation.memory.recording import Recording, record
from cluster.lab.evaluation.memory.results import SettingResult
from cluster.lab.evaluation.memory.settings import ShareSetting
from cluster.lab.evaluation.settings import WindowShape
from cluster.lab.evaluation.work import (
    Key,
    ModelSpec,
    OnProgress,
    ResultCache,
    WorkerPool,
    all_skipped_error,
    digest,
    model_digest,
    video_digest,
)
from cluster.models.base import VisionLanguageModel


@dataclass(frozen=True, slots=True)
class MemoryResults:
    """``results``: one per setting; ``footage``: the clips; ``incomplete``: see ``SceneAnswers``, sum over settings."""

    results: tuple[SettingResult, ...]
    footage: tuple[Footage, ...]
    skipped: tuple[SkippedVideo, ...]
    incomplete: int


@dataclass(frozen=True, slots=True)
class _Clip:
    """``recording``: path of the recorded KV."""

    footage: Footage
    shape: WindowShape
    recording: Path

    def key(self, setting: ShareSetting) -> Key:
        """Cache key of its answers."""
        asked = str([(e.turns, e.answers, e.at_s, e.since_s, e.evidence) for e in self.footage.questions])
        return self.recording.stem, digest(asked), repr(setting)

    def read(self, body: dict[str, Any]) -> SceneAnswers:
        return read_answers(body, self.footage.name, self.footage.questions)


def evaluate_memory(
    footage: Sequence[Footage],
    model: VisionLanguageModel | ModelSpec,
    settings: Sequence[ShareSetting],
    shape: WindowShape,
    folder: Path,
    *,
    jobs: int = 1,
    on_progress: OnProgress = lambda *_: None,
) -> MemoryResults:
    """Ask every question of every clip under every setting.

    Args:
        model: a loaded model, or a spec to load; several processes need a spec.
        folder: for recordings and answers; existing ones of the same clip, model and code are reused.

    Raises:
        ConfigError: no footage, no settings, duplicate names, or a setting that the model does not support.
        SightlineError: all clips were skipped, or the folder cannot be used.
    """
    if not footage or not all(clip.questions for clip in footage):
        raise ConfigError("at least one clip is needed, each with at least one question")
    if not settings or len(set(settings)) < len(settings) or len({clip.name for clip in footage}) < len(footage):
        raise ConfigError("at least one setting is needed, and names of settings and clips must be unique")
    skipped: dict[str, SkippedVideo] = {}
    runs: dict[tuple[str, ShareSetting], SceneAnswers] = {}
    with WorkerPool(model, jobs) as workers, ResultCache(folder / "work.jsonl") as file:
        clips = _clips(footage, workers.engine, shape, folder, skipped)
        tasks: list[tuple[_Clip, ShareSetting]] = []
        for clip in clips:
            for setting in settings:
                run = file.get(clip.key(setting), clip.read)
                if run is None:
                    tasks.append((clip, setting))
                else:
                    runs[clip.footage.name, setting] = run
        to_record = list(dict.fromkeys(clip for clip, _ in tasks))
        done = len(runs)
        total = done + len(to_record) + len(tasks)
        on_progress(done, total, "")
        for clip, failure in workers.do(_record, to_record):
            name = clip.footage.name
            done += 1
            if failure is not None:
                skipped[name] = SkippedVideo(clip.footage.path, failure)
                total -= sum(each is clip for each, _ in tasks)
                tasks = [task for task in tasks if task[0] is not clip]
            on_progress(done, total, name)
        for (clip, setting), run in workers.do(_answer, tasks):
            done += 1
            file.add(clip.key(setting), run)
            runs[clip.footage.name, setting] = run
            on_progress(done, total, clip.footage.name)
    kept = tuple(clip for clip in footage if clip.name not in skipped)
    if not kept:
        raise all_skipped_error("clips", len(footage), skipped)
    return MemoryResults(
        tuple(
            SettingResult(setting, tuple(each for clip in kept for each in runs[clip.name, setting].answered))
            for setting in settings
        ),
        kept,
        tuple(skipped.values()),
        sum(runs[clip.name, setting].incomplete for clip in kept for setting in settings),
    )


def _clips(
    footage: Sequence[Footage], engine: NativeEngine, shape: WindowShape, folder: Path, skipped: dict[str, SkippedVideo]
) -> list[_Clip]:
    model = engine.model
    asking = str([model.ask_ids("a"), model.ask_ids("a", follow_up=True)])
    clips = []
    for clip in footage:
        try:
            video = video_digest(clip.path)
        except OSError as error:
            skipped[clip.name] = SkippedVideo(clip.path, f"cannot be read: {error.strerror or error}")
            continue
        name = digest(video, model_digest(engine, {}), asking, str(shape), str(_instants(clip)))
        clips.append(_Clip(clip, shape, folder / "recordings" / f"{name}.pt"))
    return clips


def _instants(clip: Footage) -> list[float]:
    return sorted({question.at_s for question in clip.questions})


def _record(engine: NativeEngine, clip: _Clip) -> str | None:
    """Record a clip unless there is a valid recording; returns the reason if it cannot be recorded."""
    if _recording(clip.recording) is None:
        try:
            made = record(engine.model, clip.footage.path, clip.shape, _instants(clip.footage))
        except ConfigError:
            raise
        except SightlineError as error:
            return str(error)
        made.save(clip.recording)
        _recording.cache_clear()
    return None


def _answer(engine: NativeEngine, task: tuple[_Clip, ShareSetting]) -> SceneAnswers:
    clip, setting = task
    recorded = _recording(clip.recording)
    if recorded is None:
        raise SightlineError(f"{clip.footage.name} was not answered: its recording {clip.recording} has disappeared")
    return answer_scene(engine, recorded, clip.footage.name, clip.footage.questions, setting)


@functools.lru_cache(maxsize=1)
def _recording(path: Path) -> Recording | None:
    return Recording.load(path)
