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
from cluster.models.base import PatchBatch, patch_counts
from cluster.models.checkpoint import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VOCABULARY,
    Checkpoint,
    linear_weights,
    normalise,
    preset_tokenizer,
)
from cluster.models.decoder_layer import joined_linear
from cluster.models.packed_attention import SequencePacking, attend, prepend_token
from cluster.models.sequential import SequentialFrames
from cluster.models.upload import to_device
from cluster.types import PatchGeometry

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")


class InternVL(SequentialFrames):
    """``InternVLForConditionalGeneration`` with a pruned tower (InternVL3 report, section 2.1)."""

    family = "internvl"
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<img>", "</img>")
    # The family's own template writes "Frame7: <img>...". A number would change when the window slides and take the
    # frame's KV with it, so frames are told apart by their order alone.
    frame_brackets = ("<img>", "</img>\n")
    pixel_mean, pixel_std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._tower: Any = self.model.model.vision_tower

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
        embeddings, unit = self._tower.embeddings, self.geometry.merge**2
        cells = [frame.cells.shape[0] for frame in frames]
        counts = [count * unit for count in cells]
        packing = SequencePacking.of([1 + count for count in counts], self.device, self.dtype)
        hidden = self._embed_patches(self._upload(frames))
        first = embeddings.cls_token[0, 0]
        if embeddings.position_embeddings is not None:
            table = embeddings.position_embeddings[0]
            place = 1 + self._raster(to_device(torch.cat([frame.cells for frame in frames]), self.device))
            hidden, first = hidden + table[place], first + table[0]
        hidden, rows = prepend_token(hidden, first, counts)

        hidden = self._run_layers(hidden, packing)[rows]
        # A group's patches are row-major, which is the channel order of InternVL's pixel shuffle.
        merged = self.model.model.multi_modal_projector(hidden.reshape(-1, unit * hidden.shape[-1]))
        return list(torch.split(merged.to(self.dtype), cells))

    def _run_layers(self, hidden: Tensor, packing: SequencePacking) -> Tensor:
        """``hidden [n, D]`` through the tower, to the layer whose features the checkpoint uses."""
        for layer in self._tower_layers:
            hidden = layer(hidden, packing)
        normed: Tensor = self._tower.layernorm(hidden) if self._feature_layer == -1 else hidden
        return normed

    @property
    def _feature_layer(self) -> int:
        return int(self.model.config.vision_feature_layer)

    @cached_property
    def _tower_layers(self) -> list[_TowerLayer]:
        return [_TowerLayer(layer) for layer in self._tower.encoder.layer[: self._depth]]

    @cached_property
    def _depth(self) -> int:
        """Layers to run: feature 0 is the embedding, feature i the output of the i-th layer, -1 the last."""
        layer, layers = self._feature_layer, len(self._tower.encoder.layer)
        return layer if layer >= 0 else layers + 1 + layer

    def _embed_patches(self, patches: Tensor) -> Tensor:
        projection = self._tower.embeddings.patch_embeddings.projection
        pixels = normalise(patches, self.mean, self.std, self.dtype).flatten(1)
        return F.linear(pixels, projection.weight.flatten(1), projection.bias)

    def _raster(self, cells: Tensor) -> Tensor:
        """Group cells ``[g, 2]`` -> raster index on the tile of each of their patches ``[g * merge**2]``."""
        assert self.geometry.square is not None
        row, col = self._patch_positions(cells).unbind(1)
        return row * (self.geometry.square // self.geometry.patch) + col

    # -- the reference ----------------------------------------------------------------------------
    @property
    def _placeholder(self) -> int:
        return int(self.model.config.image_token_id)

    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack([self._picture(frame) for frame in frames])}

    # -- sizes ------------------------------------------------------------------------------------
    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """See the base: linear layers and attention products of kept patches and one class token per frame."""
        counts = [count for count in patch_counts(frames) if count]
        patches = sum(counts)
        embedding, layers, projector, width = self._tower_weights
        pairs = sum((1 + count) ** 2 for count in counts)
        return int(
            2 * patches * embedding
            + 2 * (patches + len(counts)) * layers
            + 2 * patches // self.geometry.merge**2 * projector
            + 4 * width * pairs
        )

    @cached_property
    def _tower_weights(self) -> tuple[int, int, int, int]:
        """Weights of patch embedding, layers and projector; widths of all layers together."""
        embedding = self._tower.embeddings.patch_embeddings.projection.weight.numel()
        layers = sum(linear_weights(layer) for layer in self._tower.encoder.layer[: self._depth])
        width = self._depth * self._tower.config.hidden_size
        return embedding, layers, linear_weights(self.model.model.multi_modal_projector), width


class _TowerLayer:
    """A layer of the tower over its checkpoint's weights; transformers' own passes no packing to its attention."""

    def __init__(self, layer: Any) -> None:
        attention = layer.attention
        self._layer, self._heads, self._scale = layer, int(attention.num_heads), float(attention.scale)
        self._project = joined_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._norms = (attention.q_norm, attention.k_norm) if attention.config.use_qk_norm else None
        self._out = attention.projection_layer

    def __call__(self, hidden: Tensor, packing: SequencePacking) -> Tensor:
        """``hidden [n, D]`` after the layer."""
        layer = self._layer
        query, key, value = self._project(layer.layernorm_before(hidden)).chunk(3, 1)
        if self._norms is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key, value = (part.view(len(hidden), self._heads, -1) for part in (query, key, value))
        attended = self._out(attend(packing, query, key, value, self._scale).flatten(1))
        hidden = torch.addcmul(hidden, layer.lambda_1, attended)
        return torch.addcmul(hidden, layer.lambda_2, layer.mlp(layer.layernorm_after(hidden)))
