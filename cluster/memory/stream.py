"""Memory of one stream: takes frames, stores clustered blocks in the tiers, never exceeds the byte cap.

Frames wait until ``block_frames`` have accumulated. Then, head by head, their tokens are clustered, each changed
cluster is written to the tiers as a new block, and the head that names the new blocks replaces the previous one. While
the lowest tier is unavailable, frames wait; beyond the cap the oldest waiting ones are dropped and counted.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from cluster.errors import UnavailableError
from cluster.memory.compress import Compressor
from cluster.memory.eviction import READ_S, Heads, delete_expired, evict, join_frames, not_deleted
from cluster.memory.head_memory import HeadChange, HeadMemory, KVChunk, LayerKV, MemoryShape, MemoryView
from cluster.memory.manifest import FrameLog, dump_tensors
from cluster.memory.organise import NewTokens
from cluster.memory.organise.mosaic import VisualPartitions
from cluster.memory.tiered_heads import INDEX, TieredHeads
from cluster.memory.tiers.stack import TierStack
from cluster.registry import compressors, organisers
from cluster.types import MemorySpec, MemoryStatus
from cluster.types.cameras import WAITING

log = logging.getLogger(__name__)


class StreamMemory(TieredHeads):
    """Memory of one stream.

    One thread adds frames (:meth:`accept_chunk`, :meth:`observe_queries`) and reads (:meth:`open_view`); another may do
    slow work (:meth:`settle`, :meth:`save`, :meth:`delete_frames`), one such call at a time.

    Args:
        stream: name of the stream.
        spec: compressor, organiser, retriever and limits.
        tiers: storage, shared with other streams.
        shape: of the model's KV; a stored memory of another shape is not restored.
        yield_to_engine: called between pieces of slow work.
    """

    def __init__(
        self,
        stream: str,
        spec: MemorySpec,
        tiers: TierStack,
        shape: MemoryShape | None = None,
        yield_to_engine: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(stream, spec, tiers, shape, yield_to_engine)
        self.recent = []
        # Time of the first frame this process received.
        self._first_time: int | None = None
        # Frames before this time are deleted, including those not restored yet.
        self._deleted_until: int | None = None
        # When the log's latest frame arrived or was restored.
        self.newest_s = time.monotonic()
        self._lost_clusters: list[tuple[int, int, int]] = []
        self._view_closed = threading.Condition(self._lock)
        self._failed_upto = -1
        # Number of the oldest waiting frames that are being clustered and must not be dropped.
        self._clustering = 0
        # Latest raw question rows per layer, on the CPU to save device memory.
        self._queries: list[Tensor] = []
        # Created here to fail early on an unknown name or option.
        self.compressor = self._compressor_of(spec)
        self._head_compressors: dict[int, Compressor] = {}

    # -- contents ---------------------------------------------------------------------------------
    @property
    def tokens(self) -> int:
        """Tokens of all layers and heads, waiting frames included."""
        with self._lock:
            heads, recent = [head for row in self.heads for head in row], list(self.recent)
        waiting = sum(chunk.tokens * chunk.key.shape[0] * chunk.key.shape[1] for chunk in recent)
        return sum(head.tokens for head in heads) + waiting

    @property
    def oldest(self) -> int | None:
        """Time (microseconds) of the oldest stored frame."""
        with self._lock:
            return self.log.times[0] if self.log.times else None

    @property
    def newest(self) -> int | None:
        """Time (microseconds) of the newest frame."""
        with self._lock:
            return self.log.times[-1] if self.log.times else None

    def next_time(self, pts: int, *, restarts: bool, patient: bool = False) -> int:
        """See :meth:`FrameLog.next_time`. Call once per frame, before it or a later one leaves the window."""
        with self._lock:
            silent_s, follows = time.monotonic() - self.newest_s, patient or self._first_time is None
            self.newest_s += silent_s
            found = self.log.next_time(pts, restarts=restarts, silent_s=silent_s, follows=follows)
            self._first_time = found if self._first_time is None else self._first_time
            return found

    def memory_time(self, pts: int) -> int:
        """Convert the camera's ``pts`` to the memory's clock; invalid if the camera's clock has restarted since."""
        return pts + self.log.shift

    @property
    def frames(self) -> int:
        return len(self.log)

    def status(self) -> MemoryStatus:
        """Contents and health, without calls to the tiers."""
        return MemoryStatus(
            camera=self.stream,
            frames=self.frames,
            tokens=self.tokens,
            oldest=self.oldest or 0,
            newest=self.newest or 0,
            cap_bytes=self.spec.cap_bytes,
            tier_bytes={"recent": self.waiting_bytes},
            compressor=self.spec.compressor,
            organiser=self.spec.organiser,
            retriever=self.spec.retriever,
            counts=asdict(self.counts),
            tier_states={name: state.trouble for name, state in self.tiers.states().items()},
        )

    def frames_since(self, pts: int) -> int:
        """Number of the first frame at or after ``pts``."""
        with self._lock:
            return self.log.first_frame_since(pts)

    def open_view(self) -> MemoryView:
        """Take a snapshot, whose blocks are kept until :meth:`close_view`."""
        with self._lock:
            heads = tuple(tuple(row) for row in self.heads)
            recent, generation = tuple(self.recent), self.stored.generation
            view = MemoryView(self.stream, heads, recent, self.log.copy(), self.first_frame, generation)
            self._readers.append(view.generation)
        return view

    def close_view(self, view: MemoryView, gone: Sequence[tuple[int, int, int]] = ()) -> None:
        """Release a snapshot. ``gone``: layer, head and uid of clusters whose blocks proved lost."""
        with self._lock:
            self._readers.remove(view.generation)
            self._lost_clusters += gone
            self._view_closed.notify_all()

    # -- frames in --------------------------------------------------------------------------------
    def add_chunk(self, chunk: KVChunk) -> None:
        """:meth:`accept_chunk`, then :meth:`settle` if due."""
        self.accept_chunk(chunk)
        if self.settle_due:
            self.settle()

    @torch.inference_mode()
    def accept_chunk(self, chunk: KVChunk) -> None:
        """Enqueue one frame that left the window, in time order; :class:`FrameLog` assigns its number. ``ValueError``
        if the shape of its KV differs from earlier frames'."""
        layers, heads, _, width = chunk.key.shape
        shape = MemoryShape(layers, heads, width, chunk.key.dtype)
        if self.shape is None:
            self.shape = shape
        elif self.shape != shape:
            raise ValueError(f"KV {tuple(chunk.key.shape)} of {self.stream} does not fit its memory's shape")
        self.counts.frames += 1
        if chunk.pts > self.log.latest:
            self.newest_s = time.monotonic()
        # The share that admission reserves on the device; beyond it (tier down, writer behind) frames move to the host.
        chunk = chunk.on_host() if self.device_bytes + chunk.nbytes > self.spec.cap_bytes // WAITING else chunk
        with self._lock:
            # The heads' compressor was made for their grid.
            if not self.heads and not self.log.times:
                self.rows, self.columns = chunk.rows, chunk.columns
            self._append(chunk)
            while len(self.recent) > self._clustering and self.held_bytes > self.cap_bytes:
                self.counts.drop_frames()
                del self.recent[self._clustering]

    def _append(self, chunk: KVChunk) -> None:
        """Append a frame, unless the restored memory already has it, as it may have of a restored window."""
        if not self.log.times or chunk.pts > self.log.times[-1]:
            self.recent.append(replace(chunk.on_grid(self.rows, self.columns), index=self.log.add(chunk.pts)))

    @property
    def settle_due(self) -> bool:
        return len(self.recent) >= self.spec.block_frames or self.waiting_bytes >= self.spec.cap_bytes // WAITING

    def observe_queries(self, queries: Sequence[Tensor]) -> None:
        """Record the latest question rows per layer ``[Hkv, r, D]``, before rotary, for compressors that use them."""
        if self.wants_queries:
            self._queries = list(torch.stack(list(queries)).cpu())
            self.compressor.observe(self._queries)

    @property
    def wants_queries(self) -> bool:
        return self.compressor.wants_queries

    def change_spec(self, spec: MemorySpec) -> None:
        """Change the settings; the organiser stays, and so does an unchanged compressor, with its state."""
        old, self.spec = self.spec, spec
        if (old.compressor, old.compressor_options) != (spec.compressor, spec.compressor_options):
            self.compressor, self._head_compressors = self._compressor_of(spec), {}

    def compressor_of_head(self, h: int) -> Compressor:
        """The compressor of one key head, which sees only that head's question rows."""
        found = self._head_compressors.get(h) or self._compressor_of(self.spec)
        found.observe([rows[h : h + 1] for rows in self._queries])
        self._head_compressors[h] = found
        return found

    def _compressor_of(self, spec: MemorySpec) -> Compressor:
        compressor: Compressor = compressors.get(spec.compressor)(self.columns, **spec.compressor_options)
        compressor.observe(self._queries)
        return compressor

    def _save_compressor(self) -> bool:
        """Store the compressors' state; without room for it, the previous one stays, which is still useful."""
        named = {"all": self.compressor} | {str(h): each for h, each in self._head_compressors.items()}
        state = {f"{whose}/{name}": part for whose, each in named.items() for name, part in each.state().items()}
        data = dump_tensors(state) if state else b""
        if hash(data) != self._compressor_hash and len(data) <= min(self.max_window_bytes, self._free_bytes() / INDEX):
            self._compressor_hash = hash(data)
            return self._put_bytes("compressor", data)
        return True

    def _load_compressor_state(self, state: dict[str, Tensor]) -> None:
        for whose in {name.partition("/")[0] for name in state}:
            own = {name.partition("/")[2]: part for name, part in state.items() if name.startswith(f"{whose}/")}
            (self.compressor if whose == "all" else self.compressor_of_head(int(whose))).load_state(own)

    @torch.inference_mode()
    def settle(self, upto: int | None = None) -> bool:
        """Cluster waiting frames up to number ``upto`` and write them to the tiers; False if they must keep waiting.

        Propagates exceptions of policies and tiers, leaving the memory unchanged except for a finished compression; a
        block of frames that fails twice is dropped.
        """
        with self.exclusive:
            if not self.take_over() or not self.tiers.lowest.state().up:
                return False
            upto = self.log.next_number if upto is None else upto
            try:
                return self._settle(upto)
            except Exception:
                self._ready, self._ready_bytes = [], 0
                block = self._next_block(upto)
                if block and block[0].index <= self._failed_upto:
                    self.counts.drop_frames(len(block))
                    self._remove_waiting(block)
                self._failed_upto = block[-1].index if block else -1
                raise
            finally:
                self._clustering = 0

    def _next_block(self, upto: int) -> list[KVChunk]:
        """The oldest waiting frames up to number ``upto``, at most ``block_frames``: after an outage many wait, and
        organisers and compressors need memory quadratic in the block."""
        with self._lock:
            block = [chunk for chunk in self.recent[: self.spec.block_frames] if chunk.index <= upto]
            self._clustering = len(block)
        return block

    def _settle(self, upto: int) -> bool:
        # Finish or discard an earlier attempt, so that the heads are current.
        self.publish()
        if not self.stored.verify_lowest_tier(self.manifest):
            self._unwritten.update({(layer, h): head.index_bytes for layer, h, head in self.iter_heads()})
            self.unsaved = True
        with self._lock:
            gone, self._lost_clusters = self._lost_clusters, []
        for layer, h, uid in gone:
            self.drop_lost_clusters(layer, h, [uid])
        delete_expired(self)
        if not self._delete_old():
            return False
        while frames := self._next_block(upto):
            if not self._cluster_frames(frames):
                return False
        self._split_pending()
        if not self.publish():
            return False
        if self.unsaved:
            # Only if a head has changed: open cameras are settled every second, and this scans every token.
            self._trim_frames()
        return True

    def _cluster_frames(self, frames: list[KVChunk]) -> bool:
        if not self.heads:
            heads = self._new_heads()
            with self._lock:
                self.heads = heads
        if self.partitions is not None:
            for chunk in frames:
                if chunk.index not in self.partition_of:
                    self.partition_of[chunk.index] = self.partitions.add(chunk.mean_embedding.cpu())
        new = evict(self, self._unsettled(frames))
        if new is None:
            return False
        until = frames[-1].index + 1
        for number, row in enumerate(new):
            for h, tokens in enumerate(row):
                if not self._change(number, h, partial(self._add_to_head, number, h, tokens, until)):
                    return False
        if not self.publish():
            return False
        self._remove_waiting(frames)
        self.counts.settled += 1
        return True

    def _unsettled(self, frames: Sequence[KVChunk]) -> Heads:
        """The frames' tokens per layer and head, without those that an earlier attempt stored, found without reading
        device data."""
        return [
            [
                layer.of_head(h, sum(chunk.tokens for chunk in frames if chunk.index < head.settled))
                for h, head in enumerate(heads)
            ]
            for layer, heads in zip(join_frames(frames), self.heads, strict=True)
        ]

    def _add_to_head(self, number: int, h: int, new: LayerKV, until: int, head: HeadMemory) -> HeadChange:
        head.settled = max(head.settled, until)
        if not new.tokens:
            return HeadChange([], [])
        frame = new.frame[0]
        tokens = NewTokens(
            key=new.key[0],
            value=new.value[0],
            frame=frame,
            partition=torch.tensor([self.partition_of.get(n, 0) for n in frame.tolist()], dtype=torch.int64),
        )
        return head.add_tokens(
            tokens, new.cell[0], new.weights[0], self.block_loader(number, h), self.block_loader(number, h, top=True)
        )

    def _remove_waiting(self, frames: Sequence[KVChunk]) -> None:
        done = {chunk.index for chunk in frames}
        with self._lock:
            self.recent = [chunk for chunk in self.recent if chunk.index not in done]

    def _new_heads(self) -> list[list[HeadMemory]]:
        self.compressor, self._head_compressors = self._compressor_of(self.spec), {}
        if organisers.get(self.spec.organiser).wants_partitions and self.recent:
            self.partitions = VisualPartitions(len(self.recent[0].mean_embedding))
        return super()._new_heads()

    def _append_waiting(self, saved: FrameLog, first_frame: int) -> None:
        before, self.log = self.log, saved
        if self._first_time is not None:
            # This clock, which started before the restore, has already timed windows, thumbnails and answers.
            saved.put_before(self._first_time)
            saved.shift, saved.latest = before.shift, before.latest
        self.first_frame, self._lost_clusters = first_frame, []
        if self._deleted_until is not None:
            self.first_frame = max(self.first_frame, saved.first_frame_since(self._deleted_until))
            saved.delete_before(self.first_frame)
        waiting, self.recent = self.recent, []
        for chunk in waiting:
            self._append(chunk)

    def _split_pending(self) -> None:
        """Merge and split pending clusters whose members are resident; others wait until they are loaded."""
        for number, h, head in list(self.iter_heads()):
            for uid in head.table.uid[head.organiser.pending].tolist():
                self._change(number, h, partial(self._split, number, h, uid))

    def _split(self, number: int, h: int, uid: int, head: HeadMemory) -> HeadChange:
        found = head.cluster_numbers([uid])
        if not found:
            # Already merged into another cluster.
            return HeadChange([], [])
        (cluster,) = found
        return head.split_cluster(cluster, self.block_loader(number, h, top=True))

    # -- deletion ---------------------------------------------------------------------------------
    @torch.inference_mode()
    def delete_frames(self, *, before_frame: int | None = None) -> None:
        """Delete frames before a number, or all, here and in every tier. They are never read again; an unavailable tier
        deletes them later."""
        with self.exclusive:
            if before_frame is None:
                confirmed = self.tiers.drop(self.stream, self.life) is not None
                with self._lock:
                    self.deleted = self.hidden if confirmed else self.deleted
                    self.heads, self.recent, self.log = [], [], self.log.without_frames()
                    self.first_frame = self.log.next_number
                    self._lost_clusters = []
                    self._reset_stored()
                self.restored = False
                self.partition_of, self.partitions = {}, None
                return
            with self._lock:
                self._hide_frames(before_frame)
            if self.restored and self.take_over() and self._delete_old():
                self._trim_frames()

    def hide_before(self, time: int) -> int:
        """Hide frames before a time from readers, including those not restored yet; the next :meth:`settle` and
        :meth:`save` delete them in the tiers. Callable concurrently with both. Returns ``hidden``."""
        with self._lock:
            self._deleted_until = time if self._deleted_until is None else max(time, self._deleted_until)
            self._hide_frames(self.log.first_frame_since(time))
            self.hidden += 1
            return self.hidden

    def _hide_frames(self, before_frame: int) -> None:
        self.first_frame = max(self.first_frame, before_frame)
        self.recent = [chunk for chunk in self.recent if chunk.index >= before_frame]
        self.log.delete_before(before_frame)

    def delete_read_blocks(self) -> None:
        """Wait for the views that may read replaced blocks to close, then delete those blocks; ``UnavailableError`` if
        some views stay open or a tier fails."""
        with self._view_closed:
            newest = self.stored.generation
            if not self._view_closed.wait_for(lambda: min(self._readers, default=newest) >= newest, READ_S):
                raise UnavailableError(
                    f"an answer still reads what camera {self.stream!r} is to forget; it is deleted when that ends"
                )
        with self.exclusive:
            self.stored.delete_unnamed()
            if not self.stored.deleted_everywhere(newest):
                raise not_deleted(self.stream)

    def _delete_old(self) -> bool:
        self.publish()
        compressor = self.spec.compressor
        for number, h, head in list(self.iter_heads()):
            first = int(torch.searchsorted(head.frame, self.first_frame))
            # Weights set by another compressor are meaningless to this one.
            weight = None if self._weighed_by == compressor else head.weight[:0]
            if not first and weight is None:
                continue
            if not self.keep_tokens(number, h, torch.arange(first, head.tokens), weight=weight):
                return False
        if not self.publish():
            return False
        self._weighed_by = compressor
        return True

    def _trim_frames(self) -> None:
        held = [head.frame for _, _, head in self.iter_heads() if head.tokens]
        there = set(torch.unique(torch.cat(held)).tolist()) if held else set()
        with self._lock:
            there.update(chunk.index for chunk in self.recent)
            self.log.keep_frames(there)
        self.partition_of = {frame: number for frame, number in self.partition_of.items() if frame in there}
