"""LLaVA-OneVision: 27x27 patches of a SigLIP tower, interpolated to 14x14 tokens, and one newline after a video.

Interpolation makes each of the 14x14 tokens from exactly 2x2 adjacent patches of the 27x27, and only the middle row and
column of patches belong to tokens on both sides. So a group of four patches suffices for its token: the grid has 28x28
patches, in which the middle ones occur twice (see ``PatchGrid.overlap``), and the tower computes them once.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from cluster.models.base import PatchBatch
from cluster.models.checkpoint import HALF
from cluster.models.llava import Llava
from cluster.models.upload import to_device, upload
from cluster.types import PatchGrid


class LlavaOnevision(Llava):
    """``LlavaOnevisionForConditionalGeneration`` with a pruned tower (arXiv 2408.03326, section 3)."""

    family = "llava_onevision"
    library = (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration)
    special_tokens = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<image>", "<video>")
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<video>")
    # The placeholder after the frames is the newline (see :meth:`embed`).
    video_brackets = ("", "<video>\n")
    pixel_mean, pixel_std = HALF, HALF

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """See the base; the video placeholder is embedded as ``image_newline``, which ends a video."""
        newline = to_device(ids == self._placeholder, self.device)[:, None]
        return torch.where(newline, self.model.model.image_newline, super().embed(ids))

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. Patches that occur in several groups pass through the tower once."""
        place = self._places(frames)
        order = torch.argsort(place, stable=True)
        distinct, group, count = torch.unique_consecutive(place[order], return_inverse=True, return_counts=True)
        patches = torch.cat([frame.patches for frame in frames])[order[count.cumsum(0) - count]]
        unit = self._side**2
        counts = torch.bincount(distinct // unit, minlength=len(frames)).tolist()
        features = self._tower_features(upload([patches], self.device), distinct % unit, counts)
        projected = self.model.model.multi_modal_projector(features)
        back = torch.empty_like(group)
        back[order] = group
        cells = torch.cat([frame.cells for frame in frames])
        share = self._shares[cells]
        weight = to_device((share[:, 0, :, None] * share[:, 1, None]).flatten(1).to(self.dtype), self.device)
        taps = projected[to_device(back, self.device)].view(len(cells), 4, -1)
        visual = torch.einsum("tk,tkd->td", weight, taps)
        return list(torch.split(visual.to(self.dtype), [len(frame.cells) for frame in frames]))

    def _places(self, frames: Sequence[PatchBatch]) -> Tensor:
        """Index ``[n]`` of each patch among those of all frames, in raster order; equal for occurrences of a patch."""
        sources = torch.from_numpy(self._grid.sources)
        row, col = sources[self._patch_positions(torch.cat([frame.cells for frame in frames]))].unbind(1)
        frame = torch.repeat_interleave(
            torch.arange(len(frames)), torch.tensor([len(frame.patches) for frame in frames])
        )
        return (frame * self._side + row) * self._side + col

    @cached_property
    def _grid(self) -> PatchGrid:
        return self.geometry.grid(1, 1)

    @property
    def _side(self) -> int:
        """Patches along a side of the image."""
        return self._grid.rows - self._grid.overlap

    @cached_property
    def _shares(self) -> Tensor:
        """Interpolation weights ``[tokens, 2]`` of a token's two rows of patches: bilinear, corners not aligned."""
        tokens, side = self._grid.group_rows, self._side
        # In units of patches, token i's centre is at ((2 i + 1) side - tokens) / (2 tokens) from the first patch's.
        beyond = [((2 * i + 1) * side - tokens) % (2 * tokens) / (2 * tokens) for i in range(tokens)]
        second = torch.tensor(beyond, dtype=torch.float64)
        return torch.stack([1 - second, second], dim=1).float()

    # -- the reference ----------------------------------------------------------------------------
    def _picture(self, frame: PatchBatch) -> Tensor:
        """See the base: without the overlap, and padded by the remaining pixels, which the tower ignores."""
        # The first occurrence of each pixel row and column.
        shown = torch.from_numpy(np.unique(frame.grid.pixel_sources, return_index=True)[1]).to(self.device)
        picture = super()._picture(frame).index_select(1, shown).index_select(2, shown)
        rest = self._tower.config.image_size - picture.shape[-1]
        return F.pad(picture, (0, rest, 0, rest))

    # -- sizes ------------------------------------------------------------------------------------
    def _projected(self, patches: int) -> int:
        return patches

    def _tower_patches(self, frames: Sequence[PatchBatch]) -> list[int]:
        return [len(torch.unique(self._places([frame]))) for frame in frames]
