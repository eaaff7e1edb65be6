"""One cluster per frame, as ReKV has it."""

from __future__ import annotations

from torch import Tensor

from cluster.memory.organise.base import Organiser, organisers


@organisers.register("frames")
class Frames(Organiser):
    """A frame's tokens are one block; its representative is their mean key."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._numbers: dict[int, int] = {}

    def add(self, key: Tensor, frame: Tensor) -> None:
        numbers = [self._numbers.setdefault(number, len(self._numbers)) for number in frame.tolist()]
        self.table.add(key, frame.new_tensor(numbers))
