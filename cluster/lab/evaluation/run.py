"""The evaluation itself: videos times settings, in one process or several, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError, SourceError
from cluster.lab.evaluation.datasets import LabelledVideo, Skipped
from cluster.lab.evaluation.metrics import CONSECUTIVE
from cluster.lab.evaluation.policies import Setting, full
from cluster.lab.evaluation.processes import run_tasks, start_pool
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.results import Results, VideoRun
from cluster.lab.evaluation.work import WorkFile, model_digest, video_digest
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model every process of the evaluation can load for itself."""

    name: str
    device: str = "cpu"
    dtype: str = "float32"
    max_pixels: int | None = None

    def load(self) -> VisionLanguageModel:
        """Raises ``ModelError``."""
        return load_model(self.name, device=self.device, dtype=self.dtype, max_pixels=self.max_pixels)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is. ``done`` and ``total`` count windows-of-settings weighted alike: one video under one setting each;
    ``resumed`` of ``done`` were in the work file."""

    done: int
    total: int
    resumed: int
    video: str


@dataclass(frozen=True, slots=True)
class _Task:
    """One pass over one video."""

    video: LabelledVideo
    digest: str
    settings: tuple[Setting, ...]


def evaluate(
    videos: Sequence[LabelledVideo],
    model: VisionLanguageModel | ModelSpec,
    settings: Sequence[Setting],
    questions: Mapping[str, str],
    *,
    consecutive: int = CONSECUTIVE,
    jobs: int = 1,
    work: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Results:
    """Every video under every setting, through the live code path.

    Args:
        model: loaded, or what to load; several processes need the latter.
        settings: full computation is added if it is not among them, in the shape of the first.
        questions: kind of event -> text, for every kind that a video is judged on.
        consecutive: positive windows in a row that make a video positive.
        jobs: processes; each holds a model and takes its share of the cores.
        work: JSONL file that finished videos are appended to, and read from at the start.

    Raises:
        ConfigError: no videos, no settings, a kind without a question, or a setting the engine refuses.
        SightlineError: nothing left of the videos, or the work file cannot be written.
    """
    settings = _with_full(settings)
    if jobs > 1 and not isinstance(model, ModelSpec):
        raise ConfigError("several processes load the model for themselves: give a ModelSpec, not a loaded model")
    lacking = sorted({kind for video in videos for kind in video.kinds} - set(questions))
    if lacking:
        raise ConfigError(f"there is no question for {', '.join(lacking)}; give one per kind of event")
    if not videos:
        raise ConfigError("there are no videos to evaluate")
    names = [video.name for video in videos]
    if len(set(names)) < len(names):
        raise ConfigError("two videos have one name; results go by it")
    loaded = model.load() if isinstance(model, ModelSpec) else model
    engine = NativeEngine(loaded)
    digest = model_digest(engine, questions)
    runs: dict[tuple[str, str], VideoRun] = {}
    failed: dict[str, Skipped] = {}
    with WorkFile(work) as file:
        tasks = _tasks(videos, settings, digest, file, runs, failed)
        total = sum(len(task.settings) for task in tasks) + len(runs)
        resumed = done = len(runs)
        on_progress(Progress(done, total, resumed, ""))
        answered = (
            _in_processes(tasks, model, questions, jobs)
            if jobs > 1 and len(tasks) > 1 and isinstance(model, ModelSpec)
            else _one_by_one(tasks, engine, questions)
        )
        for task, found in answered:
            done += len(task.settings)
            if isinstance(found, str):
                failed.setdefault(task.video.name, Skipped(task.video.path, found))
            else:
                for key, run in found.items():
                    file.add(task.digest, digest, key, run)
                    runs[task.video.name, key] = run
            on_progress(Progress(done, total, resumed, task.video.name))
    return _results(videos, settings, runs, failed, consecutive)


def _with_full(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    if not settings:
        raise ConfigError("there are no settings to evaluate")
    if not any(setting.role == "full" and setting.sweep is None for setting in settings):
        settings = [full(settings[0].shape), *settings]
    return tuple(settings)


def _tasks(
    videos: Sequence[LabelledVideo],
    settings: Sequence[Setting],
    model: str,
    file: WorkFile,
    runs: dict[tuple[str, str], VideoRun],
    failed: dict[str, Skipped],
) -> list[_Task]:
    """What is left to do: per video one pass for each sampling rate and anchor interval; ``runs`` gets what is done."""
    tasks: list[_Task] = []
    for video in videos:
        try:
            digest = video_digest(video.path)
        except OSError as error:
            failed[video.name] = Skipped(video.path, f"cannot be read: {error.strerror or error}")
            continue
        passes: dict[tuple[float, float], dict[str, Setting]] = {}
        for setting in settings:
            run = file.get(digest, model, setting.key)
            if run is not None and run.kinds == video.kinds:
                runs[video.name, setting.key] = run
            else:
                shape = setting.shape
                passes.setdefault((shape.fps, shape.anchor_interval_s), {}).setdefault(setting.key, setting)
        tasks += [_Task(video, digest, tuple(each.values())) for each in passes.values()]
    return tasks


_Answered = Iterator[tuple[_Task, dict[str, VideoRun] | str]]


def _one_by_one(tasks: Sequence[_Task], engine: NativeEngine, questions: Mapping[str, str]) -> _Answered:
    for task in tasks:
        yield task, _attempt(engine, task, questions)


def _attempt(engine: NativeEngine, task: _Task, questions: Mapping[str, str]) -> dict[str, VideoRun] | str:
    """The runs of a task, or why the video cannot be read."""
    try:
        return replay(engine, task.video, task.settings, questions)
    except SourceError as error:
        return str(error)


def _in_processes(tasks: Sequence[_Task], model: ModelSpec, questions: Mapping[str, str], jobs: int) -> _Answered:
    pool = start_pool(min(jobs, len(tasks)), _start_worker, model, dict(questions))
    try:
        yield from run_tasks(pool, _work, tasks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# One engine per process of the pool: set by its initializer, which is the only way to hand it to the calls after it.
_worker: tuple[NativeEngine, dict[str, str]] | None = None


def _start_worker(model: ModelSpec, questions: dict[str, str], threads: int) -> None:
    global _worker
    torch.set_num_threads(threads)
    _worker = (NativeEngine(model.load()), questions)


def _work(task: _Task) -> dict[str, VideoRun] | str:
    if _worker is None:
        raise RuntimeError("the process was not initialised")
    engine, questions = _worker
    return _attempt(engine, task, questions)


def _results(
    videos: Sequence[LabelledVideo],
    settings: tuple[Setting, ...],
    runs: dict[tuple[str, str], VideoRun],
    failed: dict[str, Skipped],
    consecutive: int,
) -> Results:
    kept: list[LabelledVideo] = []
    whole = next(setting for setting in settings if setting.role == "full" and setting.sweep is None)
    for video in videos:
        if video.name in failed:
            continue
        count = len(runs[video.name, whole.key].windows)
        if count < consecutive:
            reason = f"too short: {count} whole windows of {whole.shape.window_s:g} s, {consecutive} are needed"
            failed[video.name] = Skipped(video.path, reason)
        else:
            kept.append(video)
    if not kept:
        first = next(iter(failed.values()))
        raise SightlineError(
            f"nothing is left of {len(videos)} videos; the first, {first.path.name}, was skipped: {first.reason}"
        )
    return Results(tuple(kept), settings, runs, tuple(failed.values()), consecutive)
