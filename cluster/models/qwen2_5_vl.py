"""Qwen2.5-VL: as Qwen2-VL, with windowed attention in most of the tower's blocks and frames at their times."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from cluster.models.base import PatchBatch
from cluster.models.packed_attention import SequencePacking, row_numbers
from cluster.models.qwen2_vl import Qwen2VL
from cluster.types import PatchGrid


class Qwen25VL(Qwen2VL):
    """``Qwen2_5_VLForConditionalGeneration`` with a pruned tower (Qwen2.5-VL report, section 2.1)."""

    family = "qwen2_5_vl"
    position_rule = "time in seconds, row, column"
    library = (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)
    tower_width = "out_hidden_size"

    # -- vision -----------------------------------------------------------------------------------
    def _arrange(self, cells: Tensor, counts: Sequence[int]) -> tuple[Tensor | None, list[SequencePacking]]:
        """See the base. Patches run in window order, as in transformers; a window's kept patches see each other in
        windowed layers, a frame's in full ones."""
        _, packings = super()._arrange(cells, counts)
        window = self._windows(cells, counts)
        order = torch.argsort(window, stable=True)
        lengths = torch.unique_consecutive(window[order], return_counts=True)[1] * self.geometry.merge**2
        windowed = SequencePacking.of(lengths.tolist(), self.device, self.dtype)
        return order, [each if i in self._full_blocks else windowed for i, each in enumerate(packings)]

    def _windows(self, cells: Tensor, counts: Sequence[int]) -> Tensor:
        """A number for the window of each merged group, which ascends with frames and is row-major in them."""
        side = self._visual.window_size // self.geometry.merge // self._visual.patch_size
        frame = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return row_numbers(torch.cat([frame[:, None], cells // side], dim=1))

    @cached_property
    def _full_blocks(self) -> frozenset[int]:
        """Blocks of the tower in which all patches of a frame see each other."""
        return frozenset(self._visual.fullatt_block_indexes) & frozenset(range(len(self._visual.blocks)))

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames stand at their times, not in slots.

        Times are rounded to the nearest index: a camera's lie around the even pace that the published rule floors.
        """
        del slot, grid
        return math.floor(time_s * self._tokens_per_second + 0.5)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """M-RoPE: time in ``tokens_per_second`` (see :meth:`frame_place`), row and column, all from ``first``."""
        del slot, grid
        time = torch.floor(time_s * self._tokens_per_second + 0.5).to(torch.int64)
        return torch.cat([time[None], cells.to(torch.int64).T]) + first

    @cached_property
    def _tokens_per_second(self) -> float:
        return float(self.model.config.vision_config.tokens_per_second)

    # -- sizes ------------------------------------------------------------------------------------
    def _attention_pairs(self, frames: Sequence[PatchBatch]) -> int:
        kept = [frame for frame in frames if len(frame.cells)]
        if not kept:
            return 0
        windows = self._windows(torch.cat([frame.cells for frame in kept]), [len(frame.cells) for frame in kept])
        members = torch.bincount(windows) * self.geometry.merge**2
        full = len(self._full_blocks)
        whole = sum(len(frame.patches) ** 2 for frame in kept)
        return full * whole + (len(self._visual.blocks) - full) * int((members**2).sum())
