"""The evaluation itself: videos times settings, in one process or several, resumable."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import torch

import cluster
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError, SourceError
from cluster.lab.evaluation.datasets import LabelledVideo, Skipped
from cluster.lab.evaluation.metrics import CONSECUTIVE
from cluster.lab.evaluation.policies import Setting, full
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.results import Results, VideoRun
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel

# What decides an answer besides model and setting; results of other code are not taken for this code's.
_CODE = ("codec", "vision", "engine", "models")
_CHUNK = 1 << 20


class WorkFile:
    """Results by (digest of the video, digest of the model and its questions, setting). A context manager.

    Opened on a path it reads what is there and appends to it; on ``None`` it keeps nothing.

    Raises:
        SightlineError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._done: dict[tuple[str, str, str], VideoRun] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> WorkFile:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+", encoding="utf-8")
                self._file.seek(0)
                self._read(self._file)
            except OSError as error:
                raise self._unusable(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, video: str, model: str, setting: str) -> VideoRun | None:
        """The run, if it was done."""
        return self._done.get((video, model, setting))

    def add(self, video: str, model: str, setting: str, run: VideoRun) -> None:
        """Keep a run; on disk when this returns.

        Raises:
            SightlineError: the disk is full.
        """
        self._done[video, model, setting] = run
        if self._file is None:
            return
        line = json.dumps(
            {"video": video, "model": model, "setting": setting, "run": run.to_json()}, separators=(",", ":")
        )
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unusable(error) from None

    def _read(self, file: IO[str]) -> None:
        text = file.read()
        broken = 0
        for line in text.splitlines():
            try:
                body = json.loads(line)
                key = (str(body["video"]), str(body["model"]), str(body["setting"]))
                self._done[key] = VideoRun.from_json(body["run"])
            except (ValueError, KeyError, TypeError):
                broken += 1
        if broken:
            # The line that was being written when the evaluation was interrupted.
            logging.getLogger(__name__).info("%s: %d broken lines are computed again", self.path, broken)
        if text and not text.endswith("\n"):
            file.write("\n")

    def _unusable(self, error: OSError) -> SightlineError:
        return SightlineError(f"work file {self.path} cannot be used: {error.strerror or error}; choose another place")


def video_digest(path: Path) -> str:
    """Of the file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def model_digest(engine: NativeEngine, questions: Mapping[str, str]) -> str:
    """Of everything but video and setting that a score depends on: weights, prompts, calibration, pixels, and code."""
    model = engine.model
    parts = [
        engine.fingerprint,
        f"{model.settings.score_temperature} {model.settings.score_bias}",
        str(model.geometry),
        str(model.system_ids()),
        *(f"{kind}:{model.question_ids(text)}" for kind, text in sorted(questions.items())),
        _code_digest(),
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@functools.cache
def _code_digest() -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for folder in cluster.__path__:
        for package in _CODE:
            for path in sorted(Path(folder, package).rglob("*.py")):
                hasher.update(os.fsencode(path.relative_to(folder)) + path.read_bytes())
    return hasher.hexdigest()


T = TypeVar("T")
R = TypeVar("R")


def start_pool(jobs: int, start: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool of ``jobs`` processes, each begun with ``start(*arguments, threads)``: its share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    # Not fork: torch has threads by now.
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=start, initargs=(*arguments, threads))


def run_tasks(pool: ProcessPoolExecutor, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Tasks with what ``work`` made of them, as they get done.

    Raises:
        SightlineError: a process of the pool died.
    """
    try:
        futures = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise SightlineError(
            "a process of the evaluation ended without a word, most likely for want of memory; "
            "run it again with fewer --jobs: it goes on where it was"
        ) from None


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
