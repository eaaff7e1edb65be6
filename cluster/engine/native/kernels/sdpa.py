"""``sdpa``: torch's scaled_dot_product_attention with a mask per block. Any device and dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.kernels import Kernel, gathered, grouped, shared
from cluster.engine.native.kernels.blocks import CALL_COST, Block, make_blocks
from cluster.engine.window.planner import IntArray, Run

# Rows of one call: bounds the mask of a whole window computed at once (10,000 slots) to a few tens of MB.
ROWS = 1024


# Per stream its table and blocks.
Prepared = list[tuple[Tensor, list[Block]]]


class SDPAKernel(Kernel[Prepared]):
    """Exact, public API only. The mask covers a block's whole span, so masked pairs are computed too."""

    def __init__(self, call_cost: int = CALL_COST) -> None:
        self.call_cost = call_cost

    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> Prepared:
        split = [[piece for run in runs for piece in _pieces(run)] for runs in streams]
        return [
            (
                torch.from_numpy(table).to(like.device),
                [block.to(like.device) for block in make_blocks(runs, self.call_cost)],
            )
            for table, runs in zip(tables, split, strict=True)
        ]

    def attend(self, prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, rows, size = query.shape
        kv_heads = key.shape[1]
        q, group = grouped(query, kv_heads), heads // kv_heads
        out = query.new_empty(rows, heads, size)
        target = out.view(rows, kv_heads, group, size)
        for table, blocks in prepared:
            k, v = (gathered(part, table) for part in (key, value))
            for block in blocks:
                attended = F.scaled_dot_product_attention(
                    q[:, :, block.row : block.stop_row],
                    shared(k[:, : block.stop], group),
                    shared(v[:, : block.stop], group),
                    attn_mask=_mask(block, query.device),
                    scale=scale,
                )
                target[block.row : block.stop_row] = attended.permute(2, 0, 1, 3)
        return out


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
