"""The checkpoint's layers as functions of their own weights: what transformers computes, with fewer passes over memory.

At these widths a CPU spends most of a step outside of matrix products: casting, adding, copying. Products that share
their input run as one, activations are bfloat16 throughout (norms inside in float32), and a norm's gradient is written
out. With ``float32`` it is transformers' result; the tests hold it to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.lab.training.attention import Block, Pieces, blocked_attention, permute, pieces_attention

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
