"""Attention of a training forward: packed rows in blocks, each over a few stretches of keys; and its gradient.

A live window is never one causal sequence: reused tokens saw another window, questions do not see each other. Here that
is an additive mask per block of rows. Blocks that keep to the keys they need cost a third of one dense mask. On a CPU
plain matrix products in bfloat16 are twice as fast as the library's fused kernel, and a gradient written by hand adds
to the keys' in place where autograd would fill and add a whole tensor for every slice.

On a CPU a bfloat16 product of a shape that was not seen lately compiles a kernel, which takes longer than most of these
products. So only shapes that come again are computed in bfloat16: full blocks, and pieces as long as those of a
complete frame, in batches of powers of two. The rest, a small part of the work, is float32, whose kernels take any
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows are a multiple of this.
ROWS = 512


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return wide.mul(scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        given = gradients[0].float()
        by_weight = (given * normed).sum(0)
        given = given * weight
        along = (given * normed).sum(-1, keepdim=True).div_(x.shape[-1])
        return given.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), by_weight, None


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """``x [n, D]`` through a checkpoint's RMS norm."""
    normed: Tensor = _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


def padded(x: Tensor, rows: int) -> Tensor:
    """``x [n, D]`` with zeros after it, ``[rows, D]``."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x


def regular_rows(count: int) -> int:
    """A number of rows, at least ``count``, that comes again: products of a new shape compile a kernel first."""
    return -(-count // ROWS) * ROWS


def linear(x: Tensor, layer: Any) -> Tensor:
    """A linear layer in ``x``'s type."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def joined(x: Tensor, layers: Sequence[Any]) -> Tensor:
    """Several linear layers of the same input as one product, outputs side by side."""
    weight = torch.cat([layer.weight for layer in layers]).to(x.dtype)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return F.linear(x, weight, torch.cat(biases).to(x.dtype) if biases else None)


def gated_mlp(x: Tensor, mlp: Any) -> Tensor:
    """``down(silu(gate(x)) * up(x))``."""
    gate, up = joined(x, (mlp.gate_proj, mlp.up_proj)).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, mlp.down_proj)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves; ``x [..., d]``, ``cos`` and ``sin [..., d]`` of its type."""
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-high, low], dim=-1), sin)


def tower_block(
    hidden: Tensor, rows: int, block: Any, cos: Tensor, sin: Tensor, pieces: Pieces | Sequence[tuple[int, int]]
) -> Tensor:
    """One block of the tower on packed patches ``[n, D]``, the first ``rows`` of them real; ``cos, sin [n, 1, 1, d]``.

    ``pieces``: who attends to whom; only the runs where the rows lie in their order already.
    """
    attention = block.attn
    heads = attention.num_heads
    qkv = linear(rms_norm(hidden, block.norm1), attention.qkv).view(len(hidden), 3, heads, -1)
    turned = torch.cat([rotate(qkv[:, :2], cos, sin), qkv[:, 2:]], dim=1)[:rows]
    if isinstance(pieces, Pieces):
        attended = pieces_attention(permute(turned, pieces.order, pieces.back), pieces.runs, attention.scaling)
        attended = permute(attended, pieces.back, pieces.order)
    else:
        attended = pieces_attention(turned, pieces, attention.scaling)
    hidden = hidden + linear(padded(attended, len(hidden)), attention.proj)
    return hidden + gated_mlp(rms_norm(hidden, block.norm2), block.mlp)


def looks(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """What rows ``asking [a]`` look for in a decoder layer, and what all rows show: ``query [H, a, d]`` (scaled) and
    ``key [Hkv, n, d]`` in float32. ``hidden [n, D]`` is the layer's input."""
    attention = layer.self_attn
    size = attention.head_dim
    x = rms_norm(hidden, layer.input_layernorm)
    query = linear(x[asking], attention.q_proj).view(len(asking), -1, size)
    key = linear(x, attention.k_proj).view(len(x), -1, size)
    query = rotate(query, cos[asking][:, None], sin[asking][:, None]) * attention.scaling
    return query.transpose(0, 1).float(), rotate(key, cos[:, None], sin[:, None]).transpose(0, 1).float()


def decoder_layer(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, blocks: Sequence[Block]) -> Tensor:
    """One decoder layer on packed rows ``[n, D]``, of which ``blocks`` cover the real ones; ``cos, sin [n, d]``."""
    rows = blocks[-1].stop
    attention = layer.self_attn
    size = attention.head_dim
    heads = attention.q_proj.out_features // size
    kv_heads = attention.k_proj.out_features // size
    x = rms_norm(hidden, layer.input_layernorm)
    qkv = joined(x, (attention.q_proj, attention.k_proj, attention.v_proj)).view(len(x), -1, size)
    turned = rotate(qkv[:, : heads + kv_heads], cos[:, None], sin[:, None])[:rows].transpose(0, 1)
    query = (turned[:heads] * attention.scaling).contiguous()
    key, value = turned[heads:].contiguous(), qkv[:rows, heads + kv_heads :].transpose(0, 1).contiguous()
    attended = blocked_attention(query, key, value, blocks).transpose(0, 1).reshape(rows, heads * size)
    hidden = hidden + linear(padded(attended, len(x)), attention.o_proj)
    return hidden + gated_mlp(rms_norm(hidden, layer.post_attention_layernorm), layer.mlp)


# Rows of a full block.
BLOCK_ROWS = 192
# Scores of one head that are held at once: larger products leave the caches and gain nothing.
_SCORES = 1 << 18
# Patches of a piece that come again and again: windows of 8x8 patches, those cut by the picture's edge, whole frames.
_REGULAR = frozenset({64, 48, 32, 24, 264})


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows ``[start, stop)`` and the stretches of rows whose keys they may see; ``bias [stop - start, keys]`` is 0 or
    minus infinity, keys in the order of the stretches."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    bias: Tensor

    def type(self, like: Tensor) -> torch.dtype:
        """What its products are computed in, for rows like these."""
        full = self.stop - self.start == BLOCK_ROWS or like.device.type != "cpu"
        return like.dtype if full or like.dtype != torch.bfloat16 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Packed sequences that attend to themselves alone, sorted so that those of one length are neighbours.

    * ``order`` ``[n]``: which row comes where; ``back``: its inverse
    * ``runs``: (how many sequences, how long)
    """

    order: Tensor
    back: Tensor
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Tensor) -> Pieces:
        """Pieces of these lengths ``[pieces]`` int64, packed one after the other."""
        starts = lengths.cumsum(0) - lengths
        runs, order = [], []
        for length in torch.unique(lengths).tolist():
            begin = starts[lengths == length]
            runs.append((len(begin), int(length)))
            order.append((begin[:, None] + torch.arange(length, device=lengths.device)).flatten())
        ordered = torch.cat(order)
        return cls(ordered, torch.argsort(ordered), tuple(runs))

    def to(self, device: torch.device) -> Pieces:
        return Pieces(self.order.to(device), self.back.to(device), self.runs)


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block]) -> Tensor:
    """``query [H, n, d]`` (scaled), ``key, value [Hkv, n, d]`` -> ``[H, n, d]``; blocks cover all rows, ascending."""
    attended: Tensor = _Blocked.apply(query, key, value, blocks)  # type: ignore[no-untyped-call]
    return attended


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block]) -> Tensor:
        kv_heads, rows, size = key.shape
        groups = query.shape[0] // kv_heads
        q = query.view(kv_heads, groups, rows, size)
        output = torch.empty_like(q)
        shares = []
        for block in blocks:
            count = block.stop - block.start
            kind = block.type(query)
            k, v = _stretches(key, block).to(kind), _stretches(value, block).to(kind)
            bias = block.bias.to(kind).repeat(groups, 1).expand(kv_heads, -1, -1)
            mine = q[:, :, block.start : block.stop].reshape(kv_heads, groups * count, size).to(kind)
            share = torch.baddbmm(bias, mine, k.mT).softmax(-1)
            output[:, :, block.start : block.stop] = torch.bmm(share, v).view(kv_heads, groups, count, size)
            shares.append(share)
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, *shares)
        return output.view_as(query)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *shares = ctx.saved_tensors
        kv_heads, rows, size = key.shape
        groups = query.shape[0] // kv_heads
        q, given = (x.reshape(kv_heads, groups, rows, size) for x in (query, gradients[0]))
        by_query = torch.empty_like(q)
        # The system prompt's keys are in every block: their sums would lose what is small in bfloat16.
        by_key, by_value = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        for block, share in zip(ctx.blocks, shares, strict=True):
            count = block.stop - block.start
            kind = share.dtype
            k, v = _stretches(key, block).to(kind), _stretches(value, block).to(kind)
            mine, g = (
                x[:, :, block.start : block.stop].reshape(kv_heads, groups * count, size).to(kind) for x in (q, given)
            )
            by_share = torch.bmm(g, v.mT)
            by_score = torch._softmax_backward_data(by_share, share, -1, share.dtype)
            by_query[:, :, block.start : block.stop] = torch.bmm(by_score, k).view(kv_heads, groups, count, size)
            _add(by_value, block, torch.bmm(share.mT, g))
            _add(by_key, block, torch.bmm(by_score.mT, mine))
        return by_query.view_as(query), by_key.to(key.dtype), by_value.to(value.dtype), None


def _stretches(x: Tensor, block: Block) -> Tensor:
    parts = [x[:, start:stop] for start, stop in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add(total: Tensor, block: Block, gradient: Tensor) -> None:
    first = 0
    for start, stop in block.keys:
        total[:, start:stop] += gradient[:, first : first + stop - start]
        first += stop - start


def pieces_attention(qkv: Tensor, runs: Sequence[tuple[int, int]], scale: float) -> Tensor:
    """``qkv [n, 3, h, d]``, packed in ``runs`` (how many sequences, how long) -> ``[n, h * d]``."""
    attended: Tensor = _Packed.apply(qkv, runs, scale)  # type: ignore[no-untyped-call]
    return attended


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, runs: Sequence[tuple[int, int]], scale: float) -> Tensor:
        rows, _, heads, size = qkv.shape
        output = qkv.new_empty(rows, heads, size)
        shares = []
        for start, count, length in _spans(runs):
            q, k, v = _heads_first(qkv[start : start + count * length], count, length, _type(length, qkv))
            share = torch.bmm(q * scale, k.mT).softmax(-1)
            attended = torch.bmm(share, v).view(count, heads, length, size)
            output[start : start + count * length].view(count, length, heads, size).copy_(attended.transpose(1, 2))
            shares.append(share)
        ctx.runs, ctx.scale = runs, scale
        ctx.save_for_backward(qkv, *shares)
        return output.view(rows, heads * size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        qkv, *shares = ctx.saved_tensors
        rows, _, heads, size = qkv.shape
        given = gradients[0].reshape(rows, heads, size)
        result = torch.empty_like(qkv)
        for (start, count, length), share in zip(_spans(ctx.runs), shares, strict=True):
            stop = start + count * length
            q, k, v = _heads_first(qkv[start:stop], count, length, share.dtype)
            g = given[start:stop].view(count, length, heads, size).transpose(1, 2).reshape(-1, length, size).to(q.dtype)
            by_score = torch._softmax_backward_data(torch.bmm(g, v.mT), share, -1, share.dtype)
            parts = (torch.bmm(by_score, k) * ctx.scale, torch.bmm(by_score.mT, q) * ctx.scale, torch.bmm(share.mT, g))
            there = result[start:stop].view(count, length, 3, heads, size)
            for index, part in enumerate(parts):
                there[:, :, index].copy_(part.view(count, heads, length, size).transpose(1, 2))
        return result, None, None


def _spans(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Where runs start, cut into powers of two such that the scores of one product are no more than ``_SCORES``."""
    spans, start = [], 0
    for count, length in runs:
        left = count
        most = 1 << (max(1, _SCORES // length**2).bit_length() - 1)
        while left:
            part = min(most, 1 << (left.bit_length() - 1)) if length in _REGULAR else left
            spans.append((start, part, length))
            start += part * length
            left -= part
    return spans


def _heads_first(qkv: Tensor, count: int, length: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``[count * length, 3, h, d]`` -> three ``[count * h, length, d]`` of this type."""
    heads, size = qkv.shape[2:]
    apart = qkv.view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    q, k, v = apart.reshape(3, count * heads, length, size).to(kind)
    return q, k, v


def _type(length: int, like: Tensor) -> torch.dtype:
    regular = length in _REGULAR or like.device.type != "cpu" or like.dtype != torch.bfloat16
    return like.dtype if regular else torch.float32


class _Permute(torch.autograd.Function):
    """Rows in another order; its gradient is the inverse order and not a sum over every place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def permute(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """``x[order]`` where ``back`` is the inverse of ``order``."""
    permuted: Tensor = _Permute.apply(x, order, back)  # type: ignore[no-untyped-call]
    return permuted
