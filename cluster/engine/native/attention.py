"""Attention function inside transformers' decoder layers, and its state.

The layers are called with the rotary of each row's position in its stream's own time, so queries and keys arrive
rotated. For each layer the function writes keys and values to the pool and attends over each stream's slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool
from cluster.models.base import VisionLanguageModel

NAME = "sightline"


@dataclass(slots=True, eq=False)
class RaggedAttention:
    """Attention of one pass: packed rows of several streams, each over its own slots.

    * ``rows`` ``[n]`` int64: slot of each row in the pool
    * ``prepared``: of ``kernel``
    * ``watched`` ``[w]`` int64: rows whose queries are kept in ``queries``, layer by layer, ``[Hkv, G, w, d]``: the
      query heads that share a key head side by side; ``None`` for none
    """

    pool: KVPool
    rows: Tensor
    kernel: Kernel[Any]
    prepared: Any
    watched: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [1, H, n, d]``, ``key, value [1, Hkv, n, d]``, all after rotary -> ``[1, n, H, d]``."""
        stored_k, stored_v = self.pool.k[layer], self.pool.v[layer]
        stored_k.index_copy_(0, self.rows, key[0].transpose(0, 1))
        stored_v.index_copy_(0, self.rows, value[0].transpose(0, 1))
        if self.watched is not None:
            seen = query[0].index_select(1, self.watched)
            self.queries.append(seen.view(key.shape[1], -1, *seen.shape[1:]))
        return self.kernel.attend(self.prepared, query[0], stored_k, stored_v, scale).unsqueeze(0)


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
