"""Attention kernels, one per file; ``kernel_for`` chooses when an engine starts."""

from __future__ import annotations

from typing import Any

import torch

from cluster.engine.native.kernels.base import Kernel
from cluster.registry import kernels

__all__ = ["Kernel", "kernel_for"]


def kernel_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> Kernel[Any]:
    """The kernel called ``name``, or the fastest one for this device and dtype.

    Raises:
        ConfigError: no kernel has that name.
    """
    if name is None:
        if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
            name = "varlen"
        elif device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            name = "cpu_flash"
        else:
            name = "sdpa"
    kernel: Kernel[Any] = kernels.get(name)()
    return kernel
