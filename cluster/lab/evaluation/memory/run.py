"""The evaluation of memory: footage times settings, in one process or several, resumable.

Each clip is run through the model once (``recording.py``); what left its windows is kept on disk, and every setting is
given the same (``answering.py``). One file per clip and setting says what was answered.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import cluster
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.lab.evaluation.datasets.base import Skipped
from cluster.lab.evaluation.memory.answering import SPACES, SceneRun, answer_scene, pooled
from cluster.lab.evaluation.memory.asking import Question
from cluster.lab.evaluation.memory.recording import Recording, record
from cluster.lab.evaluation.memory.results import Coverage, SettingResult
from cluster.lab.evaluation.memory.score import Space
from cluster.lab.evaluation.memory.settings import ShareSetting
from cluster.lab.evaluation.policies import WindowShape
from cluster.lab.evaluation.run import ModelSpec, model_digest, run_tasks, start_pool, video_digest
from cluster.models.base import VisionLanguageModel

# What decides an answer besides the model, its engine and the setting.
_CODE = (
    "memory",
    "lab/evaluation/memory/recording.py",
    "lab/evaluation/memory/answering.py",
    "lab/evaluation/memory/settings.py",
)
_RECORDING_CODE = ("memory/layer.py", "lab/evaluation/memory/recording.py")


@dataclass(frozen=True, slots=True)
class Footage:
    """A video and what is asked about it; ``name`` is its own."""

    name: str
    path: Path
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class MemoryProgress:
    """``done`` of ``total``: one for each clip that is recorded and for each clip under each setting; ``now``: which
    clip was the last."""

    done: int
    total: int
    now: str


@dataclass(frozen=True, slots=True)
class MemoryResults:
    """``results``: one for each setting; ``footage``: what was asked about; ``incomplete``: see ``SceneRun``, over all
    settings."""

    results: tuple[SettingResult, ...]
    footage: tuple[Footage, ...]
    skipped: tuple[Skipped, ...]
    incomplete: int


@dataclass(frozen=True, slots=True)
class _Clip:
    """``recording``: where what left its windows lies."""

    footage: Footage
    shape: WindowShape
    recording: Path

    @property
    def instants(self) -> list[float]:
        return sorted({question.at_s for question in self.footage.questions})


@dataclass(frozen=True, slots=True)
class _Task:
    """One clip under one setting, or, without one, the recording of it. ``file``: where the answers go."""

    clip: _Clip
    setting: ShareSetting | None = None
    file: Path | None = None


def evaluate_memory(
    footage: Sequence[Footage],
    model: VisionLanguageModel | ModelSpec,
    settings: Sequence[ShareSetting],
    shape: WindowShape,
    folder: Path,
    *,
    jobs: int = 1,
    on_progress: Callable[[MemoryProgress], None] = lambda _: None,
) -> MemoryResults:
    """Ask every question of every clip under every setting.

    Args:
        footage: clips, each with at least one question.
        model: loaded, or what to load; several processes need the latter.
        settings: each once.
        shape: windows and sampling rate.
        folder: for recordings and answers; what is there already, of the same clip, model and code, is not made again.
        jobs: processes; each holds a model and takes its share of the cores.
        on_progress: told of every step.

    Raises:
        ConfigError: no footage, no settings, two of one name, or a setting that the model refuses.
        SightlineError: nothing left of the footage, or the folder cannot be used.
    """
    names = [clip.name for clip in footage]
    if not footage or not all(clip.questions for clip in footage):
        raise ConfigError("a memory is evaluated on at least one clip, and each needs a question about it")
    if not settings or len(set(settings)) < len(settings) or len(set(names)) < len(names):
        raise ConfigError("settings and clips go by their names: give at least one setting, and no name twice")
    if jobs > 1 and not isinstance(model, ModelSpec):
        raise ConfigError("several processes load the model for themselves: give a ModelSpec, not a loaded model")
    loaded = model.load() if isinstance(model, ModelSpec) else model
    skipped: dict[str, Skipped] = {}
    clips = _clips(footage, loaded, shape, folder, skipped)
    files = {(clip.footage.name, each): _answer_file(clip, each, folder) for clip in clips for each in settings}
    runs: dict[tuple[str, ShareSetting], SceneRun] = {}
    for clip in clips:
        for setting in settings:
            run = _read(files[clip.footage.name, setting], clip.footage)
            if run is not None:
                runs[clip.footage.name, setting] = run
    open_clips = [clip for clip in clips if any((clip.footage.name, setting) not in runs for setting in settings)]
    done = len(runs)
    total = done + sum(1 + sum((clip.footage.name, each) not in runs for each in settings) for clip in open_clips)
    on_progress(MemoryProgress(done, total, ""))
    with _Workers(loaded, model if isinstance(model, ModelSpec) else None, jobs) as workers:
        for task, failure in workers.do([_Task(clip) for clip in open_clips]):
            done += 1
            if failure is not None:
                name = task.clip.footage.name
                skipped[name] = Skipped(task.clip.footage.path, failure)
                total -= sum((name, each) not in runs for each in settings)
            on_progress(MemoryProgress(done, total, task.clip.footage.name))
        tasks = [
            _Task(clip, setting, files[clip.footage.name, setting])
            for clip in open_clips
            for setting in settings
            if clip.footage.name not in skipped and (clip.footage.name, setting) not in runs
        ]
        for task, failure in workers.do(tasks):
            done += 1
            run = _read(task.file, task.clip.footage) if task.file is not None and failure is None else None
            if run is None or task.setting is None:
                raise SightlineError(
                    f"{task.clip.footage.name} was not answered: {failure or f'{task.file} cannot be read'}"
                )
            runs[task.clip.footage.name, task.setting] = run
            on_progress(MemoryProgress(done, total, task.clip.footage.name))
    kept = tuple(clip for clip in footage if clip.name not in skipped)
    if not kept:
        first = next(iter(skipped.values()))
        raise SightlineError(
            f"nothing is left of {len(footage)} clips; the first, {first.path.name}, was skipped: {first.reason}"
        )
    return MemoryResults(
        _results(kept, settings, runs),
        kept,
        tuple(skipped.values()),
        sum(runs[clip.name, setting].incomplete for clip in kept for setting in settings),
    )


def _results(
    footage: Sequence[Footage], settings: Sequence[ShareSetting], runs: Mapping[tuple[str, ShareSetting], SceneRun]
) -> tuple[SettingResult, ...]:
    """One for each setting; coverage of all on one scale, where every clip has it."""
    parts: dict[ShareSetting, dict[Space, list[Coverage]]] = {}
    for setting in settings:
        measured = [runs[clip.name, setting].coverage for clip in footage]
        parts[setting] = {space: [each[space] for each in measured] for space in SPACES if all(measured)}
    furthest = {
        space: max((part.furthest for each in parts.values() for part in each.get(space, ())), default=0.0)
        for space in SPACES
    }
    return tuple(
        SettingResult(
            setting,
            tuple(each for clip in footage for each in runs[clip.name, setting].answered),
            {space: pooled(some, furthest[space]) for space, some in parts[setting].items()},
        )
        for setting in settings
    )


# -- files ----------------------------------------------------------------------------------------
def _clips(
    footage: Iterable[Footage],
    model: VisionLanguageModel,
    shape: WindowShape,
    folder: Path,
    skipped: dict[str, Skipped],
) -> list[_Clip]:
    engine = model_digest(NativeEngine(model), {})
    asking = str([model.ask_ids("a"), model.ask_ids("a", follow_up=True)])
    clips = []
    for clip in footage:
        try:
            video = video_digest(clip.path)
        except OSError as error:
            skipped[clip.name] = Skipped(clip.path, f"cannot be read: {error.strerror or error}")
            continue
        instants = str(sorted({question.at_s for question in clip.questions}))
        name = _digest(video, engine, asking, str(shape), instants, _code_digest(_RECORDING_CODE))
        clips.append(_Clip(clip, shape, folder / "recordings" / f"{name}.safetensors"))
    return clips


def _answer_file(clip: _Clip, setting: ShareSetting, folder: Path) -> Path:
    asked = str([(each.turns, each.answers, each.at_s, each.since_s, each.evidence) for each in clip.footage.questions])
    spec = setting.spec(frames=10**6, full_bytes=10**12, room=10**12)
    name = _digest(clip.recording.stem, asked, repr(setting), repr(spec), _code_digest(_CODE))
    return folder / "answers" / f"{name}.json"


def _read(file: Path, footage: Footage) -> SceneRun | None:
    """What was answered, or None where nothing is there, or nothing whole."""
    try:
        return SceneRun.from_json(json.loads(file.read_text(encoding="utf-8")), footage.name, footage.questions)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@functools.cache
def _code_digest(parts: tuple[str, ...]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for folder in cluster.__path__:
        for part in parts:
            place = Path(folder, part)
            for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                hasher.update(os.fsencode(path.relative_to(folder)) + path.read_bytes())
    return hasher.hexdigest()


# -- work -----------------------------------------------------------------------------------------
def _carry_out(model: VisionLanguageModel, engine: NativeEngine, task: _Task) -> str | None:
    """Do it; why a clip cannot be recorded, None where all is well."""
    clip = task.clip
    if task.setting is None or task.file is None:
        if _recording(clip.recording) is None:
            try:
                made = record(model, clip.footage.path, clip.shape, clip.instants)
            except ConfigError:
                raise
            except SightlineError as error:
                return str(error)
            made.save(clip.recording)
            _recording.cache_clear()
        return None
    recording = _recording(clip.recording)
    if recording is None:
        return f"its recording {clip.recording} is gone"
    run = answer_scene(engine, recording, clip.footage.name, clip.footage.questions, task.setting)
    try:
        task.file.parent.mkdir(parents=True, exist_ok=True)
        partial = task.file.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(run.to_json(), separators=(",", ":")), encoding="utf-8")
        partial.replace(task.file)
    except OSError as error:
        raise SightlineError(f"cannot write {task.file}: {error.strerror or error}; choose another place") from None
    return None


@functools.lru_cache(maxsize=1)
def _recording(path: Path) -> Recording | None:
    return Recording.load(path)


class _Workers:
    """Processes that each hold the model, started when there is work for two; or this one alone. A context manager."""

    def __init__(self, model: VisionLanguageModel, spec: ModelSpec | None, jobs: int) -> None:
        self._model, self._spec, self._jobs = model, spec, jobs
        self._engine: NativeEngine | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, str | None]]:
        """Tasks as they get done, and what was wrong with each."""
        if self._jobs == 1 or self._spec is None:
            self._engine = self._engine or NativeEngine(self._model)
            for task in tasks:
                yield task, _carry_out(self._model, self._engine, task)
            return
        if not tasks:
            return
        if self._pool is None:
            self._pool = start_pool(self._jobs, _start_worker, self._spec)
        yield from run_tasks(self._pool, _work, tasks)


# One model per process of the pool: set by its initializer, which is the only way to hand it to the calls after it.
_worker: tuple[VisionLanguageModel, NativeEngine] | None = None


def _start_worker(spec: ModelSpec, threads: int) -> None:
    global _worker
    torch.set_num_threads(threads)
    model = spec.load()
    _worker = (model, NativeEngine(model))


def _work(task: _Task) -> str | None:
    if _worker is None:
        raise RuntimeError("the process was not initialised")
    return _carry_out(*_worker, task)
