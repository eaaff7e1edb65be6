"""Qwen2-VL: native-resolution frames of two samples, full attention in the tower, three-axis rotary positions."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from cluster.errors import ModelError
from cluster.models.base import FrameSpan, PatchBatch, VisionLanguageModel
from cluster.models.checkpoint import CLIP_MEAN, CLIP_STD, Checkpoint, linear_weights, normalise
from cluster.models.layers import Tower
from cluster.models.packed_attention import SequencePacking
from cluster.models.upload import to_device
from cluster.types import PatchGeometry, PatchGrid


class Qwen2VL(VisionLanguageModel):
    """``Qwen2VLForConditionalGeneration`` with a pruned tower (arXiv 2409.12191, section 2.1)."""

    family = "qwen2_vl"
    position_rule = "frame number, row, column"
    library = (Qwen2VLConfig, Qwen2VLForConditionalGeneration)
    special_tokens = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    placeholders: ClassVar[Mapping[str, str]] = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    # In this vision config, `hidden_size` is the language model's width, `embed_dim` the tower's.
    tower_width = "hidden_size"
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    video_brackets = ("<|vision_start|>", "<|vision_end|>")
    pixel_mean, pixel_std = CLIP_MEAN, CLIP_STD

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._visual: Any = self.model.model.visual

    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        vision = checkpoint.model.config.vision_config
        if getattr(vision, "window_size", 0) % (vision.patch_size * vision.spatial_merge_size):
            raise ModelError(
                f"the tower's window_size {vision.window_size} is not a multiple of a merge group's side "
                f"({vision.patch_size * vision.spatial_merge_size} pixels); correct the checkpoint's config.json"
            )
        return PatchGeometry(
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            temporal=vision.temporal_patch_size,
            max_pixels=checkpoint.max_pixels,
            min_pixels=min(56 * 56, checkpoint.max_pixels),
        )

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. A frame's kept patches attend to each other, with the rotary positions of their cells."""
        counts = [len(frame.cells) for frame in frames]
        # Everything derived from cells alone stays on the host, which thus need not wait for the device.
        cells = torch.cat([frame.cells for frame in frames])
        order, packings = self._arrange(cells, counts)
        hidden = self._embed_frames(frames)
        rows = None
        if order is not None:
            cells, rows = cells[order], to_device(order, self.device)
            hidden = hidden.view(len(cells), -1, hidden.shape[-1])[rows].flatten(0, 1)
        rotary = self._visual.rotary_pos_emb(hidden, to_device(self._patch_positions(cells), self.device))
        merger, *deepstack = self._mergers
        added: list[Tensor] = []
        blocks = self._tower.run(hidden, packings, rotary)
        for index, hidden in enumerate(blocks):
            if index in self._deepstack_blocks:
                added.append(deepstack[self._deepstack_blocks.index(index)](hidden))
        merged = torch.cat([merger(hidden), *added], dim=1) if added else merger(hidden)
        embeds = merged
        if rows is not None:
            embeds = torch.empty_like(merged)
            embeds[rows] = merged
        return list(torch.split(embeds.to(self.dtype), counts))

    def _arrange(self, cells: Tensor, counts: Sequence[int]) -> tuple[Tensor | None, list[SequencePacking]]:
        """Order in which merged groups at ``cells``, ``counts`` per frame, run through the tower (``None``: as given),
        and the packing of their patches in each block."""
        del cells
        full = SequencePacking.of([count * self.geometry.merge**2 for count in counts], self.device, self.dtype)
        return None, [full] * len(self._visual.blocks)

    def _embed_frames(self, frames: Sequence[PatchBatch]) -> Tensor:
        return self._embed_patches(self._upload(frames))

    @property
    def _deepstack_blocks(self) -> Sequence[int]:
        """Tower blocks, in the order of their mergers, whose outputs the language model's first layers add."""
        return ()

    @cached_property
    def _tower(self) -> Tower:
        return Tower(self._visual)

    def _pixel_values(self, patches: Tensor) -> Tensor:
        """``[n, T, C, p, p]`` uint8 -> ``[n, C*T*p*p]``, the layout that the patch embedding expects."""
        return normalise(patches, self.mean, self.std, self.dtype).transpose(1, 2).flatten(1)

    def _embed_patches(self, patches: Tensor) -> Tensor:
        # A Conv3d with stride equal to its kernel is a matrix product, which is far faster on a CPU.
        projection = self._visual.patch_embed.proj
        return F.linear(self._pixel_values(patches), projection.weight.flatten(1), projection.bias)

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames are counted, whatever the time between them."""
        del time_s, grid
        return slot

    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        """See the base: one more than the video's largest position over *all three axes*.

        Source: Qwen2-VL (arXiv 2409.12191), section 2.1: a modality starts one after the largest position of the
        previous one; the authors' code, with which the checkpoints were trained, takes it over all three axes.
        ``get_rope_index`` of transformers since 5.3 ignores time, so it is no reference for a window that is longer in
        time than wide in cells.
        """
        return first + max(place + 1, grid.group_rows, grid.group_cols)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """M-RoPE: frame number, row and column, all counted from ``first``."""
        del time_s, grid
        return torch.cat([slot.to(torch.int64)[None], cells.to(torch.int64).T]) + first

    @cached_property
    def rotary_axes(self) -> Tensor:
        sections = self._text_model.rotary_emb.mrope_section
        axes = torch.repeat_interleave(torch.arange(len(sections)) % 3, torch.tensor(sections))
        return axes.to(self.device)

    # -- the reference ----------------------------------------------------------------------------
    @torch.no_grad()
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """See the base. Uses our positions: transformers' rule for text after a video is not the published one, and
        its ``second_per_grid_ts`` cannot express an uneven frame rate. Raises ``ValueError``: a frame is pruned, or
        frames differ in grid."""
        grid = self._reference_grid(frames)
        system, ask = self.system_ids(), self.question_ids(question)
        positions = self._reference_positions(frames, times_s, len(system), len(ask))
        ids = [*system, *[int(self.model.config.video_token_id)] * (grid.tokens * len(frames)), *ask]
        return self._video_logits(ids, frames, position_ids=positions)

    def _reference_grid(self, frames: Sequence[PatchBatch]) -> PatchGrid:
        grid = frames[0].grid
        if any(frame.grid != grid or len(frame.cells) != grid.tokens for frame in frames):
            raise ValueError("the reference needs complete frames with the same grid")
        return grid

    def _video_logits(self, ids: Sequence[int], frames: Sequence[PatchBatch], **options: Any) -> Tensor:
        grid, video = frames[0].grid, int(self.model.config.video_token_id)
        return self._library_logits(
            ids,
            mm_token_type_ids=(torch.tensor([ids], device=self.device) == video).int() * 2,
            pixel_values_videos=self._pixel_values(self._upload(frames)),
            video_grid_thw=torch.tensor([[len(frames), grid.rows, grid.cols]], device=self.device),
            **options,
        )

    def _reference_positions(
        self, frames: Sequence[PatchBatch], times_s: Sequence[float], system: int, question: int
    ) -> Tensor:
        spans = [
            FrameSpan(time_s=time - times_s[0], slot=slot, cells=frame.cells, grid=frame.grid)
            for slot, (frame, time) in enumerate(zip(frames, times_s, strict=True))
        ]
        window = self.window_positions(system, spans)
        before = torch.arange(system).expand(3, -1)
        after = torch.arange(window.next, window.next + question).expand(3, -1)
        return torch.cat([before, *(span.cpu() for span in window.frames), after], dim=1)[:, None].to(self.device)

    # -- sizes ------------------------------------------------------------------------------------
    def tower_flops(self, frames: Sequence[PatchBatch]) -> int:
        """See the base; counts linear layers and attention products."""
        patches, (per_patch, per_group) = sum(len(frame.patches) for frame in frames), self._tower_weights
        linear = 2 * patches * per_patch + 2 * patches // self.geometry.merge**2 * per_group
        return int(linear + 4 * self._visual.patch_embed.embed_dim * self._attention_pairs(frames))

    @cached_property
    def _tower_weights(self) -> tuple[int, int]:
        """Number of weights applied per patch, and per merged group."""
        per_patch = [self._visual.patch_embed.proj.weight.numel(), *map(linear_weights, self._visual.blocks)]
        return sum(per_patch), sum(map(linear_weights, self._mergers))

    @property
    def _mergers(self) -> list[Any]:
        return [self._visual.merger]

    def _attention_pairs(self, frames: Sequence[PatchBatch]) -> int:
        """Pairs of patches that attend to each other, summed over the tower's blocks."""
        return len(self._visual.blocks) * sum(len(frame.patches) ** 2 for frame in frames)
