"""A decoder layer as one short function over its checkpoint's weights, with attention as an argument."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.models.checkpoint import rms_norm

Rotary = tuple[Tensor, Tensor]
Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""``(layer, query [n, H, d], key, value [n, Hkv, d], scale) -> [n, H, d]``."""


def layer_rotary(cos: Tensor, sin: Tensor) -> Rotary:
    """``cos, sin [n, d]`` as a :class:`DecoderLayer` takes them: ``[n, 1, d]``, the sine's first half negative."""
    half = sin.shape[1] // 2
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), 1)[:, None]


class DecoderLayer:
    """A layer of transformers' Qwen2, Qwen3, Llama or Mistral: about half of the library's operations.

    Projections of one input are one product: their parameters become views of one matrix, so that the library's own
    forward stays right and nothing is held twice. Dtype and device of the model must not change afterwards.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before, self._after = layer.input_layernorm, layer.post_attention_layernorm
        self._project = joined_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._expand = joined_linear([mlp.gate_proj, mlp.up_proj])
        self._out, self._down, self._activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self._size, self._scale = int(attention.head_dim), float(attention.scaling)
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        # Qwen3's, of each head.
        self._norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    def __call__(
        self,
        index: int,
        hidden: Tensor,
        rotary: Rotary | None,
        attend: Attention,
        between: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """``hidden [n, D]`` after the layer; ``between`` gets it after attention. ``rotary``: of each row, see
        :func:`layer_rotary`; ``None``: queries and keys stay as they are."""
        turned, value = self._projections(hidden)
        if rotary is not None:
            cos, sin = rotary
            first, second = turned.chunk(2, -1)
            turned = torch.addcmul(turned * cos, torch.cat((second, first), -1), sin)
        query, key = torch.split(turned, [self._heads, self._kv_heads], 1)
        attended = attend(index, query, key, value, self._scale)
        hidden = _added(hidden, self._out, attended.flatten(1))
        if between is not None:
            between(hidden)
        gate, up = self._expand(rms_norm(self._after, hidden)).chunk(2, 1)
        return _added(hidden, self._down, self._activation(gate) * up)

    def raw_query(self, hidden: Tensor) -> Tensor:
        """Queries ``[n, H, d]`` before rotary of ``hidden [n, D]``."""
        return self._projections(hidden)[0][:, : self._heads]

    def _projections(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys side by side ``[n, H + Hkv, d]``, and values ``[n, Hkv, d]``."""
        heads, kv_heads = self._heads, self._kv_heads
        projected = self._project(rms_norm(self._before, hidden)).view(len(hidden), -1, self._size)
        both, value = torch.split(projected, [heads + kv_heads, kv_heads], 1)
        if self._norms is not None:
            of_query, of_key = self._norms
            both = torch.cat((rms_norm(of_query, both[:, :heads]), rms_norm(of_key, both[:, heads:])), 1)
        return both, value


def _added(hidden: Tensor, linear: Any, x: Tensor) -> Tensor:
    plain = type(linear) is nn.Linear
    if plain and linear.bias is None:
        return torch.addmm(hidden, x, linear.weight.t())
    added: Tensor = hidden + linear(x)
    return added


def joined_linear(linears: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """Outputs of these layers side by side, of one product where they are not quantised."""
    if any(type(each) is not nn.Linear for each in linears):
        return lambda x: torch.cat([each(x) for each in linears], -1)
    weight = _shared([each.weight for each in linears])
    biases = [each.bias for each in linears if each.bias is not None]
    bias = _shared(biases) if biases else None
    return lambda x: F.linear(x, weight, bias)


def _shared(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of these, along their first axis; they become views of it."""
    # Whoever trains the model must not find inference tensors in it.
    with torch.inference_mode(False):
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = view
    return whole
