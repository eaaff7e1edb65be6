"""Frames of a window that also attend to their camera's past: per layer, to what their own queries retrieve.

Each row attends jointly to the system prompt, the retrieved KV and the window's slots up to itself. The past precedes
the window at the positions a question would give it, in the stream's own time, and the system prompt precedes the past;
with everything retrieved and nothing evicted, this is causal attention over the whole stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.kernels import gathered, grouped, shared
from cluster.engine.native.memory_attention import rotate_retrieved
from cluster.engine.native.plan import SystemPrompt, WindowPlan
from cluster.engine.native.timeline import Timeline, frames_that_fit
from cluster.engine.window.kv import KVPool, rotate_wide, unrotate
from cluster.engine.window.planner import IntArray
from cluster.engine.window.stream import token_counts
from cluster.memory.frame_retrieval import FrameReads, ReSVFrames
from cluster.memory.retrieval_session import RetrievalSession, RetrievedKV
from cluster.memory.stream import StreamMemory
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS

log = logging.getLogger(__name__)

# Maximum rows times window slots of frames that attend in one call: bounds their mask.
_PAIRS = 2**20


@dataclass(slots=True)
class BlockWait:
    """Seconds that the windows of one batch have waited for blocks so far."""

    seconds: float = 0.0


def plan_with_past(
    model: VisionLanguageModel,
    system: SystemPrompt,
    memory: StreamMemory,
    policy: ReSVFrames,
    plan: WindowPlan,
    waited: BlockWait,
) -> WindowPlan:
    """Extend a plan so that its frames read the memory; returned unchanged if nothing precedes the window. The caller
    closes ``work.past``. ``waited``: shared by the windows of the batch."""
    if not len(plan.work.slots):
        return plan
    opened = plan.frames[0].memory_time
    # A restored window and the memory may overlap: frames in both must not be attended to twice.
    before = memory.frames_since(opened)
    session = RetrievalSession(
        memory,
        policy.retriever(),
        before=before,
        prefetch=policy.prefetch,
        device=model.device,
        dtype=model.dtype,
    )
    with ExitStack() as cleanup:
        cleanup.callback(session.close)
        held = session.view.log.copy()
        held.delete_before(session.first_frame)
        held.delete_after(before - 1)
        if not held.numbers:
            return plan
        frame_s = plan.frames[0].duration / MICROSECONDS
        most = frames_that_fit(model, plan.places.next, frame_s, plan.frames[0].grid)
        timeline = Timeline.of(held.numbers, held.times, opened, frame_s=frame_s, most=most)
        past = FramePast(model, system, session, policy.deadline_s, waited, plan, timeline)
        cleanup.pop_all()
    return replace(plan, work=replace(plan.work, past=past))


class FramePast:
    """What the frames of one window retrieve of their camera's past, during its passes.

    * ``session``: reads the memory
    * ``attended``: pairs of a row and a retrieved token, averaged over heads, summed over layers
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        system: SystemPrompt,
        session: RetrievalSession,
        deadline_s: float,
        waited: BlockWait,
        plan: WindowPlan,
        timeline: Timeline,
    ) -> None:
        self.attended = 0.0
        self._frames = self._read_tokens = self._flops = 0
        self._model, self.session = model, session
        self._deadline_s, self._waited = deadline_s, waited
        self._timeline, self._grid = timeline.to(model.device), plan.frames[0].grid
        first = plan.frames[0]
        # Seconds and slot of the oldest remembered frame, in the stream's own time.
        self._origin = first.time_s - timeline.length_s, first.slot - timeline.slots
        # End of each frame's slots.
        self._ends = np.cumsum(token_counts(plan.frames)) + plan.system
        self._system = plan.system
        place = model.frame_place(*self._origin, self._grid)
        cos, sin = model.rotary(replace(plan.places, first=place).text(range(plan.system)))
        self._system_k, self._system_v = rotate_wide(system.k, cos, sin), system.v
        config = model.text_config
        size, hidden = system.k.shape[3], config.hidden_size
        heads, kv_heads = config.num_attention_heads, system.k.shape[1]
        self._group = heads // kv_heads
        self._projection_flops = 2 * hidden * (heads + 2 * kv_heads) * size
        self._failed = False

    @property
    def reads(self) -> FrameReads:
        """Statistics of what the frames have read so far."""
        stats, loads = self.session.stats, self.session.prefetcher.stats
        return FrameReads(
            frames=self._frames,
            # Frames waiting to be clustered count as held and as read.
            held_tokens=stats.held_tokens + self._read_tokens - stats.fetched_tokens,
            read_tokens=self._read_tokens,
            clusters=stats.clusters,
            unavailable=stats.unavailable,
            lost=stats.lost,
            bytes=stats.bytes,
            waited_s=loads.waited_s,
            flops=self._flops,
        )

    def close(self) -> None:
        """Stop loading, and report lost blocks to the memory."""
        # Does not wait: a tier may hang.
        self.session.close(wait=False)

    def frame_of(self, slots: IntArray) -> IntArray:
        """Index in the window of each slot's frame."""
        return np.searchsorted(self._ends, slots, side="right")

    def place(self, pool: KVPool, table: IntArray, slots: IntArray, row: int, cos: Tensor, sin: Tensor) -> PlacedFrames:
        """Place these window slots (see ``StreamPass``) in a pass as rows from ``row`` on; ``cos, sin [n, d]``: of all
        rows of the pass."""
        frames, counts = np.unique(self.frame_of(slots), return_inverse=True, return_counts=True)[1:]
        # Per call: first row, end row and number of window slots.
        spans: list[tuple[int, int, int]] = []
        for count, end in zip(counts.tolist(), counts.cumsum().tolist(), strict=True):
            first, reach = spans[-1][0] if spans else 0, int(slots[end - 1]) + 1 - self._system
            if spans and (end - first) * reach <= _PAIRS:
                spans[-1] = first, end, reach
            else:
                spans.append((end - count, end, reach))
        last, number = (pool.index(part) for part in (slots, frames))
        pieces = [
            _FrameRows(
                slice(row + first, row + end),
                number[first:end],
                torch.arange(self._system, self._system + reach, device=pool.device) <= last[first:end, None],
            )
            for first, end, reach in spans
        ]
        rows = slice(row, row + len(slots))
        seen = pool.index(table[self._system : int(slots[-1]) + 1])
        return PlacedFrames(self, pieces, counts.tolist(), rows, seen, cos[rows].float(), sin[rows].float())

    def retrieve(self, layer: int, query: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[Hkv, s, d]`` preceding the window, for unrotated query rows ``[H, n, d]`` of ``F`` frames
        with ``counts`` rows each; and the mask ``[F, Hkv, s]`` of what each frame reads."""
        self._frames += len(counts) if layer == 0 else 0
        key, value = self._system_k[layer], self._system_v[layer]
        readers = torch.ones(len(counts), *key.shape[:2], dtype=torch.bool, device=key.device)
        found = self._fetch(layer, self._by_frame(query), counts)
        if found is None or not found[0].tokens:
            return key, value, readers
        retrieved, by_frame = found
        self._read_tokens += sum(retrieved.read)
        self.attended += sum(count * tokens for count, tokens in zip(counts, retrieved.read, strict=True)) / len(key)
        return (
            torch.cat([key, self.rotated(layer, retrieved)], dim=1),
            torch.cat([value, retrieved.value], dim=1),
            torch.cat([readers, by_frame], dim=2),
        )

    def rotated(self, layer: int, past: RetrievedKV) -> Tensor:
        """Keys ``[Hkv, m, d]``, rotated to the positions of the past before this window."""
        memory, timeline, grid = self.session.memory, self._timeline, self._grid
        return rotate_retrieved(self._model, memory, past, layer, timeline, grid, origin=self._origin)

    def _by_frame(self, query: Tensor) -> Tensor:
        """Rows ``[H, n, d]`` as ``[Hkv, n G, d]`` on the host, which selects the clusters: one copy for all frames."""
        by_group = query.reshape(-1, self._group, *query.shape[1:])
        return by_group.transpose(1, 2).flatten(1, 2).cpu()

    def _fetch(self, layer: int, query: Tensor, counts: Sequence[int]) -> tuple[RetrievedKV, Tensor] | None:
        """Fetch what the queries select; None if that fails: unlike a question, a window does without it."""
        self._count_scores(layer, query)
        stats = self.session.prefetcher.stats
        before = stats.waited_s
        try:
            left = max(0.0, self._deadline_s - self._waited.seconds)
            return self.session.fetch_groups(layer, query, [self._group * count for count in counts], left)
        except Exception:
            if not self._failed:
                log.exception("frames of camera %r could not read a part of their past", self.session.view.stream)
            self._failed = True
            self.session.stats.unavailable += 1
            return None
        finally:
            self._waited.seconds += stats.waited_s - before

    def predict(self, layer: int, hidden: Tensor, counts: Sequence[int]) -> None:
        """Prefetch what ``hidden [r, D]``, ``counts`` rows per frame, will read in ``layer``; it lacks only the
        preceding MLP."""
        query = self._by_frame(self._model.projections(layer, hidden)[0].transpose(0, 1))
        self._count_scores(layer, query)
        self._flops += self._projection_flops * len(hidden)
        self.session.prefetch(layer, query, [self._group * count for count in counts])

    def _count_scores(self, layer: int, query: Tensor) -> None:
        """Count the FLOPs of scoring each row against each cluster's mean key."""
        if self.session.view.heads:
            clusters = sum(len(head.table) for head in self.session.view.heads[layer])
            self._flops += 2 * query.shape[1] * query.shape[2] * clusters


@dataclass(frozen=True, slots=True, eq=False)
class _FrameRows:
    """Rows of frames that attend in one call: ``frame [n]``: index of each row's frame in the pass; ``visible [n, s]``:
    mask of the window slots each row sees."""

    rows: slice
    frame: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlacedFrames:
    """Consecutive rows of a pass: frames of one stream that also attend to what they retrieve of their camera's past.

    * ``counts``: rows of each frame; ``rows``: their range in the pass
    * ``seen``: pool slots of the window, up to the last row
    * ``cos, sin`` ``[n, d]`` float32: of these rows
    """

    past: FramePast
    pieces: Sequence[_FrameRows]
    counts: Sequence[int]
    rows: slice
    seen: Tensor
    cos: Tensor
    sin: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """Write these rows' attention into ``out [n, H, d]``; ``query [H, n, d]``: of all rows of the pass; ``key,
        value``: see :meth:`Kernel.attend`."""
        kv_heads, size = key.shape[1:]
        raw = unrotate(query[:, self.rows], self.cos, self.sin)
        past_key, past_value, readers = self.past.retrieve(layer, raw, self.counts)
        keys, values = (
            shared(torch.cat([before, gathered(part, self.seen)], dim=1), len(query) // kv_heads)
            for before, part in ((past_key, key), (past_value, value))
        )
        for each in self.pieces:
            count, slots = each.visible.shape
            mask = torch.cat([readers[each.frame].transpose(0, 1), each.visible.expand(kv_heads, -1, -1)], dim=2)
            reach = past_key.shape[1] + slots
            attended = F.scaled_dot_product_attention(
                grouped(query[:, each.rows], kv_heads),
                keys[:, :, :reach],
                values[:, :, :reach],
                attn_mask=mask[:, None],
                scale=scale,
            )
            out[each.rows] = attended.permute(2, 0, 1, 3).reshape(count, -1, size)

    def predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch what these rows will retrieve in ``layer``; ``hidden [n, D]``: of all rows of the pass, after the
        previous layer's attention."""
        if self.past.session.prefetches:
            self.past.predict(layer, hidden[self.rows], self.counts)
