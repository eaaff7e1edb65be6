"""Examples made in other processes, in the order of their numbers for any number of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from cluster.errors import SightlineError
from cluster.lab.training.batch import patch_batches
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import Example
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.trainable_model import TrainableModel
from cluster.types import PatchGrid

# Capacity; an example takes some hundred kilobytes.
_KEPT = 4096
# Minimum number before examples are replayed, against overfitting.
_FIRST = 64


class ReplayBuffer:
    """``next()`` alternates one new example of ``source`` with ``again`` random earlier ones.

    Deterministic in the examples and ``seed``.
    """

    def __init__(self, source: ExampleLoader, *, again: int, seed: int = 0) -> None:
        self._source = source
        self._again = again
        self._rng = np.random.default_rng([seed, 17])
        self._kept: list[Example] = []
        self._turn = 0

    def next(self) -> Example:
        """The next example, new or replayed."""
        turn = self._turn
        self._turn += 1
        if turn % (self._again + 1) and len(self._kept) >= _FIRST:
            return self._kept[int(self._rng.integers(len(self._kept)))]
        example = self._source.next()
        if self._again:
            if len(self._kept) < _KEPT:
                self._kept.append(example)
            else:
                self._kept[int(self._rng.integers(_KEPT))] = example
        return example


@dataclass(frozen=True, slots=True)
class FrozenTowerExamples:
    """Number -> example of ``make``, encoded by the tower with the weights in the file ``weights``.

    The tower is most of a step; running it in the rendering process leaves a third of the work to the trainer.
    """

    make: Callable[[int], Example]
    weights: str
    shape: str

    def __call__(self, number: int) -> Example:
        return encode_example(_tower(self.weights, self.shape), self.make(number), picture_grid(SHAPES[self.shape]))


def save_tower(model: TrainableModel, path: Path) -> None:
    """Write the tower's weights for :class:`FrozenTowerExamples`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model._visual.state_dict(), path)


@torch.no_grad()
def encode_example(model: TrainableModel, example: Example, grid: PatchGrid) -> Example:
    """The example with visual tokens in place of pixels."""
    tokens = model.encode_frames(patch_batches(example, grid))
    frames = tuple(replace(frame, patches=frame.patches[:0]) for frame in example.frames)
    return replace(example, frames=frames, visual_tokens=tokens.cpu().numpy().astype(np.float16))


@lru_cache(maxsize=1)
def _tower(weights: str, shape: str) -> TrainableModel:
    torch.set_num_threads(1)
    model = TrainableModel.fresh(SHAPES[shape], 0)
    model._visual.load_state_dict(torch.load(weights, weights_only=True))
    return model


# Queued examples per process, a few megabytes each.
_DEPTH = 6
_POLL_S = 5.0


class ExampleLoader:
    """``next()`` gives examples ``first, first + 1, …``; without workers they are made on demand.

    Worker ``w`` of ``n`` makes every ``n``-th example into a bounded queue of its own, so the order is fixed. A context
    manager: leaving it ends the processes.
    """

    def __init__(self, make: Callable[[int], Example], *, workers: int, first: int = 0) -> None:
        self._make = make
        self._next = first
        self._processes: list[Any] = []
        self._queues: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for worker in range(workers):
            channel: Any = context.Queue(_DEPTH)
            number = first + worker
            process = context.Process(target=_work, args=(make, number, workers, channel, os.getpid()), daemon=True)
            process.start()
            self._processes.append(process)
            self._queues.append(channel)
        self._first = first

    def next(self) -> Example:
        """The next example.

        Raises:
            SightlineError: making it failed, or its worker died.
        """
        number = self._next
        self._next += 1
        if not self._processes:
            return self._make(number)
        which = (number - self._first) % len(self._processes)
        while True:
            try:
                made = self._queues[which].get(timeout=_POLL_S)
            except queue.Empty:
                if self._processes[which].is_alive():
                    continue
                raise SightlineError(
                    f"a rendering process ended with code {self._processes[which].exitcode}; "
                    "start again to resume from the last checkpoint"
                ) from None
            if isinstance(made, str):
                raise SightlineError(f"example {number} could not be made:\n{made}")
            example: Example = made
            return example

    def close(self) -> None:
        """End the processes; idempotent."""
        for process in self._processes:
            process.terminate()
        for process, channel in zip(self._processes, self._queues, strict=True):
            process.join()
            channel.cancel_join_thread()
            channel.close()
        self._processes, self._queues = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(make: Callable[[int], Example], number: int, step: int, channel: Any, parent: int) -> None:
    # Do not block on a queue whose reader was killed.
    channel.cancel_join_thread()
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() == parent:
            try:
                made: Example | str = make(number)
            except Exception:
                made = traceback.format_exc()
            while os.getppid() == parent:
                with contextlib.suppress(queue.Full):
                    channel.put(made, timeout=_POLL_S)
                    break
            number += step
