"""Attention of a pass inside the decoder layers: writes keys and values to the pool, and attends over each stream's
slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool


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
        """``query [n, H, d]``, ``key, value [n, Hkv, d]``, all after rotary -> ``[n, H, d]``."""
        stored_k, stored_v = self.pool.k[layer], self.pool.v[layer]
        stored_k.index_copy_(0, self.rows, key)
        stored_v.index_copy_(0, self.rows, value)
        query = query.transpose(0, 1)
        if self.watched is not None:
            seen = query.index_select(1, self.watched)
            self.queries.append(seen.view(key.shape[1], -1, *seen.shape[1:]))
        return self.kernel.attend(self.prepared, query, stored_k, stored_v, scale)
