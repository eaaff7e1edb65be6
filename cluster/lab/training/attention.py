"""Attention of the training forward: packed rows in blocks, each over a few ranges of keys.

A live window is not one causal sequence: reused tokens saw other windows, and questions do not see each other. This is
an additive mask per block of rows, at a third of the cost of one dense mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 512


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """``x [n, D]`` through a checkpoint's RMS norm."""
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.variance_epsilon).to(x.dtype)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """``x [n, D]`` with zeros after it, ``[rows, D]``."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x


def round_up_rows(count: int) -> int:
    """``count`` rounded up, so that shapes recur: each new shape compiles a kernel."""
    return -(-count // ROWS) * ROWS


def linear(x: Tensor, layer: Any) -> Tensor:
    """Linear layer in ``x``'s type."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def fused_linear(x: Tensor, layers: Sequence[Any]) -> Tensor:
    """Several linear layers of one input as one product, outputs concatenated."""
    weight = torch.cat([layer.weight for layer in layers]).to(x.dtype)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return F.linear(x, weight, torch.cat(biases).to(x.dtype) if biases else None)


def gated_mlp(x: Tensor, mlp: Any) -> Tensor:
    """``down(silu(gate(x)) * up(x))``."""
    gate, up = fused_linear(x, (mlp.gate_proj, mlp.up_proj)).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, mlp.down_proj)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves; ``x [..., d]``, ``cos`` and ``sin [..., d]``."""
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-high, low], dim=-1), sin)


def tower_block(
    hidden: Tensor,
    rows: int,
    block: Any,
    cos: Tensor,
    sin: Tensor,
    packing: PackedSequences | Sequence[tuple[int, int]],
) -> Tensor:
    """One block of the tower on packed patches ``[n, D]``, the first ``rows`` of them real; ``cos, sin [n, 1, 1, d]``.

    ``packing``: which rows attend to each other; only the runs if the rows are already in order.
    """
    attention = block.attn
    heads = attention.num_heads
    qkv = linear(rms_norm(hidden, block.norm1), attention.qkv).view(len(hidden), 3, heads, -1)
    turned = torch.cat([apply_rotary(qkv[:, :2], cos, sin), qkv[:, 2:]], dim=1)[:rows]
    if isinstance(packing, PackedSequences):
        attended = packed_attention(turned[packing.order], packing.runs, attention.scaling)[packing.back]
    else:
        attended = packed_attention(turned, packing, attention.scaling)
    hidden = hidden + linear(pad_rows(attended, len(hidden)), attention.proj)
    return hidden + gated_mlp(rms_norm(hidden, block.norm2), block.mlp)


def probe_attention(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of rows ``asking [a]`` and keys of all rows in a decoder layer: ``query [H, a, d]`` (scaled) and ``key
    [Hkv, n, d]`` in float32. ``hidden [n, D]``: the layer's input."""
    attention = layer.self_attn
    size = attention.head_dim
    x = rms_norm(hidden, layer.input_layernorm)
    query = linear(x[asking], attention.q_proj).view(len(asking), -1, size)
    key = linear(x, attention.k_proj).view(len(x), -1, size)
    query = apply_rotary(query, cos[asking][:, None], sin[asking][:, None]) * attention.scaling
    return query.transpose(0, 1).float(), apply_rotary(key, cos[:, None], sin[:, None]).transpose(0, 1).float()


def decoder_layer(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, blocks: Sequence[Block]) -> Tensor:
    """One decoder layer on packed rows ``[n, D]``, of which ``blocks`` cover the real ones; ``cos, sin [n, d]``."""
    rows = blocks[-1].stop
    attention = layer.self_attn
    size = attention.head_dim
    heads = attention.q_proj.out_features // size
    kv_heads = attention.k_proj.out_features // size
    x = rms_norm(hidden, layer.input_layernorm)
    qkv = fused_linear(x, (attention.q_proj, attention.k_proj, attention.v_proj)).view(len(x), -1, size)
    turned = apply_rotary(qkv[:, : heads + kv_heads], cos[:, None], sin[:, None])[:rows].transpose(0, 1)
    value = qkv[:rows, heads + kv_heads :].transpose(0, 1)
    attended = blocked_attention(turned[:heads], turned[heads:], value, blocks, attention.scaling)
    attended = attended.transpose(0, 1).reshape(rows, heads * size)
    hidden = hidden + linear(pad_rows(attended, len(x)), attention.o_proj)
    return hidden + gated_mlp(rms_norm(hidden, layer.post_attention_layernorm), layer.mlp)


# Rows of a full block.
BLOCK_ROWS = 192


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows ``[start, stop)`` and the row ranges of their keys; ``bias [stop - start, keys]``: 0 or minus infinity, keys
    in the order of the ranges."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Packed sequences with attention within each, sorted by length.

    * ``order`` ``[n]``: permutation of the rows; ``back``: its inverse
    * ``runs``: (number of sequences, length)
    """

    order: Tensor
    back: Tensor
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Tensor) -> PackedSequences:
        """Sequences of these ``lengths`` int64, packed one after the other."""
        starts = lengths.cumsum(0) - lengths
        runs, order = [], []
        for length in torch.unique(lengths).tolist():
            begin = starts[lengths == length]
            runs.append((len(begin), int(length)))
            order.append((begin[:, None] + torch.arange(length, device=lengths.device)).flatten())
        ordered = torch.cat(order)
        return cls(ordered, torch.argsort(ordered), tuple(runs))

    def to(self, device: torch.device) -> PackedSequences:
        return PackedSequences(self.order.to(device), self.back.to(device), self.runs)


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
    """``query [H, n, d]``, ``key, value [Hkv, n, d]`` -> ``[H, n, d]``; blocks cover all rows, ascending."""
    device, kind = query.device, query.dtype
    seen = torch.cat([torch.arange(a, b, device=device) for block in blocks for a, b in block.keys])
    if kind == torch.bfloat16:
        # The system prompt's keys are in every block: bfloat16 sums of their gradients would lose precision.
        key, value = key.float(), value.float()
    # One gather for all blocks: a slice's gradient would allocate a whole tensor.
    sizes = [block.bias.shape[1] for block in blocks]
    keys, values = (torch.split(x.index_select(1, seen).to(kind), sizes, dim=1) for x in (key, value))
    queries = torch.split(query, [block.stop - block.start for block in blocks], dim=1)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                q[None], k[None], v[None], block.bias.to(kind)[None, None], scale=scale, enable_gqa=True
            )[0]
            for q, k, v, block in zip(queries, keys, values, blocks, strict=True)
        ],
        dim=1,
    )


def packed_attention(qkv: Tensor, runs: Sequence[tuple[int, int]], scale: float) -> Tensor:
    """``qkv [n, 3, h, d]``, packed in ``runs`` (number of sequences, length) -> ``[n, h * d]``."""
    attended = []
    parts = torch.split(qkv, [count * length for count, length in runs])
    for part, (count, length) in zip(parts, runs, strict=True):
        q, k, v = part.view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, scale=scale)
        attended.append(heads.transpose(1, 2).reshape(count * length, -1))
    return torch.cat(attended)
