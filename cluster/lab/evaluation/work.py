"""What evaluations share: processes that each hold the model, results that outlive an interruption, progress."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

import torch

import cluster.codec
import cluster.engine
import cluster.models
import cluster.vision
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.lab.evaluation.datasets import Skipped
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel

# What decides an answer besides model and setting; results of other code are not taken for this code's.
_CODE = (cluster.codec, cluster.vision, cluster.engine, cluster.models)

T = TypeVar("T")
R = TypeVar("R")
Key = tuple[str, str, str]
"""Digest of the video, digest of the model and of what it is asked, setting."""


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps, ``resumed`` of which were in the work file; ``now``: which video was the last.

    A step is one video under one setting, and for a memory the recording of one video as well."""

    done: int
    total: int
    resumed: int
    now: str


class WorkFile:
    """Results as JSON by :data:`Key`, one a line: read from ``path`` when entered, added to it later; ``None`` keeps
    nothing. A context manager.

    Raises:
        SightlineError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._done: dict[Key, Any] = {}
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

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, key: Key, read: Callable[[Any], R]) -> R | None:
        """The result as ``read`` from JSON, if it is there and whole."""
        try:
            return read(self._done[key])
        except (ValueError, KeyError, TypeError):
            return None

    def add(self, key: Key, run: Mapping[str, Any]) -> None:
        """Keep a result; on disk when this returns.

        Raises:
            SightlineError: the disk is full.
        """
        if self._file is None:
            return
        body = dict(zip(("video", "model", "setting"), key, strict=True)) | {"run": run}
        try:
            self._file.write(json.dumps(body, separators=(",", ":")) + "\n")
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
            # The line that was being written when the evaluation was interrupted.
            logging.getLogger(__name__).info("%s: %d broken lines are computed again", self.path, broken)
        if text and not text.endswith("\n"):
            file.write("\n")

    def _unusable(self, error: OSError) -> SightlineError:
        return SightlineError(f"work file {self.path} cannot be used: {error.strerror or error}; choose another place")


# -- digests --------------------------------------------------------------------------------------
def digest(*parts: str) -> str:
    """Of several texts."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def video_digest(path: Path) -> str:
    """Of the file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def model_digest(engine: NativeEngine, questions: Mapping[str, str]) -> str:
    """Of everything but video and setting that a score depends on: weights, prompts, calibration, pixels, and code."""
    model = engine.model
    return digest(
        engine.fingerprint,
        f"{model.settings.score_temperature} {model.settings.score_bias}",
        str(model.geometry),
        str(model.system_ids()),
        *(f"{kind}:{model.question_ids(text)}" for kind, text in sorted(questions.items())),
        code_digest(_CODE),
    )


@functools.cache
def code_digest(parts: tuple[ModuleType, ...]) -> str:
    """Of the sources of modules, and of packages with all they hold."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        for place in map(Path, part.__path__ if hasattr(part, "__path__") else [str(part.__file__)]):
            for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                hasher.update(os.fsencode(path.relative_to(place.parent)) + path.read_bytes())
    return hasher.hexdigest()


# -- processes ------------------------------------------------------------------------------------
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


class Workers:
    """``jobs`` processes that each hold the model and take their share of the cores, started when there is work for
    two; or this one alone. A context manager.

    Raises:
        ConfigError: several processes and a loaded model.
    """

    def __init__(self, model: VisionLanguageModel | ModelSpec, jobs: int) -> None:
        if jobs > 1 and not isinstance(model, ModelSpec):
            raise ConfigError("several processes load the model for themselves: give a ModelSpec, not a loaded model")
        self._spec = model if isinstance(model, ModelSpec) and jobs > 1 else None
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self.engine = NativeEngine(model.load() if isinstance(model, ModelSpec) else model)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, work: Callable[[NativeEngine, T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Tasks with what ``work`` made of them, as they get done.

        Raises:
            SightlineError: a process died.
        """
        if self._spec is None or (self._pool is None and len(tasks) < 2):
            yield from ((task, work(self.engine, task)) for task in tasks)
            return
        if self._pool is None:
            threads = max(1, len(os.sched_getaffinity(0)) // self._jobs)
            # Not fork: torch has threads by now.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawn, initializer=_start, initargs=(self._spec, threads))
        try:
            futures = {self._pool.submit(_work, work, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise SightlineError(
                "a process of the evaluation ended without a word, most likely for want of memory; "
                "run it again with fewer --jobs: it goes on where it was"
            ) from None


# One engine per process of the pool: set by its initializer, which is the only way to hand it to the calls after it.
_engine: NativeEngine | None = None


def _start(spec: ModelSpec, threads: int) -> None:
    global _engine
    torch.set_num_threads(threads)
    _engine = NativeEngine(spec.load())


def _work(work: Callable[[NativeEngine, T], R], task: T) -> R:
    if _engine is None:
        raise RuntimeError("the process was not initialised")
    return work(_engine, task)


def nothing_left(what: str, given: int, skipped: Mapping[str, Skipped]) -> SightlineError:
    """The error for an evaluation of which every video was skipped."""
    first = next(iter(skipped.values()))
    return SightlineError(
        f"nothing is left of {given} {what}; the first, {first.path.name}, was skipped: {first.reason}"
    )
