"""The Qwen families' towers: each block is one short function over its checkpoint's weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.models.decoder_layer import GatedMLP, Rotary, added, layer_rotary
from cluster.models.fused import rotated
from cluster.models.packed_attention import SequencePacking, attend


class TowerBlock:
    """A block of transformers' Qwen2-VL, Qwen2.5-VL or Qwen3-VL tower; its weights may change as little as those of a
    :class:`DecoderLayer`. Rotary embedding is in float32, as the library's."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.attn, block.mlp
        self._before, self._after = block.norm1, block.norm2
        self._project, self._out = attention.qkv, attention.proj
        self._heads, self._scale = int(attention.num_heads), float(attention.scaling)
        self._gated = GatedMLP(mlp) if hasattr(mlp, "gate_proj") else None
        self._mlp = mlp

    def __call__(self, hidden: Tensor, packing: SequencePacking, rotary: Rotary) -> Tensor:
        """``hidden [n, D]`` after the block; ``rotary``: of each row, see :func:`layer_rotary`."""
        heads = self._heads
        projected = self._project(self._before(hidden)).view(len(hidden), 3 * heads, -1)
        both, value = torch.split(projected, [2 * heads, heads], 1)
        query, key = torch.split(rotated(both, *rotary), heads, 1)
        hidden = added(hidden, self._out, attend(packing, query, key, value, self._scale).flatten(1))
        if self._gated is not None:
            return self._gated(hidden, self._after(hidden))
        plain: Tensor = hidden + self._mlp(self._after(hidden))
        return plain


class Tower:
    """The blocks of transformers' tower ``visual``."""

    def __init__(self, visual: Any) -> None:
        self._blocks = [TowerBlock(block) for block in visual.blocks]

    def run(self, hidden: Tensor, packings: Sequence[SequencePacking], rotary: Rotary) -> Iterator[Tensor]:
        """``hidden [n, D]`` after each block; ``packings``: of each, ``rotary``: ``cos, sin [n, d]`` of the patches."""
        turns = layer_rotary(*rotary)
        for block, packing in zip(self._blocks, packings, strict=True):
            hidden = block(hidden, packing, turns)
            yield hidden
