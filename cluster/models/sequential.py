"""Families whose positions count tokens on one axis: every frame takes the same stretch, whatever is kept of it."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.models.checkpoint import normalise
from cluster.types import PatchGrid


class SequentialFrames(VisionLanguageModel):
    """A family with one-dimensional positions and square frames, of one picture each."""

    position_rule = "one axis, as many for every frame"
    moving_axes = (1, 1, 1)
    # Text that its prompt has around every frame.
    frame_brackets: ClassVar[tuple[str, str]] = ("", "")

    @cached_property
    def _brackets(self) -> tuple[list[int], list[int]]:
        before, after = self.frame_brackets
        return self._ids(before), self._ids(after)

    def _frame_text(self, frame: PatchBatch) -> tuple[list[int], list[int]]:
        del frame
        return self._brackets

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames stand in slots, whatever time lies between them."""
        del time_s
        return slot * self._frame_length(grid)

    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        return first + place + self._frame_length(grid)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """One axis, repeated: a frame's slot times its tokens with nothing pruned, then its tokens in order."""
        del time_s
        row, col = cells.to(torch.int64).unbind(1)
        before = len(self._brackets[0])
        visual = before + row * grid.group_cols + col
        text = torch.where(col < before, col, col + grid.tokens)
        start = first + slot.to(torch.int64) * self._frame_length(grid)
        return (start + torch.where(row < 0, text, visual)).expand(3, -1)

    def _frame_length(self, grid: PatchGrid) -> int:
        before, after = self._brackets
        return len(before) + grid.tokens + len(after)

    # -- the reference ----------------------------------------------------------------------------
    @property
    @abstractmethod
    def _placeholder(self) -> int:
        """Token id that stands for a visual token in the library's input."""

    @abstractmethod
    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        """Complete frames as the library's input."""

    @torch.no_grad()
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """See the base. Times only order the frames, which stand in consecutive slots.

        Raises:
            ValueError: a frame is pruned, or times do not ascend.
        """
        if list(times_s) != sorted(times_s) or len(times_s) != len(frames):
            raise ValueError("the reference needs one time per frame, ascending")
        if any(len(frame.cells) != frame.grid.tokens for frame in frames):
            raise ValueError("the reference needs complete frames")
        before, after = self._brackets
        ids = self.system_ids()
        for frame in frames:
            ids += [*before, *[self._placeholder] * frame.grid.tokens, *after]
        ids += self.question_ids(question)
        with self._library_attention():
            output = self.model(
                input_ids=torch.tensor([ids], device=self.device),
                **self._pixels(frames),
                use_cache=False,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _picture(self, frame: PatchBatch) -> Tensor:
        """A complete frame's patches in group order -> normalised pixels ``[C, height, width]``."""
        grid, merge = frame.grid, self.geometry.merge
        pixels = normalise(frame.patches.to(self.device), self.mean, self.std, self.dtype)[:, 0]
        tiles = pixels.view(grid.group_rows, grid.group_cols, merge, merge, -1, grid.patch, grid.patch)
        return tiles.permute(4, 0, 2, 5, 1, 3, 6).reshape(-1, grid.height, grid.width)
