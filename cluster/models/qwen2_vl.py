"""Qwen2-VL: as Qwen2.5-VL, with full attention in the tower and one step of time for each temporal patch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from cluster.models.base import PatchBatch, patch_counts
from cluster.models.packed_attention import SequencePacking
from cluster.models.qwen2_5_vl import Qwen25VL
from cluster.models.upload import to_device
from cluster.types import PatchGrid


class Qwen2VL(Qwen25VL):
    """``Qwen2VLForConditionalGeneration`` with a pruned tower (arXiv 2409.12191, section 2.1)."""

    family = "qwen2_vl"
    position_rule = "number of the frame, row, column"
    library = (Qwen2VLConfig, Qwen2VLForConditionalGeneration)

    @classmethod
    def _vision_config(cls, hidden: int, vision: dict[str, Any]) -> dict[str, Any]:
        # Here `hidden_size` is that of the language model, `embed_dim` the tower's own.
        return {"hidden_size": hidden, **vision}

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. A frame's kept patches see each other in every layer, at rotary positions of their cells."""
        counts = [len(frame.cells) for frame in frames]
        places = self._patch_positions(torch.cat([frame.cells for frame in frames]))
        packing = SequencePacking.of([n * self.geometry.merge**2 for n in counts], self.device, self.dtype)
        hidden = self._embed_frames(frames)
        rotary = self._visual.rotary_pos_emb(hidden, to_device(places, self.device))
        merger, *deepstack = self._mergers
        added: list[Tensor] = []
        rows = self._tower.run(hidden, [packing] * len(self._visual.blocks), rotary)
        for index, hidden in enumerate(rows):
            if index in self._deepstack_blocks:
                added.append(deepstack[self._deepstack_blocks.index(index)](hidden))
        merged = torch.cat([merger(hidden), *added], dim=1)
        return list(torch.split(merged.to(self.dtype), counts))

    def _embed_frames(self, frames: Sequence[PatchBatch]) -> Tensor:
        return self._embed_patches(self._upload(frames))

    @property
    def _deepstack_blocks(self) -> Sequence[int]:
        """Blocks of the tower, in the order of their mergers, whose output early layers of the language model add."""
        return ()

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames are counted, whatever time lies between them."""
        del time_s, grid
        return slot

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """M-RoPE: the frame's number, row and column, all from ``first``."""
        del time_s, grid
        return torch.cat([slot.to(torch.int64)[None], cells.to(torch.int64).T]) + first

    # -- sizes ------------------------------------------------------------------------------------
    def _attention_pairs(self, frames: Sequence[PatchBatch | int]) -> int:
        return len(self._visual.blocks) * sum(count**2 for count in patch_counts(frames))
