"""``slots``: flash attention over slot tables, one launch per layer for all rows of all streams (Triton).

Each program computes consecutive rows of one stream for one head (FlashAttention-2, arXiv 2307.08691, algorithm 1). It
reads keys through the stream's table, so KV is never gathered, and masks by three integers per row, so scattered rows
cost no more than consecutive ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.planner import IntArray, Run
from cluster.models.upload import fill, to_device

# Rows per program; the first that holds every stream's rows is used: for decoding, for float32 and short windows, for
# all others. On an H200, programs of 128 rows reach 354 TFLOP/s in bfloat16, programs of 64 rows 331.
TILES = (16, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """Kernel inputs besides queries, keys and values; int32 on their device.

    * ``table``: slots of all streams, concatenated
    * ``blocks [blocks, 7]``: first row, rows, offset of the stream's table, number of slots that all its rows see, and
      the slots to visit: ``[0, a)`` and ``[b, c)``
    * ``rows [rows, 3]``: ``prefix, tail, stop``: a row sees the slots ``[0, prefix)`` and ``[tail, stop)``
    * ``tile``: maximum rows of a block
    * ``whole``: the tensors' storage, laid out by :func:`_joined`
    """

    table: Tensor
    blocks: Tensor
    rows: Tensor
    tile: int
    whole: Tensor


class SlotsKernel(Kernel[SlotTables]):
    """CUDA kernel for fp32, fp16 and bf16; Triton's interpreter runs it on a CPU."""

    def prepare(self, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], like: Tensor) -> SlotTables:
        most = max((sum(run.count for run in runs) for runs in streams), default=0)
        tiles = _tiles(like.dtype)
        tile = next((tile for tile in tiles if tile >= most), tiles[-1])
        arrays = _arrays(tables, streams, tile)
        return _split(to_device(_joined(arrays), like.device), [array.shape for array in arrays], tile)

    def warm_up(self, heads: int, layer: Tensor) -> None:
        """Compile for each tile size, which takes seconds, by running a block without rows."""
        query, nothing = layer.new_zeros(heads, 1, layer.shape[2]), self.static_inputs(1, 1, layer.device)
        for tile in _tiles(layer.dtype):
            self.attend(replace(nothing, tile=tile), query, layer, layer, 1.0)

    def static_inputs(self, rows: int, slots: int, device: torch.device) -> SlotTables:
        shapes = (rows, 7), (rows, 3), (slots,)
        return _split(torch.zeros(sum(map(_size, shapes)), dtype=torch.int32, device=device), shapes, TILES[0])

    def fill(self, inputs: SlotTables, tables: Sequence[IntArray], streams: Sequence[Sequence[Run]]) -> None:
        blocks, *others = _arrays(tables, streams, inputs.tile)
        # Zero padding: a block without rows and slots computes nothing.
        padded = np.zeros(inputs.blocks.shape, np.int64)
        padded[: len(blocks)] = blocks
        joined = _joined([padded, *others])
        fill(inputs.whole[: len(joined)], joined)

    def attend(self, prepared: SlotTables, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        given = (prepared.table, prepared.blocks, prepared.rows, prepared.tile)
        attended: Tensor = _attend(query, key, value, *given, scale)
        return attended


def _tiles(dtype: torch.dtype) -> Sequence[int]:
    return TILES[:-1] if dtype == torch.float32 else TILES


def _arrays(tables: Sequence[IntArray], streams: Sequence[Sequence[Run]], tile: int) -> list[IntArray]:
    """Blocks, rows and table of :class:`SlotTables`."""
    rows = visible_slots([run for runs in streams for run in runs])
    counts = [sum(run.count for run in runs) for runs in streams]
    return [_blocks(rows, counts, [len(table) for table in tables], tile), rows, np.concatenate(tables)]


def _joined(arrays: Sequence[IntArray]) -> Tensor:
    """Blocks, rows and table concatenated as int32, for a single copy to the device."""
    sizes = [_size(array.shape) for array in arrays]
    joined = np.zeros(sum(sizes), np.int32)
    for part, array in zip(np.split(joined, np.cumsum(sizes)[:-1]), arrays, strict=True):
        part[: array.size] = array.ravel()
    return torch.from_numpy(joined)


def _split(whole: Tensor, shapes: Sequence[tuple[int, ...]], tile: int) -> SlotTables:
    parts = torch.split(whole, list(map(_size, shapes)))
    blocks, rows, table = (part[: prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True))
    return SlotTables(table, blocks, rows, tile, whole)


def _size(shape: tuple[int, ...]) -> int:
    """Elements reserved for an array: the next one starts at a multiple of 16 bytes, as Triton recompiles for other
    alignments."""
    return -(-prod(shape) // 4) * 4


def visible_slots(runs: Sequence[Run]) -> IntArray:
    """``prefix, tail, stop`` of each row ``[n, 3]``; rows that see one contiguous range have an empty tail."""
    counts = [run.count for run in runs]
    # Per run: whether its rows see one contiguous range; prefix; tail; and its last row's stop less its row count.
    of_run = [(run.prefix == run.tail, run.prefix, run.tail, run.stop - run.count) for run in runs]
    joined, prefix, tail, before = np.array(of_run, np.int64).reshape(-1, 4).repeat(counts, axis=0).T
    first = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    stop = before + np.arange(1, len(first) + 1) - first
    return np.stack((np.where(joined, stop, prefix), np.where(joined, 0, tail), np.where(joined, 0, stop)), axis=1)


def _blocks(seen: IntArray, counts: Sequence[int], slots: Sequence[int], tile: int) -> IntArray:
    """Blocks of at most ``tile`` rows, each of one stream; ``counts``, ``slots``: rows and slots of each stream."""
    ends = np.cumsum(counts)
    per_stream = -(-np.array(counts) // tile)
    stream = np.repeat(np.arange(len(counts)), per_stream)
    if not len(stream):
        return np.zeros((0, 7), np.int64)
    number = np.arange(len(stream)) - (np.cumsum(per_stream) - per_stream)[stream]
    cuts = (ends - counts)[stream] + tile * number
    prefix, tail, stop = seen.T
    tails = np.where(stop > 0, tail, np.iinfo(np.int64).max)
    last = np.maximum.reduceat(stop, cuts)
    begin = np.where(last > 0, np.minimum.reduceat(tails, cuts), 0)
    rows = np.minimum(cuts + tile, ends[stream]) - cuts
    table = (np.cumsum(slots) - slots)[stream]
    shared, most = np.minimum.reduceat(prefix, cuts), np.maximum.reduceat(prefix, cuts)
    return np.stack((cuts, rows, table, shared, most, begin, last), 1)


@torch.library.custom_op("sightline::slot_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, blocks: Tensor, rows: Tensor, tile: int, scale: float
) -> Tensor:
    # Imported on first launch, because Triton may be missing on machines without a GPU.
    from cluster.engine.native.kernels.slots_triton import launch

    return launch(query, key, value, table, blocks, rows, scale, tile)


@_attend.register_fake
def _(query: Tensor, *given: Tensor | float) -> Tensor:  # noqa: ARG001
    heads, rows, size = query.shape
    return torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
