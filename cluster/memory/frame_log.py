"""When the frames were seen of which a memory holds anything: numbers and times that only ascend."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from cluster.types import MICROSECONDS


@dataclass(slots=True)
class FrameLog:
    """``numbers`` and ``times`` (microseconds) of frames, ascending; ``following``: number of the next one; ``shift``:
    from the camera's clock to the memory's.

    Frames are numbered anew, because a camera whose decoder was restarted counts from 0 again; and a clock that was set
    back goes on from where it was.
    """

    numbers: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    following: int = 0
    shift: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, pts: int) -> tuple[int, int]:
        """A frame came at ``pts`` of the camera's clock: its number and time here."""
        if self.times and pts + self.shift <= self.times[-1]:
            self.shift = self.times[-1] + MICROSECONDS - pts
        number, time = self.following, pts + self.shift
        self.following += 1
        self.numbers.append(number)
        self.times.append(time)
        return number, time

    def time_of(self, pts: int) -> int:
        """The camera's time as it counts here."""
        return pts + self.shift if self.times else pts

    def at(self, number: int) -> int:
        """Time of a frame."""
        return self.times[bisect.bisect_left(self.numbers, number)]

    def seconds(self, frame: Tensor) -> Tensor:
        """Times ``[n]`` float64, in seconds, of frames ``[n]``."""
        numbers = torch.tensor(self.numbers, dtype=torch.int64)
        times = torch.tensor(self.times, dtype=torch.float64) / MICROSECONDS
        return times[torch.searchsorted(numbers, frame.to(torch.int64).cpu().contiguous())]

    def since(self, time: int) -> int:
        """Number of the first frame at or after ``time``."""
        place = bisect.bisect_left(self.times, time)
        return self.numbers[place] if place < len(self.numbers) else self.following

    def forget_before(self, number: int) -> None:
        place = bisect.bisect_left(self.numbers, number)
        del self.numbers[:place], self.times[:place]

    def keep(self, numbers: Collection[int]) -> None:
        """Only these frames are held from now on."""
        kept = [place for place, number in enumerate(self.numbers) if number in numbers]
        self.numbers, self.times = [self.numbers[place] for place in kept], [self.times[place] for place in kept]

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; ``FrameLog(**state)`` is its inverse."""
        return asdict(self)
