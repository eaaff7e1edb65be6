"""A pruner turns what the codec saw change into the patches worth encoding.

To add a policy: one file with a dataclass that derives from :class:`Pruner`, its parameters as fields, and an entry in
``cluster.registry``. The shared tests run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

import numpy as np

from cluster.errors import ConfigError
from cluster.registry import pruners
from cluster.types import BoolGrid, SampledPicture
from cluster.vision.pruners.cells import any_in_group


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What to keep of one sample.

    * ``mask`` ``[rows, cols]`` bool: cells to encode, always whole ``merge x merge`` groups
    * ``activity``: share of groups that changed by themselves, before dilation and memory, 0..1; of an anchor too,
      against what was known before it. The static gate goes by it: a change that is in no sample's activity is one that
      nobody looks at. 1 for a random access sample, which has nothing to be compared with
    """

    mask: BoolGrid
    activity: float


class Pruner(ABC):
    """One camera's pruning policy; keeps state from sample to sample and belongs to one thread."""

    knob: ClassVar[str] = ""
    """The parameter that the quality ladder raises to keep less; empty where there is none."""

    @abstractmethod
    def prune(self, frame: SampledPicture) -> PruneDecision:
        """Decide on the next sample, in order of time.

        Anchors and random access samples keep everything. The latter, or one on another grid, forget all state first.
        """


def parameters(policy: type[Pruner]) -> list[str]:
    """The names a policy can be configured with."""
    return [each.name for each in fields(policy) if each.init] if is_dataclass(policy) else []


def make_pruner(name: str, options: Mapping[str, float] | None = None) -> Pruner:
    """A new pruner for one camera.

    Raises:
        ConfigError: no such policy, or a parameter it does not have.
    """
    policy: type[Pruner] = pruners.get(name)
    known = parameters(policy)
    for option in options or {}:
        if option not in known:
            raise ConfigError(f"pruner {name!r} has no parameter {option!r}; there are: {', '.join(known)}")
    return policy(**(options or {}))


def keep_everything(frame: SampledPicture) -> BoolGrid:
    """The mask that keeps all cells of ``frame``."""
    return np.ones((frame.grid.rows, frame.grid.cols), dtype=np.bool_)


def changed_group_share(changed: BoolGrid, merge: int) -> float:
    """Share of groups with at least one changed cell, 0..1."""
    return float(any_in_group(changed, merge).mean())
