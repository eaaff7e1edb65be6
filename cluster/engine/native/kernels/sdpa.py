"""``sdpa``: torch's scaled_dot_product_attention with a mask per block. Any device and dtype."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.kernels.blocks import Block, BlockKernel, Prepared, make_blocks
from cluster.engine.window.planner import IntArray, Run

# Rows of one call: bounds the mask of a whole window computed at once (10,000 slots) to a few tens of MB.
ROWS = 1024


class SDPAKernel(BlockKernel):
    """Exact, public API only. The mask covers a block's whole span, so masked pairs are computed too."""

    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> Prepared:
        split = [[piece for run in runs for piece in _pieces(run)] for runs in streams]
        return [
            (
                torch.from_numpy(table).to(like.device),
                [_on(block, like.device) for block in make_blocks(runs, self.call_cost)],
            )
            for table, runs in zip(tables, split, strict=True)
        ]

    def _attend_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key[:, :, : block.stop],
            value[:, :, : block.stop],
            attn_mask=_mask(block, query.device),
            scale=scale,
        )


def _on(block: Block, device: torch.device) -> Block:
    """The block with its mask on ``device``."""
    return block if block.visible is None else replace(block, visible=block.visible.to(device))


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
