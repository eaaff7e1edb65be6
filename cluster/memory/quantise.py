"""8-bit quantisation of stored KV: a quarter of float32, half of bfloat16.

Keys of some models have large, nearly constant channels (a bias before rotary). A single scale per token would round
the other channels away, as KIVI found (Liu et al. 2024, section 3). So channels are centred and scaled by statistics of
a head's first frames, and each token then has its own scale. Blocks can thus be split and joined token by token, and
rewriting them adds no rounding error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.memory.tiers.base import Block

_STEPS = 127
_SCALE_BYTES = 2
# Minimum spread of a channel relative to the median channel's, and to the RMS value: few tokens estimate it poorly.
_LEAST_SPREAD, _LEAST_SHARE = 0.5, 1e-3
# Smallest normal float16.
_LEAST_SCALE = 2.0**-14


def measure_channels(key: Tensor, value: Tensor) -> Tensor:
    """Centre and spread of the channels of ``key`` and ``value`` ``[n, D]``, ``n`` at least 1: ``[2, 2, D]`` float32 on
    the CPU. Only finite tokens count: any other would make all later ones non-finite."""
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
    """Blocks of one head with keys and values as int8 ``[n, D + 2]``: the quantised channels, then the token's float16
    scale. A non-finite value makes its whole token non-finite."""
    return _mapped(blocks, channels, _rounded)


def dequantise(blocks: list[Block], channels: Tensor) -> list[Block]:
    """Inverse of :func:`quantise`: keys and values float32 ``[n, D]``, off by at most half a step."""
    return _mapped(blocks, channels, _restored)


def dequantise_kv(key: Tensor, value: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantise keys and values of one head, int8 ``[n, D + 2]`` -> float32 ``[n, D]``."""
    return _restored(key, *channels[0]), _restored(value, *channels[1])


def _mapped(blocks: list[Block], channels: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Block]:
    """Apply ``change`` to all blocks' keys and values, each with its channels' centre and spread, in one batch."""
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
