"""The Triton kernel of :mod:`~cluster.engine.native.kernels.slots`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Score of a masked slot; finite, because the difference of two of them must not be NaN.
HIDDEN = tl.constexpr(-1.0e30)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    blocks: Tensor,
    rows: Tensor,
    scale: float,
    tile: int,
) -> Tensor:
    """``query [H, n, d]``, ``key, value [slots, Hkv, d]`` -> ``[n, H, d]``; the rest as in ``SlotTables``."""
    heads, count, size = query.shape
    out = query.new_empty(count, heads, size)
    query = query if query.stride(2) == 1 else query.contiguous()
    grid = (len(blocks), heads)
    _kernel[grid](
        query,
        key,
        value,
        out,
        table,
        blocks,
        rows,
        scale * 1.4426950408889634,  # exp(x) = exp2(x log2 e)
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *out.stride()[:2],
        GROUP=heads // key.shape[1],
        SIZE=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        ROWS=tile,
        # Equal bytes per step in either precision: three pipeline stages of keys and values must fit shared memory.
        KEYS=32 if query.dtype == torch.float32 else 64,
        # The interpreter would multiply the bit patterns of bfloat16, so it gets float32 operands.
        WIDE=triton.knobs.runtime.interpret,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )
    return out


@triton.jit
def _step(
    q, peak, mass, acc, first, stop, prefix, tail, last, table, key, value, scale, k_slot, v_slot, width,
    SIZE: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Online softmax of a block's rows over the slots ``[first, stop)`` of their stream; ``ALL``: every row sees every
    slot, and the range is a multiple of ``KEYS``."""
    for start in range(first, stop, KEYS):
        slot = start + tl.arange(0, KEYS)
        if ALL:
            place = tl.load(table + slot).to(tl.int64)
            held = (width < SIZE)[None, :]
        else:
            in_range = slot < stop
            place = tl.load(table + slot, mask=in_range, other=0).to(tl.int64)
            held = in_range[:, None] & (width < SIZE)[None, :]
        k = tl.load(key + place[:, None] * k_slot + width[None, :], mask=held, other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if not ALL:
            seen = (slot[None, :] < prefix[:, None]) | (
                (slot[None, :] >= tail[:, None]) & (slot[None, :] < last[:, None])
            )
            seen = seen & in_range[None, :]
            scores = tl.where(seen, scores, HIDDEN)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        if not ALL:
            weights = tl.where(seen, weights, 0.0)
        kept = tl.exp2(peak - higher)
        mass = mass * kept + tl.sum(weights, 1)
        v = tl.load(value + place[:, None] * v_slot + width[None, :], mask=held, other=0.0)
        weights = weights.to(v.dtype)
        if WIDE:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = acc * kept[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        peak = higher
    return peak, mass, acc


@triton.jit
def _kernel(
    query, key, value, out, table, blocks, rows, scale, q_head, q_row, k_slot, k_head, v_slot, v_head, o_row, o_head,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Longest blocks first: the last ones see the most slots, and would otherwise run alone at the end.
    block = blocks + (tl.num_programs(0) - 1 - tl.program_id(0)) * 7
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(block) + tl.arange(0, ROWS).to(tl.int64)
    row_mask = tl.arange(0, ROWS) < tl.load(block + 1)
    table += tl.load(block + 2)
    width = tl.arange(0, WIDTH)
    prefix = tl.load(rows + row * 3, mask=row_mask, other=0)
    tail = tl.load(rows + row * 3 + 1, mask=row_mask, other=0)
    last = tl.load(rows + row * 3 + 2, mask=row_mask, other=0)
    wanted = row_mask[:, None] & (width < SIZE)[None, :]
    q = tl.load(query + head * q_head + row[:, None] * q_row + width[None, :], mask=wanted, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    key += head // GROUP * k_head
    value += head // GROUP * v_head
    peak = tl.full((ROWS,), HIDDEN, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    whole = tl.load(block + 3) // KEYS * KEYS
    peak, mass, acc = _step(
        q, peak, mass, acc, 0, whole, prefix, tail, last, table, key, value, scale, k_slot, v_slot, width,
        SIZE, KEYS, WIDE, PRECISION, True,
    )  # fmt: skip
    peak, mass, acc = _step(
        q, peak, mass, acc, whole, tl.load(block + 4), prefix, tail, last, table, key, value, scale, k_slot, v_slot,
        width, SIZE, KEYS, WIDE, PRECISION, False,
    )  # fmt: skip
    peak, mass, acc = _step(
        q, peak, mass, acc, tl.load(block + 5), tl.load(block + 6), prefix, tail, last, table, key, value, scale,
        k_slot, v_slot, width, SIZE, KEYS, WIDE, PRECISION, False,
    )  # fmt: skip
    result = acc / tl.maximum(mass, 1.0e-30)[:, None]
    tl.store(out + row[:, None] * o_row + head * o_head + width[None, :], result.to(out.dtype.element_ty), mask=wanted)
