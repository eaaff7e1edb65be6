"""InternVL3: one square tile per frame, absolute tower positions, pixel shuffle, one-axis rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import InternVLConfig, InternVLForConditionalGeneration

from cluster.errors import ModelError
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import IMAGENET_MEAN, IMAGENET_STD, Checkpoint
from cluster.models.layers import joined_linear
from cluster.models.packed_attention import SequencePacking, attend, prepend_token
from cluster.models.sequential import SequentialFrames
from cluster.models.upload import to_device
from cluster.types import PatchGeometry


class InternVL(SequentialFrames):
    """``InternVLForConditionalGeneration`` with a pruned tower (InternVL3 report, section 2.1)."""

    family = "internvl"
    library = (InternVLConfig, InternVLForConditionalGeneration)
    special_tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
    placeholders: ClassVar[Mapping[str, str]] = {"image_token_id": "<IMG_CONTEXT>"}
    prompt_tokens = ("<|im_start|>", "<|im_end|>", "<img>", "</img>")
    # The family's own template writes "Frame7: <img>...". The number would change when the window slides and
    # invalidate the frame's KV, so only the order tells frames apart.
    frame_brackets = ("<img>", "</img>\n")
    pixel_mean, pixel_std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._encoder_layers = self._tower.encoder.layer
        self._patch_projection = self._tower.embeddings.patch_embeddings.projection
        self._class_tokens, self._placeholder = 1, int(self.model.config.image_token_id)

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

    # -- vision -----------------------------------------------------------------------------------
    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. Each frame is a class token and its kept patches, with the position embeddings of their cells;
        linear layers run over all frames at once."""
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

        for layer in self._tower_layers:
            hidden = layer(hidden, packing)
        # Only the last layer's features are normalised.
        hidden = (self._tower.layernorm(hidden) if self.model.config.vision_feature_layer == -1 else hidden)[rows]
        # Patches of a group are row-major, the channel order of InternVL's pixel shuffle.
        merged = self.model.model.multi_modal_projector(hidden.reshape(-1, unit * hidden.shape[-1]))
        return list(torch.split(merged.to(self.dtype), cells))

    @cached_property
    def _tower_layers(self) -> list[_TowerLayer]:
        return [_TowerLayer(layer) for layer in self._encoder_layers[: self._depth]]

    # -- the reference ----------------------------------------------------------------------------
    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack([self._picture(frame) for frame in frames])}


class _TowerLayer:
    """A tower layer over the checkpoint's weights; transformers' own layer passes no packing to its attention."""

    def __init__(self, layer: Any) -> None:
        attention = layer.attention
        self._layer, self._heads, self._scale = layer, int(attention.num_heads), float(attention.scale)
        self._project = joined_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._norms = (attention.q_norm, attention.k_norm) if attention.config.use_qk_norm else None
        self._out = attention.projection_layer

    def __call__(self, hidden: Tensor, packing: SequencePacking) -> Tensor:
        layer = self._layer
        query, key, value = self._project(layer.layernorm_before(hidden)).chunk(3, 1)
        if self._norms is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key, value = (part.view(len(hidden), self._heads, -1) for part in (query, key, value))
        attended = self._out(attend(packing, query, key, value, self._scale).flatten(1))
        hidden = torch.addcmul(hidden, layer.lambda_1, attended)
        return torch.addcmul(hidden, layer.lambda_2, layer.mlp(layer.layernorm_after(hidden)))
