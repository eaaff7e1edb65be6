"""Execution of an evaluation: a pool of processes that each hold the model, and an on-disk result cache keyed by
digests of video, model, code and setting, so that a run can be resumed."""

import functools
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch

import cluster
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.hosts import defer_interrupts, start_pool_process
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import weights_digest
from cluster.models.loading import load_model

T = TypeVar("T")
R = TypeVar("R")


OnProgress = Callable[[int, int, str], None]
"""Progress callback: steps done (cached ones count), steps in total, and name of the last video. A step is one video
under one setting; in memory evaluations also the recording of a video."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model by name, to be loaded in every process."""

    name: str
    device: str = "cpu"
    dtype: str = "float32"

    def load(self) -> VisionLanguageModel:
        """Raises ``ModelError``."""
        return load_model(self.name, device=self.device, dtype=self.dtype)


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Pool of ``jobs`` processes, each with the model and its share of the cores, started once there are two tasks;
    with one job, this process. A context manager. Raises ``ConfigError``: several jobs with a loaded model."""

    def __init__(self, model: VisionLanguageModel | ModelSpec, jobs: int) -> None:
        if jobs > 1 and not isinstance(model, ModelSpec):
            raise ConfigError("every process loads its own model: for several jobs, give a ModelSpec")
        self._spec = model if isinstance(model, ModelSpec) and jobs > 1 else None
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self.engine = NativeEngine(model.load() if isinstance(model, ModelSpec) else model)

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, work: Callable[[NativeEngine, T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield (task, result) in order of completion. Raises ``SightlineError``: a process died."""
        if self._spec is None or (self._pool is None and len(tasks) < 2):
            yield from ((task, work(self.engine, task)) for task in tasks)
            return
        if self._pool is None:
            threads = max(1, len(os.sched_getaffinity(0)) // self._jobs)
            # Not fork: torch has running threads.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawn, initializer=_start, initargs=(self._spec, threads))
        try:
            with defer_interrupts():
                futures = {self._pool.submit(_work, work, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise SightlineError(
                "an evaluation process died, most likely out of memory; "
                "run the command again with fewer --jobs: it resumes"
            ) from None


# The engine of a pool process, set by its initializer.
_engine: NativeEngine


def _start(spec: ModelSpec, threads: int) -> None:
    global _engine
    start_pool_process()
    torch.set_num_threads(threads)
    _engine = NativeEngine(spec.load())


def _work(work: Callable[[NativeEngine, T], R], task: T) -> R:
    return work(_engine, task)


def all_skipped_error(what: str, given: int, skipped: Mapping[str, SkippedVideo]) -> SightlineError:
    """The error of an evaluation in which every video was skipped."""
    first = next(iter(skipped.values()))
    return SightlineError(f"all {given} {what} were skipped; the first, {first.path.name}: {first.reason}")


# -- results on disk -------------------------------------------------------------------------------
_LIBRARIES = ("av", "numpy", "torch", "transformers")

Key = tuple[str, str, str]
"""Digest of the video; digest of model and questions; setting."""


class ResultCache:
    """JSON Lines file of results by :data:`Key`, read on entry and appended to. A context manager; with ``path`` None
    nothing is stored. Raises ``SightlineError``: the file cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._done: dict[Key, Any] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+", encoding="utf-8", errors="replace")
                self._file.seek(0)
                self._read(self._file)
            except OSError as error:
                raise self._unusable(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, key: Key, read: Callable[[Any], R]) -> R | None:
        """The cached result, parsed by ``read``; None if missing or invalid."""
        try:
            return read(self._done[key])
        except (ValueError, KeyError, TypeError):
            return None

    def add(self, key: Key, run: Any) -> None:
        """Append a result (a dataclass) and flush. Raises ``SightlineError``: the file cannot be written."""
        if self._file is None:
            return
        body = dict(zip(("video", "model", "setting"), key, strict=True)) | {"run": run}
        try:
            self._file.write(json.dumps(body, default=asdict, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unusable(error) from None

    def _read(self, file: IO[str]) -> None:
        text = file.read()
        broken = 0
        for line in text.splitlines():
            try:
                body = json.loads(line)
                self._done[str(body["video"]), str(body["model"]), str(body["setting"])] = body["run"]
            except (ValueError, KeyError, TypeError):
                broken += 1
        if broken:
            # An interrupted evaluation leaves a partial last line.
            logging.getLogger(__name__).info("%s: %d invalid lines ignored, to be recomputed", self.path, broken)
        if text and not text.endswith("\n"):
            file.write("\n")

    def _unusable(self, error: OSError) -> SightlineError:
        return SightlineError(f"work file {self.path} cannot be used: {error.strerror or error}; choose another path")


# -- digests --------------------------------------------------------------------------------------
def digest(*parts: str) -> str:
    """Digest of several texts."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def video_digest(path: Path) -> str:
    """Digest of the file's bytes. Raises ``OSError``: the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def model_digest(engine: NativeEngine, questions: Mapping[str, str]) -> str:
    """Digest of everything but video and setting that affects results: weights, device, settings, prompts,
    preprocessing, code, libraries."""
    model = engine.model
    return digest(
        weights_digest(model.model),
        str((model.family, model.dtype, model.device.type, model.mean, model.std)),
        model.model.config.to_json_string(),
        str(model.settings),
        str(model.geometry),
        str(model.system_ids()),
        *(f"{kind}:{model.question_ids(text)}" for kind, text in sorted(questions.items())),
        code_digest(),
        *map(metadata.version, _LIBRARIES),
    )


@functools.cache
def code_digest() -> str:
    """Digest of all sources of the package: a hand-kept list of those that affect results would go stale."""
    root = Path(cluster.__path__[0])
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        hasher.update(os.fsencode(path.relative_to(root)) + path.read_bytes())
    return hasher.hexdigest()
