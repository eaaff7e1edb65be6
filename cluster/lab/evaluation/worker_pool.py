"""Processes that each hold the model, and progress of an evaluation."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.hosts import end_with_parent
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps, first those that were cached; ``now``: the last video. A step is one video under
    one setting; for memory also the recording of a video."""

    done: int
    total: int
    now: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that every process loads for itself."""

    name: str
    device: str = "cpu"
    dtype: str = "float32"

    def load(self) -> VisionLanguageModel:
        """Raises ``ModelError``."""
        return load_model(self.name, device=self.device, dtype=self.dtype)


class WorkerPool:
    """``jobs`` processes that each hold the model and use their share of the cores, started when there are two tasks;
    or this process alone. A context manager.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, work: Callable[[NativeEngine, T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Pairs of task and result in order of completion.

        Raises:
            SightlineError: a process died.
        """
        if self._spec is None or (self._pool is None and len(tasks) < 2):
            yield from ((task, work(self.engine, task)) for task in tasks)
            return
        if self._pool is None:
            threads = max(1, len(os.sched_getaffinity(0)) // self._jobs)
            # Not fork: torch has started threads.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawn, initializer=_start, initargs=(self._spec, threads))
        try:
            futures = {self._pool.submit(_work, work, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise SightlineError(
                "a process of the evaluation died, most likely for lack of memory; "
                "run it again with fewer --jobs: it resumes"
            ) from None


# The engine of a pool process, set by its initializer.
_engine: NativeEngine


def _start(spec: ModelSpec, threads: int) -> None:
    global _engine
    end_with_parent()
    torch.set_num_threads(threads)
    _engine = NativeEngine(spec.load())


def _work(work: Callable[[NativeEngine, T], R], task: T) -> R:
    return work(_engine, task)


def all_skipped_error(what: str, given: int, skipped: Mapping[str, SkippedVideo]) -> SightlineError:
    """Error for an evaluation of which every video was skipped."""
    first = next(iter(skipped.values()))
    return SightlineError(f"all {given} {what} were skipped; the first, {first.path.name}: {first.reason}")
