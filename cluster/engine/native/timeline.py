"""Positions of remembered frames before the window, with long time gaps shortened so that every frame gets its own.

After ReKV (arXiv 2503.00540), which encodes retrieved blocks contiguously, and InfiniPot-V (arXiv 2506.15745), which
reassigns positions after compression. Here layers and heads retrieve different frames but must agree on positions, so
every frame in the memory gets one, retrieved or not.
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

# Longest training sequence published (Qwen2.5-VL, arXiv 2502.13923, section 2.2.2), whatever a model's config says.
TRAINED_POSITIONS = 32768
# Frames over which positions per frame are averaged.
_MANY = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Places of ``n`` remembered frames, and of the window after them.

    * ``number`` ``[n]`` int64: frame numbers, ascending
    * ``time_s`` ``[n]`` float64: seconds after the oldest frame, for families whose positions follow time
    * ``slot`` ``[n]`` int64: frame slots after the oldest frame, for families whose positions count frames
    * ``length_s``, ``slots``: the same for the window's first frame
    """

    number: Tensor
    time_s: Tensor
    slot: Tensor
    length_s: float
    slots: int

    @classmethod
    def of(cls, number: Sequence[int], time: Sequence[int], opened: int, *, frame_s: float, most: int) -> Self:
        """Place frames.

        Time gaps are clipped to a common limit, the largest with which everything fits into ``most`` frames. If frames
        do not fit side by side, neighbours share positions evenly.

        Args:
            number, time: of the frames, ascending; times in microseconds.
            opened: time of the window's first frame, after all of them.
            frame_s: seconds between frames.
            most: frames that fit side by side, at least 1.
        """
        if not number:
            none = torch.zeros(0, dtype=torch.int64)
            return cls(none, none.double(), none, 0.0, 0)
        true = (torch.from_numpy(np.append(np.array(time), opened)).double() - time[0]) / MICROSECONDS
        gap = true.diff() / frame_s
        # Subtracting the excess, rather than summing clipped gaps, keeps times exact if nothing is clipped.
        cut = (gap - shorten_gaps(gap, most)).cumsum(0) * frame_s
        placed = torch.cat([true[:1], true[1:] - cut])
        # As in windows, every frame takes a slot, however short its distance.
        counted = shorten_gaps(gap.round().clamp(min=1.0), most).cumsum(0)
        slot = torch.cat([counted.new_zeros(1), torch.floor(counted + 1e-6)]).to(torch.int64)
        return cls(torch.from_numpy(np.array(number)), placed[:-1], slot[:-1], float(placed[-1]), int(slot[-1]))

    def places(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """``time_s`` and ``slot`` of the frames with these numbers; ``frame`` is on the timeline's device."""
        index = torch.searchsorted(self.number, frame.contiguous())
        return self.time_s[index], self.slot[index]

    def to(self, device: torch.device) -> Self:
        return replace(self, number=self.number.to(device), time_s=self.time_s.to(device), slot=self.slot.to(device))


def shorten_gaps(gap: Tensor, most: float) -> Tensor:
    """``min(gap, limit)`` ``[n]`` with the largest limit for which the sum is at most ``most``."""
    if float(gap.sum()) <= most + 1e-6:
        return gap
    ordered = gap.sort().values
    # Candidate limits: keep all shorter gaps, and divide the rest evenly among the others.
    left = most - (ordered.cumsum(0) - ordered)
    limit = left / torch.arange(len(gap), 0, -1)
    return gap.clamp(max=float(limit[int((ordered > limit).int().argmax())]))


def frames_that_fit(model: VisionLanguageModel, taken: int, frame_s: float, grid: PatchGrid) -> int:
    """Frames that fit side by side into the model's trained positions, less ``taken`` positions; at least 1."""
    limit = min(TRAINED_POSITIONS, getattr(model.text_config, "max_position_embeddings", TRAINED_POSITIONS))
    most = (limit - taken) * _MANY / model.frame_place(_MANY * frame_s, _MANY, grid)
    if model.settings.memory_s is not None:
        most = min(most, model.settings.memory_s / frame_s)
    return max(1, math.floor(most + 1e-6))
