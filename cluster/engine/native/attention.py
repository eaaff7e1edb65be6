"""Attention function inside transformers' decoder layers, and its state.

The layers are called with an identity rotary, so queries and keys arrive raw. For each layer the function writes the
fresh raw K, V to their slots, rotates queries and *all* of a window's keys by where they stand in this window, and
attends per run. Rotating once from raw keys is exact however often the window slides; re-rotating rotated keys
(CodecSight equation 5) drifts, and values need no rotation at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.planner import Run
from cluster.models.base import VisionLanguageModel

NAME = "sightline"


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slots of one stream in a pass, with their rotary.

    * ``base``: where local slot 0 lies in the slab
    * ``rows`` ``[n]`` int64: slab slot of each row
    * ``cos, sin`` ``[slots, d]`` in the model's dtype, for local slots ``0 …``
    * ``watched`` ``[w]`` int64: rows, by their place among this stream's, whose raw queries are put into ``queries``
      layer by layer, ``[Hkv, G w, d]``: the query heads that share a key head side by side; None for none
    * ``order`` ``[slots]`` int64: the local slots in the order in which runs count them; None for as they lie
    """

    kv: KVSlab
    base: int
    rows: Tensor
    cos: Tensor
    sin: Tensor
    watched: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)
    order: Tensor | None = None

    def window(self, tensor: Tensor, layer: int) -> Tensor:
        """This window's slots ``[Hkv, slots, d]`` of the slab's K or V: a view, or with ``order`` a copy."""
        stretch = tensor[layer, :, self.base : self.base + self.cos.shape[0]]
        return stretch if self.order is None else stretch.index_select(1, self.order)

    def rotary(self) -> tuple[Tensor, Tensor]:
        """``cos, sin`` of the slots as :meth:`window` gives them."""
        return (self.cos, self.sin) if self.order is None else (self.cos[self.order], self.sin[self.order])


class RaggedAttention:
    """Attention of one pass: packed rows of several streams, each over its own slots."""

    def __init__(self, streams: Sequence[Slots], runs: Sequence[Sequence[Run]], kernel: Kernel[Any]) -> None:
        self.streams = streams
        self.kernel = kernel
        self.prepared = kernel.prepare(runs, streams[0].cos)
        self.cos = torch.cat([s.cos[s.rows - s.base] for s in streams])
        self.sin = torch.cat([s.sin[s.rows - s.base] for s in streams])
        self.slot_rotary = [s.rotary() for s in streams]
        # One workspace per stream for the current layer's rotated keys.
        self.rotated = [s.cos.new_empty(s.kv.k.shape[1], *s.cos.shape) for s in streams]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [1, H, n, d]``, ``key, value [1, Hkv, n, d]``, all before rotary -> ``[1, n, H, d]``."""
        first = 0
        keys, values = [], []
        for stream, rotary, workspace in zip(self.streams, self.slot_rotary, self.rotated, strict=True):
            rows = slice(first, first + len(stream.rows))
            first = rows.stop
            stream.kv.k[layer].index_copy_(1, stream.rows, key[0, :, rows])
            stream.kv.v[layer].index_copy_(1, stream.rows, value[0, :, rows])
            keys.append(rotate(stream.window(stream.kv.k, layer), *rotary, workspace))
            values.append(stream.window(stream.kv.v, layer))
            if stream.watched is not None:
                seen = query[0, :, rows].index_select(1, stream.watched)
                stream.queries.append(seen.reshape(key.shape[1], -1, seen.shape[2]))
        rotated = rotate(query[0], self.cos, self.sin, query.new_empty(query.shape[1:]))
        return self.kernel.attend(self.prepared, rotated, keys, values, scale).unsqueeze(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotary embedding of ``x [h, n, d]`` by ``cos, sin [n, d]`` into ``out``, half-split layout.

    ``x * cos + rotate_half(x) * sin`` as in transformers, in three passes over memory and without temporaries.
    """
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ragged: RaggedAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function called by transformers in every layer. Outside a pass (the reference, ``generate``) it is the
    library's."""
    if ragged is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    return ragged(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


def install_attention(model: VisionLanguageModel) -> None:
    """Make a model's decoder layers call :func:`attention`. Idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for layer in model.layers:
        self_attention: Any = layer.self_attn
        self_attention.config._attn_implementation = NAME
