"""Attention of a pass inside the decoder layers: writes keys and values to the pool, and attends over each stream's
slots."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool


class PastRows(Protocol):
    """Rows of a pass that also attend to what they retrieve of their camera's past."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """Write their attention into ``out [n, H, d]``; ``query [H, n, d]``: of all rows of the pass; ``key, value``:
        see :meth:`Kernel.attend`."""

    def predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch what they will retrieve in a layer; ``hidden [n, D]``: of all rows, behind the attention of the
        layer before."""


@dataclass(slots=True, eq=False)
class RaggedAttention:
    """Attention of one pass: packed rows of several streams, each over its own slots.

    * ``rows`` ``[n]`` int64: slot of each row in the pool
    * ``prepared``: of ``kernel``
    * ``watched`` ``[w]`` int64: rows whose queries are kept in ``queries``, layer by layer, ``[Hkv, G, w, d]``: the
      query heads that share a key head side by side; ``None`` for none
    * ``past``: rows that ``kernel`` does not compute; ``others`` ``[o]`` int64: those that it does, ``None`` for all
    """

    pool: KVPool
    rows: Tensor
    kernel: Kernel[Any]
    prepared: Any
    watched: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)
    past: Sequence[PastRows] = ()
    others: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [n, H, d]``, ``key, value [n, Hkv, d]``, all after rotary -> ``[n, H, d]``."""
        stored_k, stored_v = self.pool.k[layer], self.pool.v[layer]
        stored_k.index_copy_(0, self.rows, key)
        stored_v.index_copy_(0, self.rows, value)
        query = query.transpose(0, 1)
        if self.watched is not None:
            seen = query.index_select(1, self.watched)
            self.queries.append(seen.view(key.shape[1], -1, *seen.shape[1:]))
        if self.others is None:
            return self.kernel.attend(self.prepared, query, stored_k, stored_v, scale)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        if len(self.others):
            rows = query.index_select(1, self.others)
            out.index_copy_(0, self.others, self.kernel.attend(self.prepared, rows, stored_k, stored_v, scale))
        for each in self.past:
            each.attend(layer, query, stored_k, stored_v, scale, out)
        return out

    def predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch what the rows will retrieve in a layer."""
        for each in self.past:
            each.predict(layer, hidden)
