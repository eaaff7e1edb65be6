"""Elementwise steps of layers, bound by a GPU's memory: there one kernel each (Triton), on a CPU torch's operations.

On an H200 they and misaligned products were half of a full window's time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# A scale must not be so small that it is rounded to nothing.
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """``x [n, 2 m]``, gates before values -> ``activation(gate) * value`` ``[n, m]``."""
    # transformers has a class of its own.
    if type(activation) in (nn.SiLU, SiLUActivation) and _fused(x):
        result: Tensor = _gated(x)
        return result
    gate, value = x.chunk(2, 1)
    return activation(gate) * value


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [n, h, d]`` by ``cos, sin [n, 1, d]``, the sine's first half negative."""
    if _fused(x):
        result: Tensor = _rotated(x, cos[:, 0], sin[:, 0])
        return result
    # Towers' angles are wider than their activations.
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return torch.addcmul(wide * cos, torch.cat((second, first), -1), sin).to(x.dtype)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [n, k]`` in e4m3, each row divided by its scale ``[n, 1]`` float32: its largest value becomes the type's."""
    if _fused(x):
        quantised, of_row = _float8(x)
        return quantised, of_row
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def _fused(x: Tensor) -> bool:
    return x.device.type != "cpu" and not x.requires_grad and x.stride(-1) == 1


# Triton is there where a GPU is; its module is imported with the first launch.
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
