"""Pruner interface: from the codec's change to the patches to encode.

To add a policy: one file with a dataclass that derives from :class:`Pruner`, its parameters as fields, and an entry in
``cluster.registry``. The shared tests run it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

import numpy as np

from cluster.errors import ConfigError
from cluster.registry import pruners
from cluster.types import BoolGrid, PictureHeader, SampledPicture
from cluster.vision.pruners.cells import any_in_group


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """Patches to encode of one sample.

    * ``mask`` ``[rows, cols]`` bool: cells to encode, always whole ``merge x merge`` groups
    * ``activity``: share of groups that changed, before dilation and memory, 0..1, of anchors too. Input of the static
      gate: a change in no sample's activity goes unseen. 1 for a random access sample, which has no predecessor
    """

    mask: BoolGrid
    activity: float


class Pruner(ABC):
    """One camera's pruning policy. Stateful; used by one thread."""

    knob: ClassVar[str] = ""
    """The parameter that the quality ladder raises to keep less; empty where there is none."""

    @abstractmethod
    def prune(self, frame: SampledPicture) -> PruneDecision:
        """Decide on the next sample in time order.

        Anchors and random access samples keep everything. A random access sample, or one on another grid, resets all
        state.
        """


def parameters(policy: type[Pruner]) -> list[str]:
    """Parameter names of a policy."""
    return [each.name for each in fields(policy) if each.init] if is_dataclass(policy) else []


def make_pruner(name: str, options: Mapping[str, float] | None = None) -> Pruner:
    """Create a pruner for one camera.

    Raises:
        ConfigError: no such policy or parameter.
    """
    policy: type[Pruner] = pruners.get(name)
    known = parameters(policy)
    for option in options or {}:
        if option not in known:
            raise ConfigError(f"pruner {name!r} has no parameter {option!r}; there are: {', '.join(known)}")
    return policy(**(options or {}))


def keep_everything(frame: PictureHeader) -> BoolGrid:
    """A mask of all cells of ``frame``."""
    return np.ones((frame.grid.rows, frame.grid.cols), dtype=np.bool_)


def changed_group_share(changed: BoolGrid, merge: int) -> float:
    """Share of groups with at least one changed cell, 0..1."""
    return float(any_in_group(changed, merge).mean())
