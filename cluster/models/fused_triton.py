"""The Triton kernels of :mod:`~cluster.models.fused`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns per program of ``_gated``, and rows per program of ``_rotated``.
COLUMNS = 1024
ROWS = 16


def launch_gated(x: Tensor) -> Tensor:
    """See :func:`~cluster.models.fused.gated`."""
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    if len(x):
        _gated[(len(x), triton.cdiv(width, COLUMNS))](x, out, width, x.stride(0), COLUMNS=COLUMNS)
    return out


def launch_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`~cluster.models.fused.rotated`."""
    rows, heads, size = x.shape
    out = x.new_empty(x.shape)
    if rows:
        _rotated[(triton.cdiv(rows, ROWS),)](
            x,
            cos,
            sin,
            out,
            rows,
            *x.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            HEADS=heads,
            HALF=size // 2,
            WIDTH=triton.next_power_of_2(size // 2),
            ROWS=ROWS,
        )
    return out


def launch_float8(x: Tensor, dtype: torch.dtype, smallest: float, largest: float) -> tuple[Tensor, Tensor]:
    """``x [n, k]`` in ``dtype``, and the scale ``[n, 1]`` of each row: its largest value, at least ``smallest``,
    divided by ``largest``, that of the dtype."""
    rows, width = x.shape
    out, scale = torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        whole = triton.next_power_of_2(width)
        # A row stays in registers between its two passes.
        warps = 4 if whole <= 8192 else 16
        _float8[(rows,)](x, out, scale, width, x.stride(0), smallest, largest, WIDTH=whole, num_warps=warps)
    return out, scale


@triton.jit
def _float8(x, out, scale, width, x_row, smallest, largest, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < width
    values = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    divisor = tl.maximum(tl.max(tl.abs(values), 0), smallest) / largest
    tl.store(scale + row, divisor)
    # The quotient may be rounded past the largest value. NaN stays NaN.
    scaled = tl.maximum(values / divisor, -largest, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(x, out, width, x_row, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    gate = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + column, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=mask)


# Not specialised on the number of rows, which varies: Triton would compile another variant for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def _rotated(
    x, cos, sin, out, rows, x_row, x_head, cos_row, sin_row,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < HALF)[None, :]
    turn = cos + row[:, None] * cos_row + column[None, :]
    cos_1 = tl.load(turn, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(turn + HALF, mask=mask, other=0.0).to(tl.float32)
    turn = sin + row[:, None] * sin_row + column[None, :]
    sin_1 = tl.load(turn, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(turn + HALF, mask=mask, other=0.0).to(tl.float32)
    source = x + row[:, None] * x_row + column[None, :]
    target = out + row[:, None] * (HEADS * 2 * HALF) + column[None, :]
    for head in range(HEADS):
        first = tl.load(source + head * x_head, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + head * x_head + HALF, mask=mask, other=0.0).to(tl.float32)
        turned = first * cos_1 + second * sin_1
        tl.store(target + head * 2 * HALF, turned.to(out.dtype.element_ty), mask=mask)
        turned = second * cos_2 + first * sin_2
        tl.store(target + head * 2 * HALF + HALF, turned.to(out.dtype.element_ty), mask=mask)
