"""What one stream remembers: frames come in, blocks of clusters lie in the tiers, and the cap is never exceeded.

Frames wait as they came until there are enough of them. Then, head by head, their tokens are put into clusters, every
cluster whose members changed is written to the tiers as a new block, and the head that names the new blocks takes the
place of the one before. While the lowest tier cannot be asked, frames wait, and beyond what the cap allows the oldest
that wait are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cluster.memory.compress import Compressor
from cluster.memory.eviction import evict
from cluster.memory.head_memory import BlocksUnavailableError, HeadChange, HeadMemory, KVChunk, LayerKV
from cluster.memory.manifest import (
    FrameLog,
)
from cluster.memory.organise import NewTokens
from cluster.memory.organise.mosaic import VisualPartitions
from cluster.memory.tiered_heads import WAITING, MemoryShape, TieredHeads
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.registry import compressors, organisers
from cluster.types import MICROSECONDS, MemorySpec, MemoryStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """A memory as it was at one moment, for who reads it while it goes on; nothing in it changes.

    ``heads`` by layer; ``recent``: frames that wait; ``first_frame``: older ones are forgotten.
    """

    stream: str
    heads: tuple[tuple[HeadMemory, ...], ...]
    recent: tuple[KVChunk, ...]
    log: FrameLog
    first_frame: int
    generation: int


class StreamMemory(TieredHeads):
    """The memory of one stream.

    One thread hands frames in (:meth:`accept`, :meth:`observe`) and reads (:meth:`view`); what takes time may run on
    another (:meth:`settle`, :meth:`save`, :meth:`forget`), one call of these at a time.

    Args:
        stream: its name.
        spec: how it remembers.
        tiers: where blocks lie; other streams share them.
        shape: of the model's KV; what another process left in another shape is not gone on with.
        give_way: called between two pieces of what takes time.
    """

    def __init__(
        self,
        stream: str,
        spec: MemorySpec,
        tiers: TierStack,
        shape: MemoryShape | None = None,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(stream, spec, tiers, shape, give_way)
        self.recent: list[KVChunk] = []
        self.waiting_bytes = 0
        # Time of the newest frame that a restored memory holds although it may still be in the restored window.
        self._seen: int | None = None
        self._skipped: int | None = None
        # Frames before this time of the camera are forgotten, also those that are not known yet.
        self._forget_past: int | None = None
        self._gone: list[tuple[int, int, int]] = []
        self._failed_upto = -1
        # Raw query rows of who asked last, per layer; kept off the device, where those of every stream would be much.
        self._asked: list[Tensor] = []
        # Fails on an unknown name or option before the first frame comes.
        self.compressor = self._compressor_of(spec)

    # -- what is held -----------------------------------------------------------------------------
    @property
    def tokens(self) -> int:
        """Tokens of all layers and heads."""
        with self._lock:
            heads, recent = [head for row in self.heads for head in row], list(self.recent)
        waiting = sum(chunk.tokens * chunk.key.shape[0] * chunk.key.shape[1] for chunk in recent)
        return sum(head.tokens for head in heads) + waiting

    @property
    def oldest(self) -> int | None:
        """Time (microseconds) of the oldest frame of which anything is held."""
        with self._lock:
            return self.log.times[0] if self.log.times else None

    @property
    def newest(self) -> int | None:
        """Time (microseconds) of the newest frame that came in."""
        with self._lock:
            return self.log.times[-1] if self.log.times else None

    def memory_time(self, pts: int) -> int:
        """The camera's time as the memory counts it."""
        return self.log.time_of(pts)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks and index in the lowest tier, and of the frames that wait."""
        return self.stored.nbytes + self.waiting_bytes

    @property
    def frames(self) -> int:
        """Frames of which anything is held."""
        return len(self.log)

    def status(self) -> MemoryStatus:
        """What there is and how it is."""
        return MemoryStatus(
            camera=self.stream,
            frames=self.frames,
            tokens=self.tokens,
            oldest=self.oldest or 0,
            newest=self.newest or 0,
            cap_bytes=self.spec.cap_bytes,
            tier_bytes={"recent": self.waiting_bytes, **self.tiers.usage(self.stream)},
            compressor=self.spec.compressor,
            organiser=self.spec.organiser,
            retriever=self.spec.retriever,
            counts=asdict(self.counts),
            tier_states={name: state.trouble for name, state in self.tiers.states().items()},
        )

    def frame_time(self, frame: int) -> int:
        """Time (microseconds) of a frame of which something is held."""
        return self.log.frame_time(frame)

    def frames_since(self, pts: int) -> int:
        """Number of the first frame at or after ``pts``."""
        with self._lock:
            return self.log.first_frame_since(pts)

    def open_view(self) -> MemoryView:
        """As it is now. Blocks that it names are kept until :meth:`close_view`."""
        with self._lock:
            heads = tuple(tuple(row) for row in self.heads)
            times = FrameLog(list(self.log.numbers), list(self.log.times), self.log.next_number, self.log.shift)
            view = MemoryView(self.stream, heads, tuple(self.recent), times, self.first_frame, self.stored.generation)
            self._readers.append(view.generation)
        return view

    def close_view(self, view: MemoryView, gone: Sequence[tuple[int, int, int]] = ()) -> None:
        """A view is not read any more; ``gone``: layer, head and cluster (uid) of blocks that turned out to be gone."""
        with self._lock:
            self._readers.remove(view.generation)
            self._gone += gone

    # -- frames in --------------------------------------------------------------------------------
    def add_chunk(self, chunk: KVChunk) -> None:
        """:meth:`accept`, and :meth:`settle` where that is due."""
        self.accept_chunk(chunk)
        if self.settle_due:
            self.settle()

    @torch.inference_mode()
    def accept_chunk(self, chunk: KVChunk) -> None:
        """Take in one frame that left the window, after all that left before; it gets a number and time of the memory's
        own (:class:`FrameLog`), and waits.

        Raises:
            ValueError: its KV has another shape than that of the frames before.
        """
        layers, heads, _, width = chunk.key.shape
        shape = MemoryShape(layers, heads, width, chunk.key.dtype)
        if self.shape is None:
            self.shape = shape
        elif self.shape != shape:
            raise ValueError(f"KV {tuple(chunk.key.shape)} of {self.stream} does not fit a memory of other shape")
        self.counts.frames += 1
        with self._lock:
            if self._seen is not None:
                # Still in the window that was restored, and in the memory already; unless the clock was set back.
                was, self._seen = self._seen, None
                if chunk.pts <= was and (self._skipped is None or chunk.pts > self._skipped):
                    self._seen, self._skipped = was, chunk.pts
                    return
            if not self.log.times:
                self.rows, self.columns = chunk.rows, chunk.columns
            number, time = self.log.add(chunk.pts)
            self.recent.append(replace(chunk, index=number, pts=time))
            self.waiting_bytes += _bytes(chunk)
            while self.recent and self.held_bytes > self.spec.cap_bytes:
                self.counts.frames_dropped += 1
                self.waiting_bytes -= _bytes(self.recent.pop(0))

    @property
    def settle_due(self) -> bool:
        """Whether enough frames wait."""
        return len(self.recent) >= self.spec.block_frames or self.waiting_bytes >= self.spec.cap_bytes // WAITING

    def observe_queries(self, queries: Sequence[Tensor]) -> None:
        """Raw queries per layer ``[Hkv, r, D]`` of who asked last, for compressors that go by them."""
        if self.wants_queries:
            self._asked = [rows.cpu() for rows in queries]
            self.compressor.observe(self._asked)

    @property
    def wants_queries(self) -> bool:
        """Whether what is kept depends on who asked last (:meth:`observe`)."""
        return self.compressor.wants_queries

    def change_spec(self, spec: MemorySpec) -> None:
        """Other settings from here on; the organiser stays."""
        self.spec, self.compressor = spec, self._compressor_of(spec)

    def compressor_of_head(self, h: int) -> Compressor:
        """For tokens of one key head: one that is told only of the rows that ask this head."""
        return self._compressor_of(self.spec, slice(h, h + 1))

    def _compressor_of(self, spec: MemorySpec, heads: slice = slice(None)) -> Compressor:
        compressor: Compressor = compressors.get(spec.compressor)(self.columns, **spec.compressor_options)
        compressor.observe([rows[heads] for rows in self._asked])
        return compressor

    @torch.inference_mode()
    def settle(self, upto: int | None = None) -> bool:
        """Put the frames that wait into clusters and write them to the tiers; ``upto``: up to this frame. False where
        they go on waiting.

        Raises:
            Exception: whatever went wrong. What was held is as it was, but for a compression that was due; frames that
                fail twice are dropped.
        """
        with self.exclusive:
            if self.restore() is Outcome.RETRY or not self.tiers.lowest.state().up:
                return False
            with self._lock:
                frames = [chunk for chunk in self.recent if upto is None or chunk.index <= upto]
            try:
                return self._settle(frames)
            except Exception:
                self._ready, self._ready_bytes = [], 0
                if frames and frames[0].index <= self._failed_upto:
                    self.counts.frames_dropped += len(frames)
                    self._done(frames)
                self._failed_upto = frames[-1].index if frames else -1
                raise

    def _settle(self, frames: list[KVChunk]) -> bool:
        # What an attempt before got done, or is done again: what follows goes by the heads as they are.
        self.publish()
        if not self.stored.verify_lowest_tier():
            self._unwritten.update({(layer, h): head.index_bytes for layer, h, head in self.iter_heads()})
            self.unsaved = True
        with self._lock:
            gone, self._gone = self._gone, []
        for layer, h, uid in gone:
            self.drop_lost_clusters(layer, h, [uid])
        self._expire()
        if not self._forget_old():
            return False
        # What was forgotten just now does not wait any more.
        frames = [chunk for chunk in frames if chunk.index >= self.first_frame]
        if frames and not self._take_in(frames):
            return False
        self._split_pending()
        if not self.publish():
            return False
        self._trim_frames()
        return True

    def _take_in(self, frames: list[KVChunk]) -> bool:
        if not self.heads:
            self._begin()
        if self.partitions is not None:
            for chunk in frames:
                if chunk.index not in self.partition_of:
                    self.partition_of[chunk.index] = self.partitions.add(chunk.mean_embedding.cpu())
        new = join_frames(frames)
        if self.spec.keep < 1:
            new = self.compress_frames(new, self.spec.keep)
        layers = evict(self, new)
        if layers is None:
            return False
        until = frames[-1].index + 1
        for number, layer in enumerate(layers):
            for h in range(layer.heads):
                if not self._change(number, h, partial(self._added, number, h, layer, until)):
                    return False
        if not self.publish():
            return False
        self._done(frames)
        self.counts.settled += 1
        return True

    def _added(self, number: int, h: int, layer: LayerKV, until: int, head: HeadMemory) -> HeadChange:
        frame, cell = layer.frame[h].cpu(), layer.cell[h].cpu()
        # An earlier attempt may have got as far as this head.
        new = (frame >= head.settled).nonzero()[:, 0]
        head.settled = max(head.settled, until)
        if not len(new):
            return HeadChange([], [])
        there = new.to(layer.key.device)
        tokens = NewTokens(
            key=layer.key[h][there],
            value=layer.value[h][there],
            frame=frame[new],
            place=self._place(frame[new], cell[new]),
            partition=torch.tensor([self.partition_of.get(n, 0) for n in frame[new].tolist()], dtype=torch.int64),
        )
        return head.add_tokens(tokens, cell[new], self.block_loader(number, h), self.block_loader(number, h, top=True))

    def _done(self, frames: Sequence[KVChunk]) -> None:
        """Frames that wait no longer."""
        done = {chunk.index for chunk in frames}
        with self._lock:
            self.recent = [chunk for chunk in self.recent if chunk.index not in done]
            self.waiting_bytes = sum(map(_bytes, self.recent))

    def _begin(self) -> None:
        self.compressor = self._compressor_of(self.spec)
        super()._begin()
        if organisers.get(self.spec.organiser).wants_partitions and self.recent:
            self.partitions = VisualPartitions(len(self.recent[0].mean_embedding))

    def _go_on(self, saved: FrameLog, before: FrameLog, first_frame: int) -> None:
        self.first_frame = first_frame
        if self._forget_past is not None:
            self.first_frame = max(self.first_frame, saved.first_frame_since(self._forget_past + saved.shift))
        waiting, self.recent = self.recent, []
        for chunk in waiting:
            number, time = self.log.add(chunk.pts - before.shift)
            self.recent.append(replace(chunk, index=number, pts=time))
        if self._window and not waiting:
            self._seen, self._skipped = (saved.times[-1] - saved.shift if saved.times else None), None

    def compress_frames(self, frames: list[LayerKV], share: float) -> list[LayerKV]:
        """What the compressor keeps of new frames that are to be taken in to ``share``."""
        budget = max(1, int(share * frames[0].tokens))
        chosen = self.compressor.select(frames, budget)
        self.counts.compressed_away += sum(
            layer.heads * (layer.tokens - stays.shape[1]) for layer, stays in zip(frames, chosen, strict=True)
        )
        return [layer.select(stays) for layer, stays in zip(frames, chosen, strict=True)]

    def _split_pending(self) -> None:
        """Clusters to split whose members are at hand are split now; the others when they were loaded for somebody."""
        for number, h, head in list(self.iter_heads()):
            for uid in head.table.uid[head.organiser.pending].tolist():
                self._change(number, h, partial(self._split, number, h, uid))

    def _split(self, number: int, h: int, uid: int, head: HeadMemory) -> HeadChange:
        (cluster,) = head.cluster_numbers([uid])
        (loaded,) = self.block_loader(number, h, top=True)([int(head.table.block[cluster])])
        if loaded.block is None or not head.matches_cluster(cluster, loaded.block):
            raise BlocksUnavailableError
        return head.split_cluster(cluster, loaded.block)

    # -- forgetting -------------------------------------------------------------------------------
    @torch.inference_mode()
    def delete_frames(self, *, before_frame: int | None = None) -> None:
        """Forget frames before a number, or everything: in every tier, and here. Nothing of them is read from now on;
        what a tier cannot do now is done later."""
        with self.exclusive:
            if before_frame is None:
                self.tiers.drop(self.stream)
                with self._lock:
                    self.heads, self.recent, self.log = [], [], FrameLog(next_number=self.log.next_number)
                    self.first_frame = self.log.next_number
                    self._gone = []
                    self._forget_stored()
                self.waiting_bytes, self.restored = 0, False
                self.partition_of, self.partitions, self._seen = {}, None, None
                return
            with self._lock:
                self.first_frame = max(self.first_frame, before_frame)
                self.recent = [chunk for chunk in self.recent if chunk.index >= before_frame]
                self.waiting_bytes = sum(map(_bytes, self.recent))
                if not self.restored and self.log.times:
                    # Of what is not known yet, too.
                    kept = [time for n, time in zip(self.log.numbers, self.log.times, strict=True) if n >= before_frame]
                    self._forget_past = (kept[0] if kept else self.log.times[-1] + 1) - self.log.shift
            if self.restored and self._forget_old():
                self._trim_frames()
            with self._lock:
                self.log.delete_before(before_frame)

    def _forget_old(self) -> bool:
        self.publish()
        for number, h, head in list(self.iter_heads()):
            kept = (head.frame >= self.first_frame).nonzero()[:, 0]
            if len(kept) < head.tokens and not self.keep_tokens(number, h, kept):
                return False
        return self.publish()

    def _expire(self) -> None:
        times = self.log.times
        if self.spec.retention_s is None or not times:
            return
        limit = times[-1] - round(self.spec.retention_s * MICROSECONDS)
        # In steps: forgetting rewrites blocks.
        if times[0] < limit - round(self.spec.retention_s * MICROSECONDS / 16):
            self.delete_frames(before_frame=self.log.first_frame_since(limit))

    def settled_frames(self) -> list[int]:
        """Numbers of the frames that are in clusters."""
        with self._lock:
            waiting = self.recent[0].index if self.recent else self.log.next_number
            return [number for number in self.log.numbers if number < waiting]

    def _trim_frames(self) -> None:
        """Frames of which nothing is held any more need no time."""
        held = [head.frame for _, _, head in self.iter_heads() if head.tokens]
        there = set(torch.unique(torch.cat(held)).tolist()) if held else set()
        with self._lock:
            there.update(chunk.index for chunk in self.recent)
            self.log.keep_frames(there)
        self.partition_of = {frame: number for frame, number in self.partition_of.items() if frame in there}


def join_frames(block: Sequence[KVChunk]) -> list[LayerKV]:
    """Frames one after the other, layer by layer."""
    key = torch.cat([chunk.key for chunk in block], dim=2)
    value = torch.cat([chunk.value for chunk in block], dim=2)
    cell = torch.cat([chunk.cell for chunk in block])
    frame = torch.cat([torch.full_like(chunk.cell, chunk.index) for chunk in block])
    heads = key.shape[1]
    return [
        LayerKV(key[layer], value[layer], frame.expand(heads, -1), cell.expand(heads, -1)) for layer in range(len(key))
    ]


def _bytes(chunk: KVChunk) -> int:
    return chunk.key.nbytes + chunk.value.nbytes
