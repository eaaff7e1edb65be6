"""Pruner interface, from codec change to the patches to encode, and the patch grid arithmetic pruners share.

To add a policy: one file with a dataclass derived from :class:`Pruner`, its parameters as fields, and an entry in
``cluster.registry``. The shared tests then cover it.
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
    """Patches of one sample to encode.

    * ``mask`` ``[rows, cols]`` bool: cells to encode, always whole ``merge x merge`` groups
    * ``activity``: share of groups that changed, 0..1, before dilation and memory; set for anchors too. Input of the
      static gate, which misses changes not reflected in any sample's activity. 1 for a random access sample, which has
      no predecessor
    """

    mask: BoolGrid
    activity: float


class Pruner(ABC):
    """One camera's pruning policy. Stateful; used by one thread."""

    knob: ClassVar[str] = ""
    """The parameter that the quality ladder raises to keep less; empty if there is none."""

    @abstractmethod
    def prune(self, frame: SampledPicture) -> PruneDecision:
        """Decide on the next sample in time order.

        Anchors and random access samples keep everything. A fresh sample, or one on another grid, resets all state; one
        after a gap resets what samples are compared with to find change.
        """

    def repeat(self, frame: SampledPicture) -> PruneDecision:
        """Decide on a sample that repeats the previous picture (``repeated``): nothing changed."""
        return PruneDecision(np.zeros((frame.grid.rows, frame.grid.cols), np.bool_), 0.0)

    def reset(self) -> None:
        """Forget earlier samples: the next one may come hours later."""
        return


def parameters(policy: type[Pruner]) -> list[str]:
    """Parameter names of a policy."""
    return [each.name for each in fields(policy) if each.init] if is_dataclass(policy) else []


def make_pruner(name: str, options: Mapping[str, float] | None = None) -> Pruner:
    """Create a pruner for one camera. Raises ConfigError: unknown policy or parameter."""
    policy: type[Pruner] = pruners.get(name)
    known = parameters(policy)
    for option in options or {}:
        if option not in known:
            raise ConfigError(f"pruner {name!r} has no parameter {option!r}; there are: {', '.join(known)}")
    return policy(**(options or {}))


def keep_everything(frame: PictureHeader) -> BoolGrid:
    """Mask with every cell of ``frame`` set."""
    return np.ones((frame.grid.rows, frame.grid.cols), dtype=np.bool_)


def changed_group_share(changed: BoolGrid, merge: int) -> float:
    """Share of groups with at least one changed cell, 0..1."""
    return float(any_in_group(changed, merge).mean())


def any_in_group(mask: BoolGrid, merge: int) -> BoolGrid:
    """Groups with at least one set cell: ``[rows, cols]`` -> ``[rows / merge, cols / merge]``."""
    rows, cols = mask.shape
    groups: BoolGrid = np.logical_or.reduce(mask.reshape(rows // merge, merge, cols // merge, merge), axis=(1, 3))
    return groups


def complete_groups(mask: BoolGrid, merge: int) -> BoolGrid:
    """Set every cell of a group with at least one set (CodecSight section 3.3.2, "group-complete mask")."""
    return expand_groups(any_in_group(mask, merge), merge)


def expand_groups(groups: BoolGrid, merge: int) -> BoolGrid:
    """Assign each group's value to all of its cells: ``[group rows, group cols]`` -> ``[rows, cols]``."""
    return groups.repeat(merge, axis=0).repeat(merge, axis=1)


def dilate(mask: BoolGrid) -> BoolGrid:
    """Extend set cells to their eight neighbours."""
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
