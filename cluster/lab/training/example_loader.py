"""Examples made in other processes, in the order of their numbers, whatever the number of processes."""

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
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from cluster.errors import SightlineError
from cluster.lab.training.batch import patch_batches
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import Example
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.trainable_model import TrainableModel
from cluster.types import PatchGrid

# Examples that are kept: some hundred kilobytes each.
_KEPT = 4096
# As long as there are fewer, none is shown again: they would be learnt by heart.
_FIRST = 64


class ExampleSource(Protocol):
    """Where new examples come from."""

    def next(self) -> Example: ...


class ReplayBuffer:
    """``next()`` gives a new example of ``source``, then ``again`` earlier ones drawn at random, and so on.

    What it gives depends on the numbers of the examples and on ``seed`` alone.
    """

    def __init__(self, source: ExampleSource, *, again: int, seed: int = 0) -> None:
        self._source = source
        self._again = again
        self._rng = np.random.default_rng([seed, 17])
        self._kept: list[Example] = []
        self._turn = 0

    def next(self) -> Example:
        """The next example, new or not."""
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
    """Number -> what ``make`` makes of it, seen by the tower whose weights lie in the file ``weights``.

    The tower is most of a step, and it runs in the process that renders: the trainer is left with a third of the work.
    """

    make: Callable[[int], Example]
    weights: str
    shape: str

    def __call__(self, number: int) -> Example:
        return encode_example(_tower(self.weights, self.shape), self.make(number), picture_grid(SHAPES[self.shape]))


def save_tower(model: TrainableModel, path: Path) -> None:
    """Write the tower's weights to where :class:`FrozenTowerExamples` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model._visual.state_dict(), path)


@torch.no_grad()
def encode_example(model: TrainableModel, example: Example, grid: PatchGrid) -> Example:
    """The example with its visual tokens and without its pixels."""
    tokens = model.encode_frames(patch_batches(example, grid))
    frames = tuple(replace(frame, patches=frame.patches[:0]) for frame in example.frames)
    return replace(example, frames=frames, visual_tokens=tokens.cpu().numpy().astype(np.float16))


@lru_cache(maxsize=1)
def _tower(weights: str, shape: str) -> TrainableModel:
    torch.set_num_threads(1)
    model = TrainableModel.fresh(SHAPES[shape], 0)
    model._visual.load_state_dict(torch.load(weights, weights_only=True))
    return model


# Examples that wait, per process: each is a few megabytes.
_DEPTH = 6
_LOOK_S = 5.0


class ExampleLoader:
    """``next()`` gives examples ``first, first + 1, …``. With no process of its own it makes them when asked.

    Process ``w`` of ``n`` makes every ``n``-th example and hands it over through a bounded queue of its own, so the
    order is always the same. Use it as a context manager: leaving it ends the processes.
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
            SightlineError: making it failed, or the process that makes it is gone.
        """
        number = self._next
        self._next += 1
        if not self._processes:
            return self._make(number)
        which = (number - self._first) % len(self._processes)
        while True:
            try:
                made = self._queues[which].get(timeout=_LOOK_S)
            except queue.Empty:
                if self._processes[which].is_alive():
                    continue
                raise SightlineError(
                    f"the process that renders scenes ended with code {self._processes[which].exitcode}; "
                    "start again to go on from the last checkpoint"
                ) from None
            if isinstance(made, str):
                raise SightlineError(f"example {number} could not be made:\n{made}")
            example: Example = made
            return example

    def close(self) -> None:
        """End the processes; harmless when repeated."""
        for process in self._processes:
            process.terminate()
        for process, channel in zip(self._processes, self._queues, strict=True):
            process.join()
            channel.cancel_join_thread()
            channel.close()
        self._processes, self._queues = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(make: Callable[[int], Example], number: int, step: int, channel: Any, parent: int) -> None:
    # A trainer that was killed reads no more: what still lies in the queue must not keep this process.
    channel.cancel_join_thread()
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() == parent:
            try:
                made: Example | str = make(number)
            except Exception:
                made = traceback.format_exc()
            while os.getppid() == parent:
                with contextlib.suppress(queue.Full):
                    channel.put(made, timeout=_LOOK_S)
                    break
            number += step
