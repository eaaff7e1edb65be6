"""Rotary position embedding applied to packed tokens, half-split layout (Su et al. 2021, as in Llama and Qwen)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or raw keys ``x [n, h, d]`` by ``cos, sin [n, d]`` -> ``[n, h, d]`` in ``x``'s dtype.

    The same arithmetic as transformers' ``apply_rotary_pos_emb``: in fp32 the two agree to the last bit.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    return x * cos + swapped * sin
