"""The ragged forward: the rows of many streams packed into one sequence through transformers' decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.attention import RaggedAttention, Slots
from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.planner import BoolArray, IntArray, Run, runs_of
from cluster.engine.window.refresh.base import KVChange, Narrowing
from cluster.models.base import VisionLanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class StreamPass:
    """What one stream brings to a pass: rows to compute and the slots they see.

    * ``base``: where local slot 0 lies in the slab
    * ``slots`` ``[v]``: local slots of the window rows, ascending
    * ``tail_slots`` ``[m]``, ``tail_runs``: rows after them (questions), with runs whose row 0 is the first of these
    * ``embeds`` ``[v + m, D]``
    * ``cos, sin`` ``[slots, d]``
    * ``narrowing`` may drop, between layers, rows among ``narrowable`` (ascending indices into ``slots``)
    * ``watched``: indices into ``tail_slots`` of rows whose raw queries are wanted
    * ``order`` ``[slots]``: the slots in the order in which rows see them, where that is not the order they lie in; the
      computed ones still ascend, and those of the tail stay where they are
    """

    kv: KVSlab
    base: int
    slots: IntArray
    tail_slots: IntArray
    tail_runs: tuple[Run, ...]
    embeds: Tensor
    cos: Tensor
    sin: Tensor
    narrowing: Narrowing | None = None
    narrowable: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    watched: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    order: IntArray | None = None


@dataclass(slots=True)
class PassStats:
    """Work of one stream in one pass, summed over layers: rows, and pairs of a row and a slot it saw."""

    layers: int
    rows: int = 0
    attended: int = 0
    narrowable_rows: int = 0

    def mean(self, total: int) -> float:
        return total / self.layers if self.layers else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """What a pass gives one stream.

    * ``hidden`` ``[m, D]``: its tail rows after the last layer
    * ``slots``: local slots of the window rows that went through all layers
    * ``queries``: per layer the raw queries ``[Hkv, G w, d]`` of the watched rows; nothing where none are
    """

    hidden: Tensor
    slots: IntArray
    stats: PassStats
    queries: list[Tensor]


class _Rows:
    """The rows of one stream that are still in the pass."""

    def __init__(self, stream: StreamPass) -> None:
        self.stream = stream
        self.slots = stream.slots
        self.narrowable = stream.narrowable
        self.stats = PassStats(layers=0)
        self.queries: list[Tensor] = []
        # Where each slot stands among those that rows see.
        self.places = None if stream.order is None else np.argsort(stream.order)
        self._place()

    def __len__(self) -> int:
        return len(self.slots) + len(self.stream.tail_slots)

    def _place(self) -> None:
        self.runs = [
            *runs_of(self.slots if self.places is None else self.places[self.slots]),
            *(run.moved(len(self.slots)) for run in self.stream.tail_runs),
        ]
        self.attended = sum(run.attended for run in self.runs)

    def slab_slots(self) -> Tensor:
        local = np.concatenate((self.slots, self.stream.tail_slots)) + self.stream.base
        return torch.from_numpy(local).to(self.stream.embeds.device)

    def order(self) -> Tensor | None:
        """See :class:`StreamPass`, on the device."""
        order = self.stream.order
        return None if order is None else torch.from_numpy(order).to(self.stream.embeds.device)

    def watched(self) -> Tensor | None:
        """Places of the watched rows among those still in the pass."""
        wanted = self.stream.watched
        return torch.from_numpy(wanted + len(self.slots)).to(self.stream.embeds.device) if len(wanted) else None

    def count_layer(self) -> None:
        self.stats.layers += 1
        self.stats.rows += len(self)
        self.stats.attended += self.attended
        self.stats.narrowable_rows += len(self.narrowable)

    def narrow(self, keep: Tensor) -> BoolArray:
        """Drop the narrowable rows that are not in ``keep``; returns which of all rows stay, ``[rows]``."""
        kept = keep.cpu().numpy()
        stays = np.ones(len(self), dtype=bool)
        stays[self.narrowable[~kept]] = False
        visual = stays[: len(self.slots)]
        self.slots = self.slots[visual]
        self.narrowable = (np.cumsum(visual) - 1)[self.narrowable[kept]]
        self._place()
        return stays


def ragged_forward(model: VisionLanguageModel, streams: Sequence[StreamPass], kernel: Kernel[Any]) -> list[PassResult]:
    """Run the rows of all streams through all layers; fresh KV is in the streams' slabs afterwards."""
    rows = [_Rows(stream) for stream in streams]
    hidden = torch.cat([stream.embeds for stream in streams]).unsqueeze(0)
    # Identity rotary, broadcast: the layers hand queries and keys on as they are.
    identity = (hidden.new_ones(1, 1, 1), hidden.new_zeros(1, 1, 1))
    ragged = _attention(rows, kernel)
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        narrowing = [i for i, r in enumerate(rows) if _narrows(r, index, last)]
        before = {i: _narrowable_kv(rows[i], index) for i in narrowing}
        output = layer(hidden, attention_mask=None, position_embeddings=identity, ragged=ragged)
        hidden = output[0] if isinstance(output, tuple) else output
        for each in rows:
            each.count_layer()
        if narrowing:
            after = {i: _narrowable_kv(rows[i], index) for i in narrowing}
            stays = [
                _keep(r, index, before[i], after[i]) if i in before else np.ones(len(r), dtype=bool)
                for i, r in enumerate(rows)
            ]
            kept = torch.from_numpy(np.flatnonzero(np.concatenate(stays)))
            hidden = hidden.index_select(1, kept.to(hidden.device))
            ragged = _attention(rows, kernel)
    results: list[PassResult] = []
    end = 0
    for each in rows:
        end += len(each)
        tail = hidden[0, end - len(each.stream.tail_slots) : end]
        results.append(PassResult(tail, each.slots, each.stats, each.queries))
    return results


def _attention(rows: Sequence[_Rows], kernel: Kernel[Any]) -> RaggedAttention:
    slots, runs = [], []
    first = 0
    for each in rows:
        stream = each.stream
        place = (stream.kv, stream.base, each.slab_slots(), stream.cos, stream.sin)
        slots.append(Slots(*place, each.watched(), each.queries, each.order()))
        runs.append([run.moved(first) for run in each.runs])
        first += len(each)
    return RaggedAttention(slots, runs, kernel)


def _narrows(rows: _Rows, layer: int, last: int) -> bool:
    narrowing = rows.stream.narrowing
    return narrowing is not None and layer < last and narrowing.after(layer)


def _narrowable_kv(rows: _Rows, layer: int) -> tuple[Tensor, Tensor]:
    """Raw ``K, V [n, Hkv, d]`` in the slots of the narrowable rows, copied out."""
    stream = rows.stream
    slots = torch.from_numpy(rows.slots[rows.narrowable] + stream.base).to(stream.embeds.device)
    k, v = (tensor[layer].index_select(1, slots).transpose(0, 1) for tensor in (stream.kv.k, stream.kv.v))
    return k, v


def _keep(rows: _Rows, layer: int, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> BoolArray:
    assert rows.stream.narrowing is not None
    return rows.narrow(rows.stream.narrowing.keep(KVChange(layer, *new, *old)))
