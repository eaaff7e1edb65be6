"""Pruner interface, from the codec's change to the patches to encode; and the arithmetic of patch grids they share.

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
from cluster.types import BoolGrid, PictureHeader, SampledPicture, UInt8Array


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

        Anchors and random access samples keep everything. A fresh sample, or one on another grid, resets all state, and
        one after a gap all that samples are compared with to find change.
        """

    def repeat(self, frame: SampledPicture) -> PruneDecision:
        """Decide on a sample with the picture of the one before it (``repeated``): nothing changed."""
        return PruneDecision(np.zeros((frame.grid.rows, frame.grid.cols), np.bool_), 0.0)

    def reset(self) -> None:
        """Forget what earlier samples showed: the next one may come hours after them."""
        return


def parameters(policy: type[Pruner]) -> list[str]:
    """Parameter names of a policy."""
    return [each.name for each in fields(policy) if each.init] if is_dataclass(policy) else []


def make_pruner(name: str, options: Mapping[str, float] | None = None) -> Pruner:
    """Create a pruner for one camera. Raises ConfigError: no such policy or parameter."""
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


def any_in_group(mask: BoolGrid, merge: int) -> BoolGrid:
    """``[rows, cols]`` -> ``[rows / merge, cols / merge]``: groups with at least one set cell."""
    rows, cols = mask.shape
    groups: BoolGrid = np.logical_or.reduce(mask.reshape(rows // merge, merge, cols // merge, merge), axis=(1, 3))
    return groups


def complete_groups(mask: BoolGrid, merge: int) -> BoolGrid:
    """Set every cell of a group that has one set (CodecSight section 3.3.2, "group-complete mask")."""
    return expand_groups(any_in_group(mask, merge), merge)


def expand_groups(groups: BoolGrid, merge: int) -> BoolGrid:
    """``[group rows, group cols]`` -> ``[rows, cols]``: each group's value for all of its cells."""
    return groups.repeat(merge, axis=0).repeat(merge, axis=1)


def dilate(mask: BoolGrid) -> BoolGrid:
    """Set cells and their eight neighbours."""
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    wide = tall.copy()
    wide[:, 1:] |= tall[:, :-1]
    wide[:, :-1] |= tall[:, 1:]
    return wide


def neighbours(mask: BoolGrid) -> UInt8Array:
    """Number of set cells among each cell's eight neighbours, ``[rows, cols]`` uint8; outside counts as unset."""
    count = np.zeros((mask.shape[0] + 2, mask.shape[1] + 2), dtype=np.uint8)
    count[1:-1, 1:-1] = mask
    columns = count[:-2] + count[1:-1] + count[2:]
    square = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
    around: UInt8Array = square - mask
    return around
