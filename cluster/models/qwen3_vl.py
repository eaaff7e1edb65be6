"""Qwen3-VL: a timestamp as text before every frame, interleaved three-axis rotary positions, and DeepStack."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from cluster.errors import ModelError
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import HALF, Checkpoint
from cluster.models.qwen2_vl import Qwen2VL
from cluster.models.upload import to_device
from cluster.types import PatchGrid

# A stream's clock in the prompt, in seconds: four digits at all times, hence a constant number of tokens. Its origin is
# arbitrary, as for a camera that has been running for a while, and it wraps around after 2.5 hours.
CLOCK_BEGIN, CLOCK_END = 1000, 10000


class Qwen3VL(Qwen2VL):
    """``Qwen3VLForConditionalGeneration`` with a pruned tower (arXiv 2511.21631, section 2)."""

    family = "qwen3_vl"
    position_rule = "a sequence of frames (row, column), each after its timestamp as text"
    library = (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    tower_width = "out_hidden_size"
    video_brackets = ("", "")
    pixel_mean, pixel_std = HALF, HALF
    moving_axes = (1, 1, 1)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        # Position embeddings of whole grids, and the number of each grid's first merge group there.
        self._table: Tensor = self._visual.pos_embed.weight[:0].float()
        self._first_groups: dict[PatchGrid, int] = {}
        if len({len(self._time_ids(time)) for time in (0.0, 234.5, 8999.9)}) > 1:
            raise ModelError("the tokenizer must spell numbers digit by digit; use the one the checkpoint came with")

    # -- vision -----------------------------------------------------------------------------------
    def _embed_frames(self, frames: Sequence[PatchBatch]) -> Tensor:
        """Patch embeddings plus the position embeddings of the patches in their frame's grid."""
        at = [self._first_group(each.grid) + each.cells @ torch.tensor([each.grid.group_cols, 1]) for each in frames]
        unit = self.geometry.merge**2
        places = to_device((torch.cat(at)[:, None] * unit + torch.arange(unit)).flatten(), self.device)
        hidden = super()._embed_frames(frames)
        return hidden + self._table[places].to(hidden.dtype)

    def _first_group(self, grid: PatchGrid) -> int:
        """Number of a grid's first merge group in the table, interpolated from the checkpoint's square grid."""
        visual = self._visual
        if grid not in self._first_groups:
            interpolation = get_vision_interpolation_indices_and_weights(
                torch.tensor([[1, grid.rows, grid.cols]]),
                visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=grid.merge,
            )
            taps, weights = (to_device(each, self.device) for each in interpolation)
            self._first_groups[grid] = len(self._table) // grid.merge**2
            self._table = torch.cat((self._table, (visual.pos_embed(taps) * weights[:, :, None]).sum(1)))
        return self._first_groups[grid]

    @property
    def deepstack(self) -> int:
        return len(self._deepstack_blocks)

    @property
    def _deepstack_blocks(self) -> Sequence[int]:
        return list(self.model.config.vision_config.deepstack_visual_indexes)

    @property
    def _mergers(self) -> list[Any]:
        return [self._visual.merger, *self._visual.deepstack_merger_list]

    # -- text -------------------------------------------------------------------------------------
    def _frame_text(self, frame: PatchBatch) -> tuple[list[int], list[int]]:
        return self._time_ids(frame.time_s), self._texts[1]

    def _time_ids(self, time_s: float) -> list[int]:
        """Token ids of the text before a frame at this time of its stream, whatever the window."""
        tenths = math.floor(time_s * 10 + 0.5) % (10 * (CLOCK_END - CLOCK_BEGIN))
        return self._ids(f"<{CLOCK_BEGIN + tenths / 10:.1f} seconds><|vision_start|>")

    @cached_property
    def _texts(self) -> tuple[list[int], list[int]]:
        return self._time_ids(0.0), self._ids("<|vision_end|>")

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames are placed by slot, since their time is written as text."""
        del time_s
        return slot * self._frame_length(grid)

    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        return first + place + self._frame_length(grid)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """A plain sequence, in which a frame's tokens are at its start plus (0, row, column), and its length is that of
        its longer side.

        Source: Qwen3-VL report, section 2; ``get_rope_index`` of transformers.
        """
        del time_s
        before = len(self._texts[0])
        row, col = cells.to(torch.int64).unbind(1)
        start = first + slot.to(torch.int64) * self._frame_length(grid)
        side = max(grid.group_rows, grid.group_cols)
        text = start + torch.where(col < before, col, col + side)
        picture = torch.stack([torch.zeros_like(row), row, col]) + start + before
        return torch.where(row < 0, text.expand(3, -1), picture)

    def _frame_length(self, grid: PatchGrid) -> int:
        return sum(map(len, self._texts)) + max(grid.group_rows, grid.group_cols)

    @cached_property
    def rotary_axes(self) -> Tensor:
        """Frequencies alternate between time, row and column until a section is used up; the rest belong to time."""
        rope = self._text_model.rotary_emb
        axes = torch.zeros(len(rope.inv_freq), dtype=torch.int64, device=self.device)
        for axis in (1, 2):
            axes[axis : 3 * rope.mrope_section[axis] : 3] = axis
        return axes

    # -- the reference ----------------------------------------------------------------------------
    @torch.no_grad()
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """See the base; positions are transformers' own. Raises ``ValueError``: a frame is pruned, or frames differ in
        grid."""
        self._reference_grid(frames)
        video = int(self.model.config.video_token_id)
        ids = self.system_ids()
        for frame, time_s in zip(frames, times_s, strict=True):
            ids += [*self._time_ids(time_s), *[video] * frame.grid.tokens, *self._texts[1]]
        return self._video_logits([*ids, *self.question_ids(question)], frames)
