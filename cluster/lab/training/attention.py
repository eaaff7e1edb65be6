"""Attention of the training forward: packed rows in blocks, each over a few ranges of keys.

A live window is not one causal sequence: reused tokens saw other windows, and questions do not see each other. This is
an additive mask per block of rows, at a third of the cost of one dense mask. transformers' own decoder layers call it
under the name :data:`BLOCKED`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

BLOCKED = "sightline_blocked"

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


def probe_attention(hidden: Tensor, layer: Any, cos: Tensor, sin: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of rows ``asking [a]`` and keys of all rows in a decoder layer: ``query [H, a, d]`` (scaled) and ``key
    [Hkv, n, d]`` in float32. ``hidden [n, D]``: the layer's input."""
    attention = layer.self_attn
    x = layer.input_layernorm(hidden)
    query = attention.q_proj(x[asking]).view(len(asking), -1, attention.head_dim).transpose(0, 1)[None]
    key = attention.k_proj(x).view(len(x), -1, attention.head_dim).transpose(0, 1)[None]
    query, _ = apply_rotary_pos_emb(query, query, cos[None, asking], sin[None, asking])
    _, key = apply_rotary_pos_emb(key, key, cos[None], sin[None])
    return (query[0] * attention.scaling).float(), key[0].float()


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


def _attend(
    module: nn.Module,  # noqa: ARG001 the signature is transformers'
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001
    *,
    blocks: Sequence[Block],
    scaling: float,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """``query, key, value [1, h, n, d]`` -> ``[1, n, h, d]``; rows after the last block's attend to nothing."""
    rows = blocks[-1].stop
    kind = value.dtype
    attended = blocked_attention(
        query[0, :, :rows].to(kind), key[0, :, :rows].to(kind), value[0, :, :rows], blocks, scaling
    )
    return F.pad(attended.transpose(0, 1), (0, 0, 0, 0, 0, query.shape[2] - rows))[None], None


AttentionInterface.register(BLOCKED, _attend)
