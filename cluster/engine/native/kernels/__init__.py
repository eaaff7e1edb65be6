"""Attention kernels, one per file; ``kernel_for`` chooses when an engine starts."""

from __future__ import annotations

from typing import Any

import torch

from cluster.engine.native.kernels import cpu_flash as cpu_flash
from cluster.engine.native.kernels import sdpa as sdpa
from cluster.engine.native.kernels import varlen as varlen
from cluster.engine.native.kernels.base import Kernel as Kernel
from cluster.engine.native.kernels.base import kernels as kernels

__all__ = ["Kernel", "kernel_for", "kernels"]


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
    return kernels.get(name)()
