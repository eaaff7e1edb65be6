"""InternVL3: every frame one square tile, absolute tower positions, pixel shuffle, one-axis rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import InternVLConfig, InternVLForConditionalGeneration

from cluster.errors import ModelError
from cluster.models.base import PatchBatch, VisionLanguageModel, patch_counts
from cluster.models.checkpoint import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VOCABULARY,
    Checkpoint,
    linear_weights,
    normalise,
    preset_tokenizer,
)
from cluster.models.packed_attention import PACKED, SequencePacking
from cluster.types import PatchGeometry, PatchGrid

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
# The family's own template writes "Frame7: <img>...". A number would change when the window slides and take the
# frame's KV with it, so frames are told apart by their order alone.
BEFORE_FRAME, AFTER_FRAME = "<img>", "</img>\n"


class InternVL(VisionLanguageModel):
    """``InternVLForConditionalGeneration`` with a pruned tower (InternVL3 report, section 2.1)."""

    family = "internvl"
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<img>", "</img>")
    pixel_mean, pixel_std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._tower: Any = self.model.model.vision_tower
        self._tower.config._attn_implementation = PACKED
        self._before = self._ids(BEFORE_FRAME)
        self._after = self._ids(AFTER_FRAME)

    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        config, vision = checkpoint.model.config, checkpoint.model.config.vision_config
        (height, width), (patch, patch_width) = vision.image_size, vision.patch_size
        merge = round(1 / config.downsample_ratio)
        if height != width or patch != patch_width or height % (patch * merge):
            raise ModelError(
                f"an InternVL tile must be a square of whole merge groups, not {height}x{width} pixels "
                f"of {patch}x{patch_width} patches; correct image_size in the checkpoint's config.json"
            )
        if config.vision_feature_select_strategy != "default" or not isinstance(config.vision_feature_layer, int):
            raise ModelError(
                "only vision_feature_select_strategy 'default' and a single vision_feature_layer are supported; "
                "correct the checkpoint's config.json"
            )
        return PatchGeometry(patch=patch, merge=merge, temporal=1, square=height)

    @classmethod
    def untrained(cls, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
        tokenizer = preset_tokenizer(SPECIAL_TOKENS, eos="<|im_end|>", pad="<|endoftext|>")
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
        common = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
        config = InternVLConfig(
            text_config={
                "model_type": "qwen2",
                "vocab_size": VOCABULARY,
                "pad_token_id": ids["<|endoftext|>"],
                **common,
                **text,
            },
            vision_config={"attention_bias": True, **vision},
            image_token_id=ids["<IMG_CONTEXT>"],
            tie_word_embeddings=True,
        )
        return InternVLForConditionalGeneration(config), tokenizer

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. Each frame is its class token and its kept patches, with the position embeddings of their
        cells; linear layers run over all frames at once."""
        embeddings = self._tower.embeddings
        unit = self.geometry.merge**2
        lengths = [1 + len(frame.cells) * unit for frame in frames]
        packing = SequencePacking.of(lengths, self.device, self.dtype)
        ends = torch.tensor(lengths).cumsum(0)
        is_patch = torch.ones(sum(lengths), dtype=torch.bool)
        is_patch[ends - torch.tensor(lengths)] = False
        starts, rows = (kind.nonzero()[:, 0].to(self.device) for kind in (~is_patch, is_patch))

        patches = self._embed_patches(torch.cat([frame.patches for frame in frames]).to(self.device))
        hidden = patches.new_empty(len(is_patch), patches.shape[-1])
        hidden[starts] = embeddings.cls_token[0]
        hidden[rows] = patches
        if embeddings.position_embeddings is not None:
            place = torch.zeros(len(is_patch), dtype=torch.long)
            place[is_patch] = 1 + self._raster(torch.cat([frame.cells for frame in frames]))
            hidden = hidden + embeddings.position_embeddings[0, place.to(self.device)]

        hidden = self._run_layers(hidden[None], packing)[0][rows]
        # A group's patches are row-major, which is the channel order of InternVL's pixel shuffle.
        merged = self.model.model.multi_modal_projector(hidden.reshape(-1, unit * hidden.shape[-1]))
        return list(torch.split(merged.to(self.dtype), [len(frame.cells) for frame in frames]))

    def _run_layers(self, hidden: Tensor, packing: SequencePacking) -> Tensor:
        """``hidden [1, n, D]`` through the tower, to the layer whose features the checkpoint uses."""
        # transformers' layer passes nothing on to its attention, so its two residual lines stand here.
        for layer in self._tower.encoder.layer[: self._depth]:
            attended, _ = layer.attention(layer.layernorm_before(hidden), packing=packing)
            hidden = hidden + layer.lambda_1 * attended
            hidden = hidden + layer.lambda_2 * layer.mlp(layer.layernorm_after(hidden))
        normed: Tensor = self._tower.layernorm(hidden) if self._feature_layer == -1 else hidden
        return normed

    @property
    def _feature_layer(self) -> int:
        return int(self.model.config.vision_feature_layer)

    @property
    def _depth(self) -> int:
        """Layers to run: feature 0 is the embedding, feature i the output of the i-th layer, -1 the last."""
        layer, layers = self._feature_layer, len(self._tower.encoder.layer)
        return layer if layer >= 0 else layers + 1 + layer

    @property
    def _around_frame(self) -> tuple[list[int], list[int]]:
        return self._before, self._after

    def _embed_patches(self, patches: Tensor) -> Tensor:
        projection = self._tower.embeddings.patch_embeddings.projection
        pixels = normalise(patches, self.mean, self.std, self.dtype).flatten(1)
        return F.linear(pixels, projection.weight.flatten(1), projection.bias)

    def _raster(self, cells: Tensor) -> Tensor:
        """Group cells ``[g, 2]`` -> raster index on the tile of each of their patches ``[g * merge**2]``."""
        assert self.geometry.square is not None
        row, col = self._patch_positions(cells).unbind(1)
        return row * (self.geometry.square // self.geometry.patch) + col

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
        before = len(self._before)
        visual = before + row * grid.group_cols + col
        text = torch.where(col < before, col, col + grid.tokens)
        start = first + slot.to(torch.int64) * self._frame_length(grid)
        return (start + torch.where(row < 0, text, visual)).expand(3, -1)

    def _frame_length(self, grid: PatchGrid) -> int:
        return len(self._before) + grid.tokens + len(self._after)

    # -- the reference ----------------------------------------------------------------------------
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
        image = int(self.model.config.image_token_id)
        ids = self.system_ids()
        for frame in frames:
            ids += [*self._before, *[image] * frame.grid.tokens, *self._after]
        ids += self.question_ids(question)
        with self._library_attention():
            output = self.model(
                input_ids=torch.tensor([ids], device=self.device),
                pixel_values=torch.stack([self._picture(frame) for frame in frames]),
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

    # -- sizes ------------------------------------------------------------------------------------
    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """See the base: linear layers and attention products of kept patches and one class token per frame."""
        counts = [count for count in patch_counts(frames) if count]
        patches = sum(counts)
        embedding, layers, projector = self._tower_weights
        pairs = self._depth * sum((1 + count) ** 2 for count in counts)
        return int(
            2 * patches * embedding
            + 2 * (patches + len(counts)) * layers
            + 2 * patches // self.geometry.merge**2 * projector
            + 4 * self._tower.config.hidden_size * pairs
        )

    @cached_property
    def _tower_weights(self) -> tuple[int, int, int]:
        """Weights of patch embedding, layers and projector."""
        embedding = self._tower.embeddings.patch_embeddings.projection.weight.numel()
        layers = sum(linear_weights(layer) for layer in self._tower.encoder.layer[: self._depth])
        return embedding, layers, linear_weights(self.model.model.multi_modal_projector)
