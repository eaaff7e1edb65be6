"""LLaVA-NeXT-Video: 24x24 patches of a CLIP tower, averaged over 2x2 patches, in a plain Vicuna sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

from cluster.errors import ModelError
from cluster.models.base import PatchBatch
from cluster.models.checkpoint import CLIP_MEAN, CLIP_STD, Checkpoint
from cluster.models.llava import Llava
from cluster.types import PatchGeometry


class LlavaNextVideo(Llava):
    """``LlavaNextVideoForConditionalGeneration`` with a pruned tower (LLaVA-NeXT: A Strong Zero-shot Video
    Understanding Model, 2024)."""

    family = "llava_next_video"
    library = (LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration)
    special_tokens, end_token = ("<unk>", "</s>", "<s>", "<image>", "<video>"), "</s>"
    prompt_tokens = ("<s>", "</s>", "<video>")
    chat_system, chat_user, chat_answer, chat_follow_up = "<s>", "USER: ", " ASSISTANT:", "</s>USER: "
    video_brackets = ("", "\n")
    pixel_mean, pixel_std = CLIP_MEAN, CLIP_STD

    def _geometry(self, checkpoint: Checkpoint) -> PatchGeometry:
        config, vision = checkpoint.model.config, checkpoint.model.config.vision_config
        if (config.spatial_pool_mode, config.spatial_pool_stride) != ("average", 2):
            raise ModelError(
                f"only spatial_pool_mode 'average' with a stride of 2 is supported, not {config.spatial_pool_mode!r} "
                f"with {config.spatial_pool_stride}"
            )
        if vision.image_size % (2 * vision.patch_size):
            raise ModelError(f"image_size {vision.image_size} is not a multiple of two patches of {vision.patch_size}")
        return super()._geometry(checkpoint)

    def system_ids(self) -> list[int]:
        # Tokenised separately: Llama's tokenizers put a space before a text's first word, but not after ``<s>``.
        return [*self._ids(self.chat_system), *self._ids(self.chat_user)]

    def _ids(self, text: str) -> list[int]:
        # Questions, which begin with a new line, follow frames, and some of these tokenizers put no space there.
        return super()._ids(f"<video>{text}")[1:] if text.startswith("\n") else super()._ids(text)

    def _encode_kept(self, frames: Sequence[PatchBatch]) -> list[Tensor]:
        """See the base. Each frame is a class token and its kept patches, with the position embeddings of their cells;
        a group's four patches are averaged."""
        raster = self._raster(torch.cat([frame.cells for frame in frames]))
        counts = [len(frame.patches) for frame in frames]
        features = self._tower_features(self._upload(frames), raster, counts)
        pooled = features.view(-1, 4, features.shape[-1]).mean(1)
        visual = self.model.model.multi_modal_projector(pooled)
        return list(torch.split(visual.to(self.dtype), [len(frame.cells) for frame in frames]))
