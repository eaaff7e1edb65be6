"""Ragged forward pass: rows of many streams, packed into one sequence, through transformers' decoder layers.

The layers' attention is replaced by one that writes keys and values to the pool and attends over each stream's slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool, unrotate
from cluster.engine.window.planner import BoolArray, IntArray, Run, causal_runs
from cluster.engine.window.refresh.base import KVChange, Narrowing
from cluster.models.base import VisionLanguageModel
from cluster.models.layers import layer_rotary

if TYPE_CHECKING:
    from cluster.engine.native.frame_retrieval import FramePast, PlacedFrames


@dataclass(slots=True, eq=False)
class RaggedAttention:
    """Attention of one pass: packed rows of several streams, each over its own slots.

    * ``rows`` ``[n]`` int64: pool slot of each row
    * ``prepared``: what ``kernel`` has prepared
    * ``watched`` ``[w]`` int64: rows whose queries are collected in ``queries``, per layer ``[Hkv, G, w, d]``, grouped
      by key head; ``None``: no rows
    * ``past``: rows that also read the past, not computed by ``kernel``; ``others`` ``[o]`` int64: the rows that
      ``kernel`` computes; ``None``: all
    * ``last``: of the last layer, where only ``others`` are computed
    """

    pool: KVPool
    rows: Tensor
    kernel: Kernel[Any]
    prepared: Any
    watched: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)
    past: Sequence[PlacedFrames] = ()
    others: Tensor | None = None
    last: bool = False

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [n, H, d]``, ``key, value [n, Hkv, d]``, all after rotary -> ``[n, H, d]``; if ``last``, the rows
        ``others`` of it."""
        stored_k, stored_v = self.pool.k[layer], self.pool.v[layer]
        stored_k.index_copy_(0, self.rows, key)
        stored_v.index_copy_(0, self.rows, value)
        query = query.transpose(0, 1)
        if self.watched is not None:
            seen = query.index_select(1, self.watched)
            self.queries.append(seen.view(key.shape[1], -1, *seen.shape[1:]))
        if self.others is None:
            return self.kernel.attend(self.prepared, query, stored_k, stored_v, scale)
        rows = query.index_select(1, self.others)
        found = rows.transpose(0, 1)
        if len(self.others):
            found = self.kernel.attend(self.prepared, rows, stored_k, stored_v, scale)
        if self.last:
            return found
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        out.index_copy_(0, self.others, found)
        for each in self.past:
            each.attend(layer, query, stored_k, stored_v, scale, out)
        return out

    def predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch what the rows will retrieve in ``layer``."""
        for each in self.past:
            each.predict(layer, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class StreamPass:
    """One stream's input to a pass: rows to compute and the slots they attend to.

    * ``pool``: shared by all streams of the pass
    * ``table`` ``[slots]``: pool slots of the window, in attention order
    * ``slots`` ``[v]``: indices into ``table`` of the window rows, ascending
    * ``tail_slots`` ``[m]``, ``tail_runs``: the rows after them, and one run per question; row 0 is the first of these
    * ``embeds`` ``[v + m, W]``, ``positions`` ``[3, v + m]`` int64 in the stream's own time, on the host
    * ``narrowing``: may drop rows between layers, among ``narrowable`` (ascending indices into ``slots``)
    * ``watched``: indices into ``tail_slots`` of rows whose unrotated queries are recorded
    * ``past``: what window rows retrieve; ``None``: they attend to the window only
    """

    pool: KVPool
    table: IntArray
    slots: IntArray
    tail_slots: IntArray
    tail_runs: tuple[Run, ...]
    embeds: Tensor
    positions: Tensor
    narrowing: Narrowing | None = None
    narrowable: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    watched: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    past: FramePast | None = None


@dataclass(slots=True)
class PassStats:
    """Work of one stream in one pass, summed over layers: rows, and attended pairs of row and slot. ``omitted``: rows
    that a layer only projects, and their pairs, which the sums include."""

    layers: int
    rows: int = 0
    attended: int = 0
    narrowable_rows: int = 0
    omitted: tuple[int, int] = (0, 0)

    def mean(self, total: float) -> float:
        return total / self.layers if self.layers else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """Output of a pass for one stream.

    * ``hidden`` ``[q, D]``: the last row of each question after the last layer
    * ``slots``: indices into its table of the window rows that went through all layers
    * ``queries``: per layer, unrotated queries ``[Hkv, G w, d]`` of the watched rows; empty if there are none
    """

    hidden: Tensor
    slots: IntArray
    stats: PassStats
    queries: list[Tensor]


class _Rows:
    """Rows of one stream that are still in the pass."""

    def __init__(self, stream: StreamPass) -> None:
        self.stream = stream
        self.slots = stream.slots
        self.narrowable = stream.narrowable
        self.stats = PassStats(layers=0)
        self.queries: list[Tensor] = []
        self._build_runs()

    def __len__(self) -> int:
        return len(self.slots) + len(self.stream.tail_slots)

    def _build_runs(self) -> None:
        window, tail = causal_runs(self.slots), self.stream.tail_runs
        self.attended = sum(run.attended for run in (*window, *tail))
        # Rows that the kernel does not compute come first.
        self.past_rows = len(self.slots) if self.stream.past is not None else 0
        if self.past_rows:
            self.runs = list(tail)
        else:
            self.runs = [*window, *(run.moved(len(self.slots)) for run in tail)]

    def count_layers(self, until: int) -> None:
        """Account for the layers up to ``until`` (exclusive) that these rows went through since the last call."""
        layers = until - self.stats.layers
        self.stats.layers = until
        self.stats.rows += layers * len(self)
        self.stats.attended += layers * self.attended
        self.stats.narrowable_rows += layers * len(self.narrowable)

    def narrow(self, keep: Tensor) -> BoolArray:
        """Drop the narrowable rows not in ``keep``; returns the mask ``[rows]`` of rows that stay."""
        kept, rows = keep.cpu().numpy(), len(self)
        stays = np.ones(len(self), dtype=bool)
        stays[self.narrowable[~kept]] = False
        visual = stays[: len(self.slots)]
        self.slots = self.slots[visual]
        self.narrowable = (np.cumsum(visual) - 1)[self.narrowable[kept]]
        self._build_runs()
        if self.stream.narrowing is not None and self.stream.narrowing.compares:
            self._count_projected(rows - len(self))
        return stays

    def _count_projected(self, rows: int) -> None:
        """Account for rows that a layer only projects, to compare their KV."""
        self.stats.rows += rows
        self.stats.narrowable_rows += rows
        self.stats.omitted = rows, 0


def ragged_forward(model: VisionLanguageModel, streams: Sequence[StreamPass], kernel: Kernel[Any]) -> list[PassResult]:
    """Run the rows of all streams through all layers, writing their KV to the pool.

    Only the last row of each question is read after the last layer, which only projects the others to keys and values.
    """
    rows = [_Rows(stream) for stream in streams]
    embeds = torch.cat([stream.embeds for stream in streams])
    hidden = embeds[:, : model.text_config.hidden_size]
    cos, sin = (part.to(hidden.dtype) for part in model.rotary(torch.cat([each.positions for each in streams], dim=1)))
    ragged, rotary = _attention(rows, hidden, kernel, cos, sin), layer_rotary(cos, sin)
    last = len(model.layers) - 1
    for index in range(last):
        if not len(hidden):
            # Before a window's end there are no questions, and narrowing may leave no rows.
            break
        predict = partial(ragged.predict, index + 1) if ragged.past and index + 1 < last else None
        hidden = model.run_layer(index, hidden, embeds, rotary, ragged, predict)
        if any(_narrows(each, index + 1) for each in rows):
            for each in rows:
                each.count_layers(index + 1)
            _distribute_queries(rows, ragged, cos, sin)
            kept = ragged.pool.index(np.flatnonzero(_rows_kept(model, rows, index + 1, hidden, cos, sin)))
            hidden, embeds = hidden.index_select(0, kept), embeds.index_select(0, kept)
            cos, sin = cos.index_select(0, kept), sin.index_select(0, kept)
            if len(kept):
                ragged, rotary = _attention(rows, hidden, kernel, cos, sin), layer_rotary(cos, sin)
    if len(hidden):
        ragged, wanted = _last_attention(rows, ragged, hidden)
        hidden = model.run_layer(last, hidden, embeds.index_select(0, wanted), rotary, ragged, None, wanted)
    _distribute_queries(rows, ragged, cos, sin)
    results: list[PassResult] = []
    end = 0
    for each in rows:
        each.count_layers(last + 1)
        read = [_last_row(run, row) for row, run in enumerate(each.stream.tail_runs)]
        pairs = each.attended - sum(run.attended for run in read)
        each.stats.omitted = each.stats.omitted[0] + len(each) - len(read), pairs
        first, end = end, end + len(read)
        results.append(PassResult(hidden[first:end], each.slots, each.stats, each.queries))
    return results


def _attention(rows: Sequence[_Rows], like: Tensor, kernel: Kernel[Any], cos: Tensor, sin: Tensor) -> RaggedAttention:
    pool = rows[0].stream.pool
    runs: list[list[Run]] = []
    # Pool slots of all rows, and indices of the watched rows among those still in the pass.
    slots: list[IntArray] = []
    watched: list[IntArray] = []
    others: list[IntArray] = []
    past: list[PlacedFrames] = []
    # Number of preceding rows: all, and those that the kernel computes.
    first = inner = 0
    for each in rows:
        runs.append([run.moved(inner) for run in each.runs])
        slots.append(each.stream.table[np.concatenate((each.slots, each.stream.tail_slots))])
        watched.append(each.stream.watched + len(each.slots) + first)
        others.append(np.arange(first + each.past_rows, first + len(each)))
        if each.stream.past is not None and each.past_rows:
            past.append(each.stream.past.place(pool, each.stream.table, each.slots, first, cos, sin))
        first += len(each)
        inner += len(each) - each.past_rows
    prepared = kernel.prepare([each.stream.table for each in rows], runs, like)
    wanted = np.concatenate(watched)
    return RaggedAttention(
        pool,
        pool.index(np.concatenate(slots)),
        kernel,
        prepared,
        pool.index(wanted) if len(wanted) else None,
        past=past,
        others=pool.index(np.concatenate(others)) if past else None,
    )


def _last_attention(rows: Sequence[_Rows], ragged: RaggedAttention, like: Tensor) -> tuple[RaggedAttention, Tensor]:
    """Attention of the last layer, and the rows that it computes: the last one of each question."""
    runs: list[list[Run]] = []
    computed: list[int] = []
    first = 0
    for each in rows:
        tail = each.stream.tail_runs
        runs.append([_last_row(run, len(computed) + row) for row, run in enumerate(tail)])
        computed += [first + len(each.slots) + run.row + run.count - 1 for run in tail]
        first += len(each)
    tables = [each.stream.table for each in rows]
    prepared = ragged.kernel.prepare(tables, runs, like) if computed else None
    wanted = ragged.pool.index(np.array(computed, np.int64))
    return replace(ragged, prepared=prepared, past=(), others=wanted, last=True), wanted


def _last_row(run: Run, row: int) -> Run:
    """The last row of a run, as row ``row``."""
    return replace(run, row=row, count=1)


def _distribute_queries(rows: Sequence[_Rows], ragged: RaggedAttention, cos: Tensor, sin: Tensor) -> None:
    """Give each stream the unrotated queries of its watched rows."""
    if ragged.watched is None:
        return
    turned = cos.index_select(0, ragged.watched).float(), sin.index_select(0, ragged.watched).float()
    for queries in (unrotate(each, *turned) for each in ragged.queries):
        first = 0
        for each in rows:
            count = len(each.stream.watched)
            if count:
                each.queries.append(queries[:, :, first : first + count].flatten(1, 2))
            first += count
    ragged.queries.clear()


def _narrows(rows: _Rows, layer: int) -> bool:
    narrowing = rows.stream.narrowing
    return narrowing is not None and narrowing.before(layer)


def _rows_kept(
    model: VisionLanguageModel, rows: Sequence[_Rows], layer: int, hidden: Tensor, cos: Tensor, sin: Tensor
) -> BoolArray:
    """Narrow the streams that do so before ``layer``; the mask of the packed rows ``hidden [n, D]`` that stay."""
    stays: list[BoolArray] = []
    first = 0
    for each in rows:
        count, narrowing, change = len(each), each.stream.narrowing, None
        if narrowing is None or not narrowing.before(layer):
            stays.append(np.ones(count, dtype=bool))
        else:
            if narrowing.compares:
                pool = each.stream.pool
                at = pool.index(each.narrowable + first)
                rotary = layer_rotary(cos.index_select(0, at), sin.index_select(0, at))
                _, key, value = model.projections(layer, hidden.index_select(0, at), rotary)
                slots = pool.index(each.stream.table[each.slots[each.narrowable]])
                old = pool.k[layer].index_select(0, slots), pool.v[layer].index_select(0, slots)
                change = KVChange(key, value, *old)
            stays.append(each.narrow(narrowing.select_kept(layer, change)))
        first += count
    return np.concatenate(stays)
