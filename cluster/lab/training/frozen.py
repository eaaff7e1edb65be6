"""Examples seen already, by a tower that does not change: the language model trains on its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from cluster.lab.training.batch import patch_batches
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import Example
from cluster.lab.training.pictures import picture_grid
from cluster.lab.training.trainee import Trainee
from cluster.types import PatchGrid


@dataclass(frozen=True, slots=True)
class FrozenExamples:
    """Number -> what ``make`` makes of it, seen by the tower whose weights lie in the file ``weights``.

    The tower is most of a step, and it runs in the process that renders: the trainer is left with a third of the work.
    """

    make: Callable[[int], Example]
    weights: str
    shape: str

    def __call__(self, number: int) -> Example:
        return look(_tower(self.weights, self.shape), self.make(number), picture_grid(SHAPES[self.shape]))


def save_tower(model: Trainee, path: Path) -> None:
    """Write the tower's weights to where :class:`FrozenExamples` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model._visual.state_dict(), path)


@torch.no_grad()
def look(model: Trainee, example: Example, grid: PatchGrid) -> Example:
    """The example with its visual tokens and without its pixels."""
    seen = model.see(patch_batches(example, grid))
    frames = tuple(replace(frame, patches=frame.patches[:0]) for frame in example.frames)
    return replace(example, frames=frames, seen=seen.cpu().numpy().astype(np.float16))


@lru_cache(maxsize=1)
def _tower(weights: str, shape: str) -> Trainee:
    torch.set_num_threads(1)
    model = Trainee.fresh(SHAPES[shape], 0)
    model._visual.load_state_dict(torch.load(weights, weights_only=True))
    return model
