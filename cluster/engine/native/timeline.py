"""Where remembered frames stand before the window: long gaps in time shortened, so that all have a place of their own.

After ReKV (arXiv 2503.00540), which encodes retrieved blocks contiguously, and InfiniPot-V (arXiv 2506.15745), which
assigns positions anew after compression. Here layers and heads retrieve different frames and must agree, so frames
that are held get places, retrieved or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, PatchGrid

# Longest sequence of published trainings (Qwen2.5-VL, arXiv 2502.13923, section 2.2.2), whatever a configuration says.
TRAINED_POSITIONS = 32768
# Frames over which the positions of one are averaged.
_MANY = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Places of ``n`` remembered frames and of the window behind them.

    * ``number`` ``[n]`` int64, ascending
    * ``time_s`` ``[n]`` float64: seconds after the oldest, for families whose positions follow time
    * ``slot`` ``[n]`` int64: frame slots after the oldest, for those that count frames
    * ``length_s``, ``slots``: of the window's first frame
    """

    number: Tensor
    time_s: Tensor
    slot: Tensor
    length_s: float
    slots: int

    @classmethod
    def of(cls, number: Sequence[int], time: Sequence[int], opened: int, *, frame_s: float, most: int) -> Self:
        """Place frames.

        Gaps in time up to a common limit stay as they are, longer ones become the limit: the largest with which all
        fits ``most``. If frames do not fit side by side, neighbours share positions evenly.

        Args:
            number, time: of the frames, ascending; microseconds.
            opened: time of the window's first frame, after all of them.
            frame_s: seconds between frames.
            most: frames that fit side by side, at least 1.
        """
        if not number:
            none = torch.zeros(0, dtype=torch.int64)
            return cls(none, none.double(), none, 0.0, 0)
        true = (torch.from_numpy(np.append(np.array(time), opened)).double() - time[0]) / MICROSECONDS
        gap = true.diff() / frame_s
        # Subtracting what is cut leaves times exact where nothing is.
        cut = (gap - shorten_gaps(gap, most)).cumsum(0) * frame_s
        placed = torch.cat([true[:1], true[1:] - cut])
        # As in windows, frames that are closer than usual take a slot each.
        counted = shorten_gaps(gap.round().clamp(min=1.0), most).cumsum(0)
        slot = torch.cat([counted.new_zeros(1), torch.floor(counted + 1e-6)]).to(torch.int64)
        return cls(torch.from_numpy(np.array(number)), placed[:-1], slot[:-1], float(placed[-1]), int(slot[-1]))

    def places(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """``time_s`` and ``slot`` of the frames with these numbers, which are on the timeline's device."""
        index = torch.searchsorted(self.number, frame.contiguous())
        return self.time_s[index], self.slot[index]

    def to(self, device: torch.device) -> Self:
        return replace(self, number=self.number.to(device), time_s=self.time_s.to(device), slot=self.slot.to(device))


def shorten_gaps(gap: Tensor, most: float) -> Tensor:
    """``min(gap, limit)`` ``[n]`` with the largest limit for which the sum is at most ``most``."""
    if float(gap.sum()) <= most + 1e-6:
        return gap
    ordered = gap.sort().values
    # With all shorter ones as they are, each of the others gets the same part of what is left.
    left = most - (ordered.cumsum(0) - ordered)
    limit = left / torch.arange(len(gap), 0, -1)
    return gap.clamp(max=float(limit[int((ordered > limit).int().argmax())]))


def frames_that_fit(model: VisionLanguageModel, taken: int, frame_s: float, grid: PatchGrid) -> int:
    """Frames that fit side by side into the model's trained positions beside ``taken`` ones: at least 1."""
    limit = min(TRAINED_POSITIONS, getattr(model.text_config, "max_position_embeddings", TRAINED_POSITIONS))
    most = (limit - taken) * _MANY / model.frame_place(_MANY * frame_s, _MANY, grid)
    if model.settings.memory_s is not None:
        most = min(most, model.settings.memory_s / frame_s)
    return max(1, math.floor(most + 1e-6))
