"""Kernels that merge runs into blocks and make one call per block, because calls cost more than masked slots.

* ``cpu_flash``: torch's CPU flash attention over prefix and causal tail separately, combined by log-sum-exp. Only the
  tail of a run is causal. Attending to the unmasked prefix and the square causal tail separately needs no mask in
  memory (400 MB for a full window), skips the masked half, and was 10-12 % faster than one masked call (600 rows over
  2,900 slots, one core).
* ``sdpa``: torch's scaled_dot_product_attention with a mask per block. Any device and dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.kernels import Kernel, gathered, grouped, shared
from cluster.engine.window.planner import IntArray, Run

# Masked pairs of row and slot that cost as much as another call: about 100 µs at 8 heads of 64.
CALL_COST = 5000
# Maximum rows per call of ``sdpa``: bounds the mask to a few tens of MB for a window of 10,000 slots.
ROWS = 1024

# Used by scaled_dot_product_attention on CPUs; called directly because it also returns the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``[row, stop_row)``, which attend to the slots ``[0, prefix)`` and to the ``visible`` ones of
    ``[tail, stop)``.

    ``visible [rows, stop - tail]``: bool, or the mask a kernel derives from it; ``None``: a square causal tail.
    """

    row: int
    stop_row: int
    prefix: int
    tail: int
    stop: int
    visible: Tensor | None

    @property
    def rows(self) -> int:
        return self.stop_row - self.row


# Per stream: its table and its blocks.
Prepared = list[tuple[Tensor, list[Block]]]


class BlockKernel(Kernel[Prepared]):
    """A kernel that makes one call per block."""

    def __init__(self, call_cost: int = CALL_COST) -> None:
        self.call_cost = call_cost

    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> Prepared:
        return [
            (torch.from_numpy(table).to(like.device), self._blocks(runs, like))
            for table, runs in zip(tables, streams, strict=True)
        ]

    def attend(self, prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, rows, size = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        q = grouped(query, kv_heads)
        out = query.new_empty(rows, heads, size)
        target = out.view(rows, kv_heads, group, size)
        for table, blocks in prepared:
            k, v = (shared(gathered(part, table), group) for part in (key, value))
            for block in blocks:
                attended = self._attend_block(block, q[:, :, block.row : block.stop_row], k, v, scale)
                target[block.row : block.stop_row] = attended.permute(2, 0, 1, 3)
        return out

    @abstractmethod
    def _blocks(self, runs: Sequence[Run], like: Tensor) -> list[Block]:
        """Merge a stream's runs into blocks, with masks as :meth:`_attend_block` expects them."""

    @abstractmethod
    def _attend_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [Hkv, G, rows, d]`` of a block, ``key, value [Hkv, G, slots, d]`` of its stream -> shape of
        ``query``."""


class CPUFlashKernel(BlockKernel):
    """CPU kernel for fp32 and bf16."""

    def _blocks(self, runs: Sequence[Run], like: Tensor) -> list[Block]:
        blocks = make_blocks(runs, self.call_cost)
        zero, least = like.new_zeros(()), like.new_tensor(float("-inf"))
        return [b if b.visible is None else replace(b, visible=torch.where(b.visible, zero, least)) for b in blocks]

    def _attend_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        tail, mask = slice(block.tail, block.stop), block.visible
        attended: Tensor
        attended, lse = _flash(
            query, key[:, :, tail], value[:, :, tail], 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if block.prefix:
            before = slice(0, block.prefix)
            seen, seen_lse = _flash(query, key[:, :, before], value[:, :, before], 0.0, False, scale=scale)
            # softmax over both = each one's softmax, weighted by its share of the total mass
            share = torch.sigmoid(lse - seen_lse).unsqueeze(-1).to(seen.dtype)
            attended = torch.lerp(seen, attended, share)
        return attended


class SDPAKernel(BlockKernel):
    """Kernel on public API only. The mask covers a block's whole span, so masked pairs are computed as well."""

    def _blocks(self, runs: Sequence[Run], like: Tensor) -> list[Block]:
        blocks = make_blocks([piece for run in runs for piece in _pieces(run)], self.call_cost)
        return [b if b.visible is None else replace(b, visible=b.visible.to(like.device)) for b in blocks]

    def _attend_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = key[:, :, : block.stop], value[:, :, : block.stop]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=_mask(block, query.device), scale=scale)


def make_blocks(runs: Sequence[Run], call_cost: int = CALL_COST) -> list[Block]:
    """Merge neighbouring runs while the extra masked slots cost less than another call.

    Tokens scattered over a window (by a random or top-k refresh) form hundreds of runs of one token. With ``n`` rows
    that are ``g`` slots apart, a block masks ``n² g / 2`` pairs; stopping when that equals the cost ``c`` of a call
    gives ``n = sqrt(2 c / g)``, which also minimises the total per row, ``c / n + n g / 2``.
    """
    blocks: list[Block] = []
    group: list[Run] = []
    rows = wasted = stop = 0
    for run in runs:
        more = rows * max(0, run.stop - stop)
        if group and wasted + more > call_cost:
            blocks.append(_block(group))
            group, rows, wasted, stop = [], 0, 0, 0
            more = 0
        group.append(run)
        wasted += more
        rows += run.count
        stop = max(stop, run.stop)
    if group:
        blocks.append(_block(group))
    return blocks


def _block(runs: Sequence[Run]) -> Block:
    prefix = min(run.prefix for run in runs)
    tail = min(prefix if run.prefix > prefix else run.tail for run in runs)
    stop = max(run.stop for run in runs)
    row, stop_row = runs[0].row, runs[-1].row + runs[-1].count
    if len(runs) == 1 and stop - tail == stop_row - row:
        return Block(row, stop_row, prefix, tail, stop, None)
    slots = torch.arange(tail, stop)
    visible = torch.zeros(stop_row - row, stop - tail, dtype=torch.bool)
    for run in runs:
        last = torch.arange(run.stop - run.count, run.stop)[:, None]
        rows = slice(run.row - row, run.row - row + run.count)
        visible[rows] = (slots < run.prefix) | ((slots >= run.tail) & (slots <= last))
    return Block(row, stop_row, prefix, tail, stop, visible)


def _pieces(run: Run) -> list[Run]:
    """Split a long run into runs of at most ``ROWS`` rows."""
    return [
        Run(run.row + first, count, run.prefix, run.tail, run.stop - run.count + first + count)
        for first in range(0, run.count, ROWS)
        for count in [min(ROWS, run.count - first)]
    ]


def _mask(block: Block, device: torch.device) -> Tensor:
    mask = torch.zeros(block.rows, block.stop, dtype=torch.bool, device=device)
    mask[:, : block.prefix] = True
    if block.visible is None:
        mask[:, block.tail :] = torch.ones(block.rows, block.rows, dtype=torch.bool, device=device).tril()
    else:
        mask[:, block.tail :] = block.visible
    return mask
