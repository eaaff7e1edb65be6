"""``slots``: one launch of flash attention per layer for all rows of all streams, over slot tables (Triton).

Each program computes the neighbouring rows of one stream for one head (FlashAttention-2, arXiv 2307.08691, algorithm
1); it finds keys through the stream's table, so that nothing is copied side by side, and masks by three integers a row,
so that scattered rows cost no more than neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.planner import IntArray, Run

# Rows of a program: questions and explanations have few, and half-empty tiles cost as much as full ones.
ROWS = 64
# Keys of a program's step.
KEYS = 64


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """What the kernel reads beside queries, keys and values; int32 on their device.

    * ``table``: the slots of all streams, one after the other
    * ``blocks [blocks, 6]``: first row, rows, where the stream's table begins, and the slots to visit: ``[0, a)`` and
      ``[b, c)``
    * ``rows [rows, 3]``: ``prefix, tail, stop``: a row sees the slots ``[0, prefix)`` and ``[tail, stop)``
    """

    table: Tensor
    blocks: Tensor
    rows: Tensor


class SlotsKernel(Kernel[SlotTables]):
    """CUDA kernel for fp32, fp16 and bf16; Triton's interpreter runs it on a CPU."""

    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> SlotTables:
        rows = visible_slots([run for runs in streams for run in runs])
        blocks = _blocks(rows, [sum(run.count for run in runs) for runs in streams], [len(table) for table in tables])
        arrays = np.concatenate(tables), blocks, rows
        return SlotTables(*(torch.from_numpy(array.astype(np.int32)).to(like.device) for array in arrays))

    def static_inputs(self, rows: int, slots: int, device: torch.device) -> SlotTables:
        shapes = (slots,), (rows, 6), (rows, 3)
        return SlotTables(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))

    def fill(self, inputs: SlotTables, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]]) -> None:
        given = self.prepare(tables, streams, torch.empty(0))
        inputs.table[: len(given.table)].copy_(given.table)
        inputs.blocks[: len(given.blocks)].copy_(given.blocks)
        # A block without rows and slots computes nothing.
        inputs.blocks[len(given.blocks) :].zero_()
        inputs.rows.copy_(given.rows)

    def attend(self, prepared: SlotTables, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        given = (prepared.table, prepared.blocks, prepared.rows)
        attended: Tensor = _attend(query, key, value, *given, scale)
        return attended


def visible_slots(runs: Sequence[Run]) -> IntArray:
    """``prefix, tail, stop`` of each row ``[n, 3]``; rows that see one stretch have an empty tail."""
    counts = [run.count for run in runs]
    # Of each run: whether it sees one stretch, its two constants, and its last row's stop less its rows.
    of_run = [(run.prefix == run.tail, run.prefix, run.tail, run.stop - run.count) for run in runs]
    joined, prefix, tail, before = np.array(of_run, np.int64).reshape(-1, 4).repeat(counts, axis=0).T
    first = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    stop = before + np.arange(1, len(first) + 1) - first
    return np.stack((np.where(joined, stop, prefix), np.where(joined, 0, tail), np.where(joined, 0, stop)), axis=1)


def _blocks(seen: IntArray, counts: Sequence[int], slots: Sequence[int]) -> IntArray:
    """Blocks of at most ``ROWS`` rows, each of one stream; ``counts`` rows and ``slots`` of each stream."""
    ends = np.cumsum(counts)
    per_stream = -(-np.array(counts) // ROWS)
    stream = np.repeat(np.arange(len(counts)), per_stream)
    if not len(stream):
        return np.zeros((0, 6), np.int64)
    number = np.arange(len(stream)) - (np.cumsum(per_stream) - per_stream)[stream]
    cuts = (ends - counts)[stream] + ROWS * number
    prefix, tail, stop = seen.T
    tails = np.where(stop > 0, tail, np.iinfo(np.int64).max)
    last = np.maximum.reduceat(stop, cuts)
    begin = np.where(last > 0, np.minimum.reduceat(tails, cuts), 0)
    rows = np.minimum(cuts + ROWS, ends[stream]) - cuts
    table = (np.cumsum(slots) - slots)[stream]
    return np.stack((cuts, rows, table, np.maximum.reduceat(prefix, cuts), begin, last), 1)


@torch.library.custom_op("sightline::slot_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, blocks: Tensor, rows: Tensor, scale: float
) -> Tensor:
    # Triton is there where a GPU is; the module is imported with its first launch.
    from cluster.engine.native.kernels.slots_triton import launch

    return launch(query, key, value, table, blocks, rows, scale, rows_per_block=ROWS, keys_per_step=KEYS)


@_attend.register_fake
def _(query: Tensor, *given: Tensor | float) -> Tensor:  # noqa: ARG001
    heads, rows, size = query.shape
    return torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
