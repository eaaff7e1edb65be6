"""LLaVA's video families: a square CLIP or SigLIP tower of absolute positions, pooled to a quarter of its patches."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import ModelError
from cluster.models.base import PatchBatch, patch_counts
from cluster.models.checkpoint import VOCABULARY, Checkpoint, linear_weights, normalise, preset_tokenizer
from cluster.models.packed_attention import PACKED, SequencePacking, prepend_token
from cluster.models.sequential import SequentialFrames
from cluster.models.upload import to_device
from cluster.types import PatchGeometry


class Llava(SequentialFrames):
    """A tower of transformers' CLIP or SigLIP, two linear layers, and a language model with one-axis positions."""

    # transformers' configuration and model, and the tokens of a preset: padding, end, and the others.
    library: ClassVar[tuple[Any, Any]]
    special_tokens: ClassVar[tuple[str, ...]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._tower: Any = self.model.model.vision_tower
        self._tower.config._attn_implementation = PACKED

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

    @classmethod
    def untrained(cls, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any]:
        pad, eos, *_ = cls.special_tokens
        tokenizer = preset_tokenizer(cls.special_tokens, eos=eos, pad=pad)
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in cls.special_tokens}
        common = {"pad_token_id": ids[pad], "bos_token_id": ids[pad], "eos_token_id": ids[eos]}
        make_config, make_model = cls.library
        config = make_config(
            text_config={"vocab_size": VOCABULARY, **common, **text},
            vision_config=vision,
            image_token_index=ids["<image>"],
            video_token_index=ids["<video>"],
            tie_word_embeddings=True,
        )
        return make_model(config), tokenizer

    # -- vision -----------------------------------------------------------------------------------
    def _tower_features(self, patches: Tensor, raster: Tensor, counts: Sequence[int]) -> Tensor:
        """Features ``[n, D]`` of packed patches at these places of the tile, of frames with these patch counts."""
        embeddings = self._tower.embeddings
        projection, table = embeddings.patch_embedding, embeddings.position_embedding.weight
        pixels = normalise(to_device(patches, self.device), self.mean, self.std, self.dtype).flatten(1)
        hidden = F.linear(pixels, projection.weight.flatten(1), projection.bias)
        extra = self._class_tokens
        hidden, rows = hidden + table[to_device(raster, self.device) + extra], None
        if extra:
            hidden, rows = prepend_token(hidden, embeddings.class_embedding + table[0], counts)
            hidden = self._tower.pre_layrnorm(hidden)
        packing = SequencePacking.of([count + extra for count in counts], self.device, self.dtype)
        hidden = hidden[None]
        for layer in self._tower.encoder.layers[: self._depth]:
            # SigLIP's attention hands on no argument but the mask.
            hidden = layer(hidden, packing)
        features: Tensor = hidden[0] if rows is None else hidden[0, rows]
        return features

    @property
    def _class_tokens(self) -> int:
        return int(hasattr(self._tower.embeddings, "class_embedding"))

    @property
    def _depth(self) -> int:
        """Layers to run: feature 0 is the embedding, feature i the output of the i-th layer, -1 the last."""
        layer, layers = int(self.model.config.vision_feature_layer), len(self._tower.encoder.layers)
        return layer if layer >= 0 else layers + 1 + layer

    # -- the reference ----------------------------------------------------------------------------
    @property
    def _placeholder(self) -> int:
        return int(self.model.config.video_token_index)

    def _pixels(self, frames: Sequence[PatchBatch]) -> dict[str, Tensor]:
        return {"pixel_values_videos": torch.stack([self._picture(frame) for frame in frames])[None]}

    # -- sizes ------------------------------------------------------------------------------------
    @abstractmethod
    def _projected(self, patches: int) -> int:
        """Rows that the two linear layers behind the tower see, of this many patches."""

    def tower_flops(self, frames: Sequence[PatchBatch | int]) -> int:
        """See the base: linear layers and attention products of kept patches and any class token per frame."""
        counts = [count for count in self._tower_patches(frames) if count]
        patches, extra = sum(counts), self._class_tokens
        layers = self._tower.encoder.layers[: self._depth]
        return int(
            2 * patches * self._tower.embeddings.patch_embedding.weight.numel()
            + 2 * (patches + extra * len(counts)) * sum(linear_weights(layer) for layer in layers)
            + 2 * self._projected(patches) * linear_weights(self.model.model.multi_modal_projector)
            + 4 * self._tower.config.hidden_size * len(layers) * sum((extra + count) ** 2 for count in counts)
        )

    def _tower_patches(self, frames: Sequence[PatchBatch | int]) -> list[int]:
        """Patches of each frame that go through the tower."""
        return patch_counts(frames)
