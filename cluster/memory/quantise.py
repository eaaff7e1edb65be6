"""Remembered KV in eight bits: a quarter of float32, half of bfloat16.

Keys of some models have channels that are large and nearly constant (a bias before rotary), which one scale per token
would round away, as KIVI found (Liu et al. 2024, section 3). So channels are centred and scaled by what the first
frames of a head showed, and each token has a scale of its own beside. A block may thus be cut and joined token by
token, and what is written again is rounded no further.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.memory.tiers.base import Block

_STEPS = 127
_SCALE_BYTES = 2
# Least spread of a channel: of the median channel's, and of the values themselves. Few tokens tell little of it.
_LEAST_SPREAD, _LEAST_SHARE = 0.5, 1e-3
# Of float16 with full precision.
_LEAST_SCALE = 2.0**-14


def measure_channels(key: Tensor, value: Tensor) -> Tensor:
    """``key``, ``value`` ``[n, D]``, ``n`` at least 1 -> ``[2, 2, D]`` float32 on the CPU: centre and spread of the
    channels of either, by tokens that are finite: one that is not would make all that come later so."""
    kv = torch.stack([key, value]).float()
    finite = kv.isfinite().all(2).all(0)
    kv = kv[:, finite] if bool(finite.any()) else torch.zeros_like(kv)
    centre = kv.mean(1)
    spread = (kv - centre[:, None]).square().mean(1).sqrt()
    size = kv.square().mean((1, 2)).sqrt()
    least = (_LEAST_SPREAD * spread.median(1).values).maximum(_LEAST_SHARE * size)
    spread = spread.maximum(least[:, None])
    return torch.stack([centre, torch.where(spread > 0, spread, 1.0)], dim=1).cpu()


def quantise(blocks: list[Block], channels: Tensor) -> list[Block]:
    """Blocks of one head with keys and values as int8 ``[n, D + 2]``: steps of each channel, and the token's scale in
    float16. What is not finite makes its whole token so."""
    return _mapped(blocks, channels, _rounded)


def dequantise(blocks: list[Block], channels: Tensor) -> list[Block]:
    """The inverse: keys and values float32 ``[n, D]``, off by half a step."""
    return _mapped(blocks, channels, _restored)


def dequantise_kv(key: Tensor, value: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values int8 ``[n, D + 2]`` of one head -> float32 ``[n, D]``."""
    return _restored(key, *channels[0]), _restored(value, *channels[1])


def _mapped(blocks: list[Block], channels: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Block]:
    """The blocks with keys and values that are changed by their channels' centre and spread, all at once."""
    if not blocks:
        return []
    sizes = [len(block) for block in blocks]
    key = change(torch.cat([block.key for block in blocks]), *channels[0])
    value = change(torch.cat([block.value for block in blocks]), *channels[1])
    parts = zip(blocks, torch.split(key, sizes), torch.split(value, sizes), strict=True)
    return [Block(own_key, own_value, block.frame, block.cell) for block, own_key, own_value in parts]


def _rounded(part: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    wide = (part.float() - centre.to(part.device)) / spread.to(part.device)
    scale = (wide.abs().amax(1, keepdim=True) / _STEPS).clamp(min=_LEAST_SCALE).half()
    steps = (wide / scale.float()).round().clamp(-_STEPS, _STEPS).to(torch.int8)
    return torch.cat([steps, scale.view(torch.int8)], dim=1)


def _restored(packed: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    scale = packed[:, -_SCALE_BYTES:].contiguous().view(torch.float16).float()
    return packed[:, :-_SCALE_BYTES] * scale * spread.to(packed.device) + centre.to(packed.device)
