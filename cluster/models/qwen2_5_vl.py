"""Qwen2.5-VL: Qwen2-VL with windowed attention in most tower blocks, and frames positioned by time."""

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
        """See the base. Patches run in window order, as in transformers; kept patches of a window attend to each other
        in windowed blocks, those of a frame in full ones."""
        _, packings = super()._arrange(cells, counts)
        window = self._windows(cells, counts)
        order = torch.argsort(window, stable=True)
        lengths = torch.unique_consecutive(window[order], return_counts=True)[1] * self.geometry.merge**2
        windowed = SequencePacking.of(lengths.tolist(), self.device, self.dtype)
        return order, [each if i in self._full_blocks else windowed for i, each in enumerate(packings)]

    def _windows(self, cells: Tensor, counts: Sequence[int]) -> Tensor:
        """Window number of each merged group: ascending over frames, row-major within a frame."""
        side = self._visual.window_size // self.geometry.merge // self._visual.patch_size
        frame = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return row_numbers(torch.cat([frame[:, None], cells // side], dim=1))

    @cached_property
    def _full_blocks(self) -> frozenset[int]:
        """Tower blocks in which all patches of a frame attend to each other."""
        return frozenset(self._visual.fullatt_block_indexes) & frozenset(range(len(self._visual.blocks)))

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames are placed by time, not by slot.

        Times are rounded, where the published rule floors them: a camera's timestamps jitter around the exact rate.
        """
        del slot, grid
        return math.floor(time_s * self._tokens_per_second + 0.5)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """M-RoPE: time in units of ``1 / tokens_per_second`` (see :meth:`frame_place`), row and column, all counted
        from ``first``."""
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
