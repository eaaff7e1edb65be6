"""Attention kernels over runs; ``choose_kernel`` selects one at engine start."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cluster.engine.window.planner import IntArray, Run
from cluster.registry import kernels

Prepared = TypeVar("Prepared")


class Kernel(ABC, Generic[Prepared]):
    """Grouped-query attention of packed rows over the slots of several streams."""

    @abstractmethod
    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> Prepared:
        """Precompute masks and indices for all layers and heads.

        ``tables[i]``: pool slots of stream ``i``, indexed by its runs; ``streams[i]``: its runs in row order, with rows
        counted over all streams. ``like``: a tensor with the device and dtype of queries and keys.
        """

    @abstractmethod
    def attend(self, prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [H, n, d]`` and one layer of the pool, ``key, value [slots, Hkv, d]``, rotated -> ``[n, H, d]``."""

    def warm_up(self, heads: int, layer: Tensor) -> None:
        """Do work that would otherwise delay the first windows. ``layer [slots, Hkv, d]``: the pool's keys; ``heads``:
        query heads."""

    def static_inputs(self, rows: int, slots: int, device: torch.device) -> Prepared | None:  # noqa: ARG002
        """Buffers at fixed addresses for :meth:`attend` over ``rows`` rows and at most ``slots`` slots, so that it can
        be captured in a CUDA graph; ``None``: not capturable, as its launches depend on data."""
        return None

    def fill(self, inputs: Prepared, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]]) -> None:
        """Write what :meth:`prepare` computes into ``inputs``, for as many rows as they were made for."""
        raise NotImplementedError


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """``[H, n, d]`` -> ``[Hkv, H / Hkv, n, d]``: query heads grouped by key head."""
    heads, rows, size = query.shape
    return query.view(kv_heads, heads // kv_heads, rows, size)


def gathered(tensor: Tensor, table: Tensor) -> Tensor:
    """Slots ``table [n]`` of ``[slots, Hkv, d]`` -> ``[Hkv, n, d]``, a copy."""
    return tensor.index_select(0, table).transpose(0, 1)


def shared(tensor: Tensor, group: int) -> Tensor:
    """``[Hkv, s, d]`` -> ``[Hkv, group, s, d]`` without a copy."""
    return tensor.unsqueeze(1).expand(-1, group, -1, -1)


def choose_kernel(device: torch.device, dtype: torch.dtype, name: str | None = None) -> Kernel[Any]:
    """The kernel called ``name``, or the fastest for this device and dtype. Raises ``ConfigError``: unknown name."""
    if name is None:
        if device.type == "cuda":
            name = "slots"
        elif device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            name = "cpu_flash"
        else:
            name = "sdpa"
    kernel: Kernel[Any] = kernels.get(name)()
    return kernel
