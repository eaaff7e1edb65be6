"""Memory-bound elementwise steps of layers: one Triton kernel each on a GPU, torch's operations on a CPU.

On an H200, these steps and misaligned products used to take half of a full window's time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# Minimum of a row's largest value, so that its scale is not rounded to zero.
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """``x [n, 2 m]``, gates first, then values -> ``activation(gate) * value`` ``[n, m]``."""
    # transformers has its own SiLU class.
    if type(activation) in (nn.SiLU, SiLUActivation) and _fused(x):
        result: Tensor = _gated(x)
        return result
    gate, value = x.chunk(2, 1)
    return activation(gate) * value


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [n, h, d]`` by ``cos, sin [n, 1, d]``, with the first half of sin negated."""
    if _fused(x):
        result: Tensor = _rotated(x, cos[:, 0], sin[:, 0])
        return result
    # Towers compute angles in a wider dtype than activations.
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return torch.addcmul(wide * cos, torch.cat((second, first), -1), sin).to(x.dtype)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [n, k]`` in e4m3, and the scale ``[n, 1]`` float32 of each row, which maps its largest value to e4m3's."""
    if _fused(x):
        quantised, of_row = _float8(x)
        return quantised, of_row
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def _fused(x: Tensor) -> bool:
    return x.device.type != "cpu" and not x.requires_grad and x.stride(-1) == 1


# The Triton module is imported on first launch, because Triton may be missing on machines without a GPU.
@torch.library.custom_op("sightline::gated", mutates_args=())
def _gated(x: Tensor) -> Tensor:
    from cluster.models.fused_triton import launch_gated

    return launch_gated(x)


@_gated.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)


@torch.library.custom_op("sightline::float8", mutates_args=())
def _float8(x: Tensor) -> tuple[Tensor, Tensor]:
    from cluster.models.fused_triton import launch_float8

    return launch_float8(x, FLOAT8, SMALLEST, LARGEST)


@_float8.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=FLOAT8, device=x.device), scale


@torch.library.custom_op("sightline::rotated", mutates_args=())
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from cluster.models.fused_triton import launch_rotated

    return launch_rotated(x, cos, sin)


@_rotated.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
