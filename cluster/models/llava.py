"""LLaVA's video families: square CLIP or SigLIP tower with absolute positions, pooled to a quarter of its patches."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cluster.errors import ModelError
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import Checkpoint
from cluster.models.packed_attention import PACKED, SequencePacking, prepend_token
from cluster.models.sequential import SequentialFrames
from cluster.models.upload import to_device
from cluster.types import PatchGeometry


class Llava(SequentialFrames):
    """A transformers CLIP or SigLIP tower, two linear layers, and a language model with one-axis positions."""

    placeholders: ClassVar[Mapping[str, str]] = {"image_token_index": "<image>", "video_token_index": "<video>"}

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._tower.config._attn_implementation = PACKED
        self._encoder_layers = self._tower.encoder.layers
        self._patch_projection = self._tower.embeddings.patch_embedding
        self._class_tokens = int(hasattr(self._tower.embeddings, "class_embedding"))
        self._placeholder = int(self.model.config.video_token_index)

    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        config, vision = checkpoint.model.config, checkpoint.model.config.vision_config
        has_class = hasattr(checkpoint.model.model.vision_tower.embeddings, "class_embedding")
        strategy = "default" if has_class else "full"
        if config.vision_feature_select_strategy != strategy or not isinstance(config.vision_feature_layer, int):
            raise ModelError(
                f"only vision_feature_select_strategy {strategy!r} and a single vision_feature_layer are supported "
                "with this tower; correct the checkpoint's config.json"
            )
        side = vision.image_size // vision.patch_size
        return PatchGeometry(patch=vision.patch_size, merge=2, temporal=1, square=side * vision.patch_size)

    # -- vision -----------------------------------------------------------------------------------
    def _tower_features(self, patches: Tensor, raster: Tensor, counts: Sequence[int]) -> Tensor:
        """Features ``[n, D]`` of packed patches on the device; ``raster``: their indices in the tile; ``counts``:
        patches per frame."""
        embeddings, extra = self._tower.embeddings, self._class_tokens
        table = embeddings.position_embedding.weight
        hidden = self._embed_patches(patches)
        hidden, rows = hidden + table[to_device(raster, self.device) + extra], None
        if extra:
            hidden, rows = prepend_token(hidden, embeddings.class_embedding + table[0], counts)
            hidden = self._tower.pre_layrnorm(hidden)
        packing = SequencePacking.of([count + extra for count in counts], self.device, self.dtype)
        hidden = hidden[None]
        for layer in self._encoder_layers[: self._depth]:
            # SigLIP layers pass only the mask on to their attention.
            hidden = layer(hidden, packing)
        features: Tensor = hidden[0] if rows is None else hidden[0, rows]
        return features

    # -- the reference ----------------------------------------------------------------------------
    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        return {"pixel_values_videos": torch.stack([self._picture(frame) for frame in frames])[None]}
