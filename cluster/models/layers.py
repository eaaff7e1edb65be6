"""Decoder layers and tower blocks: short functions over the checkpoint's weights, with fused operations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.errors import ModelError
from cluster.models.catalog import LANGUAGE_MODELS
from cluster.models.checkpoint import rms_norm
from cluster.models.float8 import ALIGNED, Float8Linear
from cluster.models.fused import gated, rotated
from cluster.models.packed_attention import SequencePacking, attend

Rotary = tuple[Tensor, Tensor]
Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""``(layer, query [n, H, d], key, value [n, Hkv, d], scale) -> [n, H, d]``."""


def check_language_model(config: Any) -> None:
    """Raise ``ModelError`` for a language model that our layers do not compute, even if its weights would fit."""
    kind = config.model_type
    if kind not in LANGUAGE_MODELS:
        raise ModelError(f"its language model is of type {kind!r}; supported types: {', '.join(LANGUAGE_MODELS)}")
    # Mistral has no layer_types: either all of its layers use a sliding window, or none.
    types = getattr(config, "layer_types", None) or (("sliding_attention",) if kind == "mistral" else ())
    if getattr(config, "sliding_window", None) and "sliding_attention" in types:
        raise ModelError(
            f"its layers attend over a sliding window of {config.sliding_window} tokens, which is not supported; use a "
            "checkpoint without one"
        )
    if config.rope_parameters["rope_type"] == "longrope":
        raise ModelError("its rotary frequencies depend on the sequence length (longrope), which is not supported")


def layer_rotary(cos: Tensor, sin: Tensor) -> Rotary:
    """``cos, sin [n, d]`` in the form a :class:`DecoderLayer` takes: ``[n, 1, d]``, the first half of sin negated."""
    half = sin.shape[1] // 2
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), 1)[:, None]


def key_bias(layers: Sequence[Any], size: int) -> Tensor | None:
    """Bias of decoder layers' keys ``[L, Hkv, 1, size]`` float32, before rotary; ``None`` without. It is the same for
    every token, and in published checkpoints up to hundreds of times larger than what tells tokens apart."""
    attentions = [layer.self_attn for layer in layers]
    if attentions[0].k_proj.bias is None or hasattr(attentions[0], "k_norm"):
        return None
    biases = torch.stack([each.k_proj.bias.detach().float() for each in attentions])
    return biases.view(len(attentions), -1, 1, size)


class DecoderLayer:
    """A layer of transformers' Qwen2, Qwen3, Llama or Mistral, in about half as many operations.

    Projections of the same input are fused into one product: their parameters become views of one matrix, so that
    transformers' own forward still works and weights are held once. The model must not change dtype or device
    afterwards.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._before, self._after = layer.input_layernorm, layer.post_attention_layernorm
        self._project = joined_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out, self._mlp = attention.o_proj, GatedMLP(layer.mlp)
        self._size, self._scale = int(attention.head_dim), float(attention.scaling)
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        # Per-head norms of Qwen3.
        self._norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    def __call__(
        self,
        index: int,
        hidden: Tensor,
        rotary: Rotary | None,
        attend: Attention,
        between: Callable[[Tensor], None] | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """``hidden [n, D]`` after the layer; ``between`` is called with it after attention. ``rotary``: per row, see
        :func:`layer_rotary`; ``None``: queries and keys are not rotated. ``wanted [m]``: the rows to return, those for
        which ``attend`` then returns attention; others are only projected."""
        query, key, value = self.projections(hidden, rotary)
        attended = attend(index, query, key, value, self._scale)
        if wanted is not None:
            hidden = hidden.index_select(0, wanted)
            if not len(wanted):
                return hidden
        hidden = added(hidden, self._out, attended.flatten(1))
        if between is not None:
            between(hidden)
        return self._mlp(hidden, rms_norm(self._after, hidden))

    def projections(self, hidden: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[n, H, d]``, keys and values ``[n, Hkv, d]`` of ``hidden [n, D]``; queries and keys are rotated if
        ``rotary`` is given."""
        heads, kv_heads = self._heads, self._kv_heads
        projected = self._project(rms_norm(self._before, hidden)).view(len(hidden), -1, self._size)
        query_key, value = torch.split(projected, [heads + kv_heads, kv_heads], 1)
        if self._norms is not None:
            of_query, of_key = self._norms
            query_key = torch.cat((rms_norm(of_query, query_key[:, :heads]), rms_norm(of_key, query_key[:, heads:])), 1)
        if rotary is not None:
            query_key = rotated(query_key, *rotary)
        query, key = torch.split(query_key, [heads, kv_heads], 1)
        return query, key, value


class GatedMLP:
    """``down(act(gate(x)) * up(x))`` of a transformers MLP, with gate and up fused into one product.

    The width is padded with zeros to a multiple of ``ALIGNED``, which changes no result: on a GPU, products of
    Qwen2.5-VL's tower, 3,420 wide, then take half the time.
    """

    def __init__(self, mlp: Any) -> None:
        self._activation, self._down = mlp.act_fn, mlp.down_proj
        plain = all(type(each) is nn.Linear for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        width = mlp.down_proj.in_features
        fill = -width % ALIGNED if plain else 0
        self._expand = joined_linear([mlp.gate_proj, mlp.up_proj], fill)
        if fill:
            with torch.inference_mode(False):
                weight = F.pad(self._down.weight.detach(), (0, fill))
                self._down.weight.data = weight[:, :width]
            down = nn.Linear(1, 1, bias=False, device="meta")
            down.weight, down.bias = nn.Parameter(weight, requires_grad=False), self._down.bias
            self._down = down

    def __call__(self, hidden: Tensor, x: Tensor) -> Tensor:
        """``hidden [n, D]`` plus the result for ``x [n, D]``."""
        return added(hidden, self._down, gated(self._expand(x), self._activation))


class TowerBlock:
    """A block of transformers' Qwen2-VL, Qwen2.5-VL or Qwen3-VL tower; dtype and device are fixed as for a
    :class:`DecoderLayer`. Rotary embedding is in float32, as in transformers."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.attn, block.mlp
        self._before, self._after = block.norm1, block.norm2
        self._project, self._out = attention.qkv, attention.proj
        self._heads, self._scale = int(attention.num_heads), float(attention.scaling)
        self._gated = GatedMLP(mlp) if hasattr(mlp, "gate_proj") else None
        self._mlp = mlp

    def __call__(self, hidden: Tensor, packing: SequencePacking, rotary: Rotary) -> Tensor:
        """``hidden [n, D]`` after the block; ``rotary``: per row, see :func:`layer_rotary`."""
        heads = self._heads
        projected = self._project(self._before(hidden)).view(len(hidden), 3 * heads, -1)
        query_key, value = torch.split(projected, [2 * heads, heads], 1)
        query, key = torch.split(rotated(query_key, *rotary), heads, 1)
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
        """Yields ``hidden [n, D]`` after each block; ``packings``: per block; ``rotary``: ``cos, sin [n, d]``."""
        turns = layer_rotary(*rotary)
        for block, packing in zip(self._blocks, packings, strict=True):
            hidden = block(hidden, packing, turns)
            yield hidden


def added(hidden: Tensor, linear: Any, x: Tensor) -> Tensor:
    """``hidden`` plus a linear layer's output for ``x``."""
    plain = type(linear) is nn.Linear
    if plain and linear.bias is None:
        return torch.addmm(hidden, x, linear.weight.t())
    result: Tensor = hidden + linear(x)
    return result


def joined_linear(linears: Sequence[Any], fill: int = 0) -> Callable[[Tensor], Tensor]:
    """Concatenated outputs of these layers, with ``fill`` zeros after each; in one product, unless only some of them
    are quantised."""
    if all(isinstance(each, Float8Linear) for each in linears):
        return Float8Linear.joined(linears)
    if any(type(each) is not nn.Linear for each in linears):
        return lambda x: torch.cat([each(x) for each in linears], -1)
    weight = _shared([each.weight for each in linears], fill)
    biases = [each.bias for each in linears if each.bias is not None]
    bias = _shared(biases, fill) if biases else None
    return lambda x: F.linear(x, weight, bias)


def _shared(parts: Sequence[Tensor], fill: int) -> Tensor:
    """Concatenate along the first axis, with ``fill`` zeros after each part; the parts become views of the result."""
    # Parameters must not become inference tensors, which cannot be trained.
    with torch.inference_mode(False):
        flat = (0, 0) * (parts[0].ndim - 1)
        whole = torch.cat([F.pad(part.detach(), (*flat, 0, fill)) for part in parts])
        for part, view in zip(parts, torch.split(whole, [len(part) + fill for part in parts]), strict=True):
            part.data = view[: len(part)]
    return whole
