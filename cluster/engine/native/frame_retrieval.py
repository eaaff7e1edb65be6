"""Frames of a window read their camera's past: per layer, what their own queries retrieve, beside the window's slots.

The system prompt, the retrieved KV and the window's slots up to a row are one attention. The past lies before the
window on the positions that a question would give it, in the stream's own time, and the system prompt before that; so
with everything retrieved and nothing evicted this is causal attention over the whole stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.kernels import gathered, grouped, shared
from cluster.engine.native.memory_attention import rotate_retrieved
from cluster.engine.native.plan import SystemPrompt, WindowPlan
from cluster.engine.native.timeline import Timeline, room_before
from cluster.engine.window.kv import KVPool, rotate_wide, unrotate
from cluster.engine.window.planner import IntArray
from cluster.engine.window.stream import token_counts
from cluster.memory.frame_retrieval import FrameReads, FrameRetrieval
from cluster.memory.retrieval_session import RetrievalSession, RetrievedKV
from cluster.memory.stream import StreamMemory
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Waited:
    """Seconds that windows which are computed together have waited for blocks."""

    seconds: float = 0.0


def plan_with_past(
    model: VisionLanguageModel,
    system: SystemPrompt,
    memory: StreamMemory,
    policy: FrameRetrieval,
    plan: WindowPlan,
    waited: Waited,
) -> WindowPlan:
    """The plan of a window whose frames read the memory; the same where nothing is before it. To be closed with
    ``work.past``. ``waited``: of the windows that are computed with it."""
    if not len(plan.work.slots):
        return plan
    opened = memory.memory_time(plan.frames[0].pts)
    # A restored window, or one whose camera's clock was set back, may begin before frames of the memory end: a frame of
    # both would be attended to twice.
    before = memory.frames_since(opened)
    session = RetrievalSession(
        memory,
        policy.retriever(),
        before=before,
        prefetch=policy.prefetch,
        device=model.device,
        dtype=model.dtype,
    )
    with ExitStack() as unless_used:
        unless_used.callback(session.close)
        held = session.view.log.copy()
        held.delete_before(session.first_frame)
        held.delete_after(before - 1)
        if not held.numbers:
            return plan
        frame_s = plan.frames[0].duration / MICROSECONDS
        room = room_before(model, plan.places.next, frame_s, plan.frames[0].grid)
        timeline = Timeline.of(held.numbers, held.times, opened, frame_s=frame_s, room=room)
        past = FramePast(model, system, session, policy.deadline_s, waited, plan, timeline)
        unless_used.pop_all()
    return replace(plan, work=replace(plan.work, past=past))


class FramePast:
    """The past of one window's frames, during its passes; see :class:`~cluster.engine.native.forward.Past`.

    ``session``: which reads it.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        system: SystemPrompt,
        session: RetrievalSession,
        deadline_s: float,
        waited: Waited,
        plan: WindowPlan,
        timeline: Timeline,
    ) -> None:
        self.attended = 0.0
        self._frames = self._read_tokens = self._flops = 0
        self._model, self.session = model, session
        self._deadline_s, self._waited = deadline_s, waited
        self._timeline, self._grid = timeline.to(model.device), plan.frames[0].grid
        first = plan.frames[0]
        # Of the oldest frame, in the stream's own time.
        self._origin = first.time_s - timeline.length_s, first.slot - timeline.slots
        # Slots behind each frame.
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
        """What the frames have read so far."""
        stats, loads = self.session.stats, self.session.prefetcher.stats
        return FrameReads(
            frames=self._frames,
            # Waiting frames are held and read.
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
        """End the loads, and report what was lost to the memory."""
        # Windows do not wait for a tier that hangs.
        self.session.close(wait=False)

    def frame_of(self, slots: IntArray) -> IntArray:
        """Number, in the window, of the frame of each slot."""
        return np.searchsorted(self._ends, slots, side="right")

    def place(self, pool: KVPool, table: IntArray, slots: IntArray, row: int, cos: Tensor, sin: Tensor) -> PlacedFrames:
        """See :class:`~cluster.engine.native.forward.Past`."""
        frames, first = [], row
        for own in np.split(slots, np.flatnonzero(np.diff(self.frame_of(slots))) + 1):
            rows = slice(row, row + len(own))
            last = torch.from_numpy(own).to(pool.device)[:, None]
            visible = torch.arange(self._system, int(own[-1]) + 1, device=pool.device) <= last
            frames.append(_FrameRows(rows, visible))
            row += len(own)
        seen = pool.index(table[self._system : int(slots[-1]) + 1])
        return PlacedFrames(self, frames, seen, cos[first:row].float(), sin[first:row].float())

    def begin(self, layer: int, queries: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values ``[Hkv, s, d]`` and validity ``[Hkv, s]`` of what lies before the window, for the raw query rows
        ``[Hkv, r, d]`` of each frame in a layer."""
        self._frames += len(queries) if layer == 0 else 0
        self._count_scores(layer, queries)
        for query, recalled in zip(queries, self._fetched(layer, queries), strict=True):
            key, value = self._system_k[layer], self._system_v[layer]
            there = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
            if recalled is not None and recalled.tokens:
                self._read_tokens += recalled.count
                self.attended += recalled.count / len(key) * query.shape[1] / self._group
                turned = rotate_retrieved(
                    self._model, self.session.memory, recalled, self._timeline, self._grid, origin=self._origin
                )
                key, value = torch.cat([key, turned], dim=1), torch.cat([value, recalled.value], dim=1)
                there = torch.cat([there, recalled.valid], dim=1)
            yield key, value, there

    def _fetched(self, layer: int, queries: Sequence[Tensor]) -> Sequence[RetrievedKV | None]:
        """Of each frame; none where a tier fails: a window does without what a question would fail for."""
        stats = self.session.prefetcher.stats
        before = stats.waited_s
        try:
            return self.session.fetch_each(layer, queries, max(0.0, self._deadline_s - self._waited.seconds))
        except Exception:
            if not self._failed:
                log.exception("frames of camera %r do without a part of their past", self.session.view.stream)
            self._failed = True
            self.session.stats.unavailable += 1
            return [None] * len(queries)
        finally:
            self._waited.seconds += stats.waited_s - before

    @property
    def index_device(self) -> torch.device:
        """Where clusters are selected."""
        return self.session.index_device

    @property
    def predicts(self) -> bool:
        """See :class:`~cluster.engine.native.forward.Past`."""
        return self.session.prefetches

    def predict(self, layer: int, hidden: Tensor, counts: list[int]) -> None:
        """Prefetch what rows ``[r, D]`` of frames, of which each has so many, will read in a layer; they lack the MLP
        before it alone."""
        # One read of all frames by the host.
        query = self._model.raw_query(layer, hidden).transpose(0, 1).to(self.session.index_device)
        by_frame = [
            each.reshape(len(query) // self._group, -1, query.shape[2]) for each in torch.split(query, counts, dim=1)
        ]
        self._count_scores(layer, by_frame)
        self._flops += self._projection_flops * len(hidden)
        for each in by_frame:
            self.session.prefetch(layer, each)

    def _count_scores(self, layer: int, queries: Sequence[Tensor]) -> None:
        """Of each row with the mean key of each cluster."""
        if self.session.view.heads:
            clusters = sum(len(head.table) for head in self.session.view.heads[layer])
            self._flops += sum(2 * query.shape[1] * query.shape[2] for query in queries) * clusters


@dataclass(frozen=True, slots=True, eq=False)
class _FrameRows:
    """Rows of one frame in a pass, and the window's slots that each sees ``[n, s]``."""

    rows: slice
    visible: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlacedFrames:
    """Frames of one stream, side by side in a pass.

    * ``seen``: the pool's slots of the window, up to the last row
    * ``cos, sin`` ``[n, d]`` float32: of their rows
    """

    past: FramePast
    frames: Sequence[_FrameRows]
    seen: Tensor
    cos: Tensor
    sin: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """See :class:`~cluster.engine.native.forward.PastRows`."""
        kv_heads, size = key.shape[1:]
        rows = slice(self.frames[0].rows.start, self.frames[-1].rows.stop)
        # One read of all frames by the host.
        whole = unrotate(query[:, rows], self.cos, self.sin).to(self.past.index_device)
        raw = [
            each.reshape(kv_heads, -1, size)
            for each in torch.split(whole, [len(f.visible) for f in self.frames], dim=1)
        ]
        window = gathered(key, self.seen), gathered(value, self.seen)
        for each, (past_key, past_value, there) in zip(self.frames, self.past.begin(layer, raw), strict=True):
            count, slots = each.visible.shape
            own = grouped(query[:, each.rows], kv_heads)
            keys, values = (
                shared(torch.cat([before, part[:, :slots]], dim=1), own.shape[1])
                for before, part in zip((past_key, past_value), window, strict=True)
            )
            past_mask = there[:, None, None].expand(-1, 1, count, -1)
            mask = torch.cat([past_mask, each.visible.expand(kv_heads, 1, -1, -1)], dim=3)
            attended = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
            out[each.rows] = attended.permute(2, 0, 1, 3).reshape(count, -1, size)

    def predict(self, layer: int, hidden: Tensor) -> None:
        """See :class:`~cluster.engine.native.forward.PastRows`."""
        if self.past.predicts:
            rows = hidden[self.frames[0].rows.start : self.frames[-1].rows.stop]
            self.past.predict(layer, rows, [len(each.visible) for each in self.frames])
