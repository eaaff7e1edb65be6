"""Qwen2.5-VL: native-resolution frames of two samples, windowed tower attention, three-axis rotary positions."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from cluster.errors import ModelError
from cluster.models.base import FrameSpan, PatchBatch, VisionLanguageModel, patch_counts
from cluster.models.checkpoint import CLIP_MEAN, CLIP_STD, Checkpoint, linear_weights, normalise, preset_vocabulary
from cluster.models.layers import Tower
from cluster.models.packed_attention import SequencePacking, row_numbers
from cluster.models.upload import to_device
from cluster.types import PatchGeometry, PatchGrid

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


class Qwen25VL(VisionLanguageModel):
    """``Qwen2_5_VLForConditionalGeneration`` with a pruned tower (Qwen2.5-VL report, section 2.1)."""

    family = "qwen2_5_vl"
    position_rule = "time in seconds, row, column"
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    video_brackets = ("<|vision_start|>", "<|vision_end|>")
    pixel_mean, pixel_std = CLIP_MEAN, CLIP_STD
    # transformers' configuration and model.
    library: ClassVar[tuple[Any, Any]] = (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._visual: Any = self.model.model.visual

    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        vision = checkpoint.model.config.vision_config
        if getattr(vision, "window_size", 0) % (vision.patch_size * vision.spatial_merge_size):
            raise ModelError(
                f"the tower's window_size {vision.window_size} is no multiple of a merge group "
                f"({vision.patch_size * vision.spatial_merge_size} pixels); correct the checkpoint's config.json"
            )
        return PatchGeometry(
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            temporal=vision.temporal_patch_size,
            max_pixels=checkpoint.max_pixels,
            min_pixels=min(56 * 56, checkpoint.max_pixels),
        )

    @classmethod
    def untrained(cls, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
        tokenizer, ids, common = preset_vocabulary(SPECIAL_TOKENS, eos="<|im_end|>", pad="<|endoftext|>")
        make_config, make_model = cls.library
        config = make_config(
            text_config={**common, **text},
            vision_config=cls._vision_config(text["hidden_size"], vision),
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=True,
        )
        return make_model(config), tokenizer

    @classmethod
    def _vision_config(cls, hidden: int, vision: dict[str, Any]) -> dict[str, Any]:
        """Entries of the tower's configuration, for a language model of this width."""
        return {"out_hidden_size": hidden, "tokens_per_second": 2, **vision}

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. Patches run in window order, as in transformers; a window's kept patches see each other in
        windowed layers, a frame's in full ones, and rotary positions are those of the patches' cells."""
        counts = [len(frame.cells) for frame in frames]
        merge, unit = self.geometry.merge, self.geometry.merge**2
        # Cells are on the host, and so is all that follows from them alone: the device is not waited for.
        cells = torch.cat([frame.cells for frame in frames])
        frame_of = torch.repeat_interleave(torch.arange(len(frames)), torch.tensor(counts))
        side = self._visual.window_size // merge // self._visual.patch_size
        # Stable and lexicographic: inside a window groups stay row-major.
        window = row_numbers(torch.cat([frame_of[:, None], cells // side], dim=1))
        order = torch.argsort(window, stable=True)
        window_lengths = torch.unique_consecutive(window[order], return_counts=True)[1] * unit
        windowed = SequencePacking.of(window_lengths.tolist(), self.device, self.dtype)
        full = SequencePacking.of([count * unit for count in counts], self.device, self.dtype)

        hidden = self._embed_patches(self._upload(frames))
        rows = to_device(order, self.device)
        hidden = hidden.view(-1, unit, hidden.shape[-1])[rows].flatten(0, 1)
        rotary = self._visual.rotary_pos_emb(hidden, to_device(self._patch_positions(cells[order]), self.device))
        count, whole = len(self._visual.blocks), self._visual.fullatt_block_indexes
        packings = [full if index in whole else windowed for index in range(count)]
        *_, hidden = self._tower.run(hidden, packings, rotary)
        merged = self._visual.merger(hidden)
        embeds = torch.empty_like(merged)
        embeds[rows] = merged
        return list(torch.split(embeds.to(self.dtype), counts))

    @cached_property
    def _tower(self) -> Tower:
        return Tower(self._visual)

    def _pixel_values(self, patches: Tensor) -> Tensor:
        """``[n, T, C, p, p]`` uint8 -> ``[n, C*T*p*p]``, the layout of the checkpoint's patch embedding."""
        return normalise(patches, self.mean, self.std, self.dtype).transpose(1, 2).flatten(1)

    def _embed_patches(self, patches: Tensor) -> Tensor:
        # A Conv3d whose stride is its kernel is a matrix product, and a far faster one on CPU.
        projection = self._visual.patch_embed.proj
        return F.linear(self._pixel_values(patches), projection.weight.flatten(1), projection.bias)

    # -- positions --------------------------------------------------------------------------------
    def frame_place(self, time_s: float, slot: int, grid: PatchGrid) -> int:
        """See the base; frames stand at their times, not in slots.

        Times are rounded to the nearest index: a camera's lie around the even pace that the published rule floors.
        """
        del slot, grid
        return math.floor(time_s * self._tokens_per_second + 0.5)

    def next_position(self, first: int, place: int, grid: PatchGrid) -> int:
        """See the base: the largest position of the video over *all three axes*, plus one.

        Source: Qwen2-VL (arXiv 2409.12191), section 2.1: a modality begins one after the largest position of the one
        before it; its authors' code, which the checkpoints were trained with, takes that over the three axes.
        ``get_rope_index`` of transformers from 5.3 on leaves time out, so it is no reference where a window is longer
        in time than wide in cells.
        """
        return first + max(place + 1, grid.group_rows, grid.group_cols)

    def token_positions(self, first: int, time_s: Tensor, slot: Tensor, cells: Tensor, grid: PatchGrid) -> Tensor:
        """M-RoPE: time in ``tokens_per_second`` (see :meth:`frame_place`), row and column, all from ``first``."""
        del slot, grid
        time = torch.floor(time_s * self._tokens_per_second + 0.5).to(torch.int64)
        return torch.cat([time[None], cells.to(torch.int64).T]) + first

    @cached_property
    def _tokens_per_second(self) -> float:
        return float(self.model.config.vision_config.tokens_per_second)

    @cached_property
    def rotary_axes(self) -> Tensor:
        sections = self._text_model.rotary_emb.mrope_section
        axes = torch.repeat_interleave(torch.arange(len(sections)) % 3, torch.tensor(sections))
        return axes.to(self.device)

    # -- the reference ----------------------------------------------------------------------------
    @torch.no_grad()
    def reference_logits(self, frames: Sequence[PatchBatch], times_s: Sequence[float], question: str) -> Tensor:
        """See the base. Tokens carry our positions: transformers' own rule for text after a video is not the published
        one, and its ``second_per_grid_ts`` cannot express frames at an uneven pace. ``ValueError`` where a frame is
        pruned, or frames differ in grid."""
        grid = self._reference_grid(frames)
        system, ask = self.system_ids(), self.question_ids(question)
        positions = self._reference_positions(frames, times_s, len(system), len(ask))
        ids = [*system, *[int(self.model.config.video_token_id)] * (grid.tokens * len(frames)), *ask]
        return self._video_logits(ids, frames, position_ids=positions)

    def _reference_grid(self, frames: Sequence[PatchBatch]) -> PatchGrid:
        grid = frames[0].grid
        if any(frame.grid != grid or len(frame.cells) != grid.tokens for frame in frames):
            raise ValueError("the reference needs complete frames of one grid")
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
    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """See the base. Linear layers and attention products; a frame given as a count is taken as dense: its patches
        fill as few windows as they can."""
        patches, (per_patch, per_group) = sum(patch_counts(frames)), self._tower_weights
        linear = 2 * patches * per_patch + 2 * patches // self.geometry.merge**2 * per_group
        return int(linear + 4 * self._visual.patch_embed.embed_dim * self._attention_pairs(frames))

    @cached_property
    def _tower_weights(self) -> tuple[int, int]:
        """Weights that a patch passes, and those that a merged group does."""
        per_patch = [self._visual.patch_embed.proj.weight.numel(), *map(linear_weights, self._visual.blocks)]
        return sum(per_patch), sum(map(linear_weights, self._mergers))

    @property
    def _mergers(self) -> list[Any]:
        return [self._visual.merger]

    def _attention_pairs(self, frames: Sequence[PatchBatch | int]) -> int:
        """Pairs of patches that see each other, over all layers of the tower."""
        windowed, full = self._block_kinds
        pairs = windowed * self._windowed_pairs(frames) if windowed else 0
        return pairs + full * sum(count**2 for count in patch_counts(frames))

    @cached_property
    def _block_kinds(self) -> tuple[int, int]:
        blocks = len(self._visual.blocks)
        full = len(set(self._visual.fullatt_block_indexes) & set(range(blocks)))
        return blocks - full, full

    def _windowed_pairs(self, frames: Sequence[PatchBatch | int]) -> int:
        side, merge = self._visual.window_size // self._visual.patch_size, self.geometry.merge
        pairs = sum(w * side**4 + r**2 for w, r in (divmod(f, side**2) for f in frames if isinstance(f, int)))
        kept = [each for each in frames if not isinstance(each, int) and len(each.cells)]
        if not kept:
            return int(pairs)
        frame = torch.from_numpy(np.repeat(np.arange(len(kept)), [len(each.cells) for each in kept]))
        cells = torch.cat([each.cells for each in kept]) // (side // merge)
        members = np.bincount(row_numbers(torch.cat([frame[:, None], cells], dim=1)).numpy()) * merge**2
        return int(pairs + members @ members)
