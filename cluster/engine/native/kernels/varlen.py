"""``varlen``: variable-length flash attention on CUDA, one sequence per run (``torch.nn.attention.varlen``).

A run's keys are packed as a sequence of their own: its prefix and its tail, side by side. Bottom-right aligned
causality over that sequence is exactly what a run means. The window's keys are copied once per run; packs of bounded
size keep a refresh that scatters into hundreds of runs from multiplying them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.planner import Run

# Keys of one call: 256k x 2 KB (K and V of a 7B model's layer) = 0.5 GB.
PACK_KEYS = 1 << 18


# The signature of ``varlen_attn``; a reference implementation of it runs anywhere.
Varlen = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Pack:
    """Neighbouring runs that go into one call.

    * ``spans``: ``(stream, start, stop)`` of slots, in packed order
    * ``cu_q, cu_k [runs + 1]`` int32: where each run's rows and keys begin
    """

    row: int
    stop_row: int
    spans: tuple[tuple[int, int, int], ...]
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def make_packs(streams: Sequence[Sequence[Run]], device: torch.device, limit: int = PACK_KEYS) -> list[Pack]:
    """Pack the runs of all streams, in row order, at most ``limit`` keys per pack (at least one run each)."""
    packs: list[Pack] = []
    group: list[tuple[int, Run]] = []
    keys = 0
    for stream, runs in enumerate(streams):
        for run in runs:
            span = run.prefix + run.stop - run.tail
            if group and keys + span > limit:
                packs.append(_pack(group, device))
                group, keys = [], 0
            group.append((stream, run))
            keys += span
    if group:
        packs.append(_pack(group, device))
    return packs


def _pack(group: Sequence[tuple[int, Run]], device: torch.device) -> Pack:
    spans: list[tuple[int, int, int]] = []
    rows, keys = [0], [0]
    for stream, run in group:
        if run.prefix == run.tail:
            spans.append((stream, 0, run.stop))
        else:
            spans += [(stream, 0, run.prefix), (stream, run.tail, run.stop)]
        rows.append(rows[-1] + run.count)
        keys.append(keys[-1] + run.prefix + run.stop - run.tail)
    return Pack(
        row=group[0][1].row,
        stop_row=group[-1][1].row + group[-1][1].count,
        spans=tuple(spans),
        cu_q=torch.tensor(rows, dtype=torch.int32, device=device),
        cu_k=torch.tensor(keys, dtype=torch.int32, device=device),
        max_q=max(run.count for _, run in group),
        max_k=max(run.prefix + run.stop - run.tail for _, run in group),
    )


class VarlenKernel(Kernel[list[Pack]]):
    """CUDA kernel for fp16 and bf16."""

    def __init__(self, attention: Varlen = cast(Varlen, varlen_attn), limit: int = PACK_KEYS) -> None:
        self.attention = attention
        self.limit = limit

    def prepare(self, streams: Sequence[Sequence[Run]], like: Tensor) -> list[Pack]:
        return make_packs(streams, like.device, self.limit)

    def attend(
        self, prepared: list[Pack], query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
    ) -> Tensor:
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        rows = query.transpose(0, 1)
        for pack in prepared:
            out[pack.row : pack.stop_row] = self.attention(
                rows[pack.row : pack.stop_row],
                _packed(keys, pack),
                _packed(values, pack),
                pack.cu_q,
                pack.cu_k,
                pack.max_q,
                pack.max_k,
                scale=scale,
                window_size=(-1, 0),
                enable_gqa=True,
            )
        return out


def _packed(tensors: Sequence[Tensor], pack: Pack) -> Tensor:
    """``[Hkv, slots, d]`` per stream -> ``[keys, Hkv, d]``."""
    return torch.cat([tensors[stream][:, start:stop] for stream, start, stop in pack.spans], dim=1).transpose(0, 1)
