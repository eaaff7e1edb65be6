"""Examples made in other processes, in the order of their numbers for any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from cluster.errors import SightlineError
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import Example
from cluster.lab.training.pruning import picture_grid
from cluster.types import PatchGrid

if TYPE_CHECKING:
    from cluster.lab.training.trainable_model import TrainableModel

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
    # Processes that only draw examples start in half the time without transformers.
    from cluster.lab.training.trainable_model import patch_batches

    tokens = model.encode_frames(patch_batches(example, grid))
    frames = tuple(replace(frame, patches=frame.patches[:0]) for frame in example.frames)
    return replace(example, frames=frames, visual_tokens=tokens.cpu().numpy().astype(np.float16))


@lru_cache(maxsize=1)
def _tower(weights: str, shape: str) -> TrainableModel:
    from cluster.lab.training.trainable_model import TrainableModel

    torch.set_num_threads(1)
    model = TrainableModel.fresh(SHAPES[shape], 0)
    model._visual.load_state_dict(torch.load(weights, weights_only=True))
    return model


# Examples made ahead per process, a few megabytes each.
_AHEAD = 6


class ExampleLoader(AbstractContextManager["ExampleLoader"]):
    """``next()`` gives examples ``first, first + 1, …``, made ahead by ``workers`` processes, or on demand without.

    A context manager: leaving it ends the processes.
    """

    def __init__(self, make: Callable[[int], Example], *, workers: int, first: int = 0) -> None:
        self._workers = workers
        self._number = first
        loader: DataLoader[Example] = DataLoader(
            _Numbered(make),
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=workers,
            # Of its own: else the workers' seeds would be drawn from the generator that the training uses.
            generator=torch.Generator(),
            prefetch_factor=_AHEAD if workers else None,
            multiprocessing_context="spawn" if workers else None,
        )
        self._examples: Any = iter(loader)

    def next(self) -> Example:
        """The next example. Raises ``SightlineError``: a process failed to make it, or died."""
        number = self._number
        self._number += 1
        try:
            example: Example = next(self._examples)
            return example
        except Exception as error:
            if not self._workers:
                raise
            raise SightlineError(
                f"example {number} could not be made; start again to resume from the last checkpoint:\n{error}"
            ) from error

    def __exit__(self, *_: object) -> None:
        if self._workers:
            # There is no public way, and an error's traceback would keep the iterator and thereby its processes.
            self._examples._shutdown_workers()


@dataclass(frozen=True, slots=True)
class _Numbered(Dataset[Example]):
    make: Callable[[int], Example]

    def __getitem__(self, number: int) -> Example:
        return self.make(number)
