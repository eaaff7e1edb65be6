"""Pixels as a checkpoint wants them: rescaled and normalised in one affine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalise(patches: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """``patches [n, T, C, p, p]`` uint8 -> ``(x / 255 - mean) / std`` of the same shape in ``dtype``."""
    shape = (1, 1, -1, 1, 1)
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=patches.device).view(shape)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=patches.device).view(shape)
    return torch.addcmul(shift, patches.to(torch.float32), scale).to(dtype)
