"""Merging runs into blocks, for kernels whose cost is per call rather than per masked slot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.native.kernels import Kernel, gathered, grouped, shared
from cluster.engine.window.planner import Run

# Masked pairs of row and slot that cost as much as one more call: about 100 µs of both at 8 heads of 64.
CALL_COST = 5000


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``[row, stop_row)`` attend to the slots ``[0, prefix)``, and in ``[tail, stop)`` to those marked
    ``visible``.

    ``visible [rows, stop - tail]`` bool, or a mask that a kernel makes of it; ``None``: the tail is square and plainly
    causal.
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


# Per stream its table and blocks.
Prepared = list[tuple[Tensor, list[Block]]]


class BlockKernel(Kernel[Prepared]):
    """A kernel with a call per block."""

    def __init__(self, call_cost: int = CALL_COST) -> None:
        self.call_cost = call_cost

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
    def _attend_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [Hkv, G, rows, d]`` of a block, ``key, value [Hkv, G, slots, d]`` of its stream -> like ``query``."""


def make_blocks(runs: Sequence[Run], call_cost: int = CALL_COST) -> list[Block]:
    """Merge neighbouring runs while the extra masked slots cost less than another call.

    Tokens scattered over a window (a random or top-k refresh) give hundreds of runs of one token. With ``n`` rows,
    ``g`` slots apart, a block masks ``n² g / 2`` pairs; stopping where that equals the cost ``c`` of a call gives
    ``n = sqrt(2 c / g)``, which is also where the total, ``c / n + n g / 2`` per row, is least.
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
