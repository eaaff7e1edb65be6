"""Data loading: examples made by worker processes, replay, and pre-encoding by a frozen vision tower."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from cluster.errors import SightlineError
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import Example
from cluster.lab.training.pruning import picture_grid
from cluster.types import PatchGrid

if TYPE_CHECKING:
    from cluster.lab.training.trainable_model import TrainableModel

# Capacity of the replay buffer; an example takes a few hundred kilobytes.
_REPLAY_CAPACITY = 4096
# Replay starts at this many examples: replaying fewer would overfit to them.
_REPLAY_MIN = 64


def replayed(source: Iterator[Example], *, again: int, seed: int = 0) -> Iterator[Example]:
    """Yield each new example of ``source`` followed by ``again`` random earlier ones, deterministically given the
    examples and ``seed``."""
    rng = np.random.default_rng([seed, 17])
    kept: list[Example] = []
    for turn in itertools.count():
        if turn % (again + 1) and len(kept) >= _REPLAY_MIN:
            yield kept[int(rng.integers(len(kept)))]
            continue
        example = next(source)
        if again and len(kept) < _REPLAY_CAPACITY:
            kept.append(example)
        elif again:
            kept[int(rng.integers(_REPLAY_CAPACITY))] = example
        yield example


@dataclass(frozen=True, slots=True)
class FrozenTowerExamples:
    """Maps an example number to the example of ``make``, encoded by the tower whose weights are in file ``weights``.

    The tower dominates a step's time; running it in the rendering process leaves the trainer a third of the work.
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
    # Imported here: workers that only render examples start in half the time without transformers.
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


# Prefetched examples per process, a few megabytes each.
_PREFETCH = 6


@contextmanager
def load_examples(make: Callable[[int], Example], *, workers: int, first: int = 0) -> Iterator[Iterator[Example]]:
    """Iterate over examples ``first, first + 1, …`` in order, prefetched by ``workers`` processes that end with the
    context; 0 makes them on demand in this process. The iterator raises ``SightlineError``: a worker failed or died."""
    numbers: Any = range(sys.maxsize)
    loader: DataLoader[Example] = DataLoader(
        numbers,
        batch_size=None,
        sampler=itertools.count(first),
        # Runs in the workers, with one example number per call.
        collate_fn=make,  # type: ignore[arg-type]
        num_workers=workers,
        # A separate generator: otherwise the workers' seeds would be drawn from the trainer's global one.
        generator=torch.Generator(),
        prefetch_factor=_PREFETCH if workers else None,
        multiprocessing_context="spawn" if workers else None,
    )
    examples: Any = iter(loader)

    def checked() -> Iterator[Example]:
        for number in itertools.count(first):
            try:
                yield next(examples)
            except Exception as error:
                if not workers:
                    raise
                raise SightlineError(
                    f"example {number} could not be made; start again to resume from the last checkpoint:\n{error}"
                ) from error

    try:
        yield checked()
    finally:
        if workers:
            # No public API for this; an error's traceback would keep the iterator, and with it the workers, alive.
            examples._shutdown_workers()
