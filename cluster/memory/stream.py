"""What one stream remembers: frames come in, blocks of clusters lie in the tiers, and the cap is never exceeded.

Frames wait as they came until there are enough of them. Then, head by head, their tokens are put into clusters, every
cluster whose members changed is written to the tiers as a new block, and the head that names the new blocks takes the
place of the one before. While the lowest tier cannot be asked, frames wait, and beyond what the cap allows the oldest
that wait are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cluster.memory.compress.base import Compressor
from cluster.memory.head import Change, GoneError, Head, KVChunk, LayerKV, Load, OutOfReachError
from cluster.memory.manifest import (
    DTYPES,
    PART_BYTES,
    FrameLog,
    Manifest,
    block_bytes,
    byte_blocks,
    dump_tensors,
    load_parts,
    whole_numbers,
)
from cluster.memory.organise.base import NewTokens
from cluster.memory.organise.mosaic import VisualPartitions
from cluster.memory.room import make_room
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import StoredBlocks
from cluster.registry import compressors, organisers
from cluster.types import MICROSECONDS, MemorySpec, MemoryStatus

log = logging.getLogger(__name__)

# Share of the cap that frames which wait may take, in any case; and that a saved window may.
_WAITING = 8
_WINDOW = 8
# About as many bytes of blocks, and blocks, go to the tiers in one call, which has a deadline.
_BATCH_BYTES, _BATCH = 2**20, 256
# A head's index takes no more than so much of what its tensors take, as tiers round it up.
_INDEX = 1.3


@dataclass(slots=True)
class MemoryCounts:
    """What happened: ``frames`` that came, blocks of them that were ``settled``, tokens of all layers and heads."""

    frames: int = 0
    settled: int = 0
    compressions: int = 0
    compressed_away: int = 0
    lost: int = 0
    frames_dropped: int = 0
    windows_not_saved: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Of a model's KV, as a memory keeps it: ``layers``, key ``heads`` of each, ``width`` of a key."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """A memory as it was at one moment, for who reads it while it goes on; nothing in it changes.

    ``heads`` by layer; ``recent``: frames that wait; ``first_frame``: older ones are forgotten.
    """

    stream: str
    heads: tuple[tuple[Head, ...], ...]
    recent: tuple[KVChunk, ...]
    log: FrameLog
    first_frame: int
    generation: int


class StreamMemory:
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
        self.stream, self.spec, self.tiers = stream, spec, tiers
        self.shape = shape
        self.give_way = give_way
        self.heads: list[list[Head]] = []
        self.recent: list[KVChunk] = []
        self.counts = MemoryCounts()
        self.rows = self.columns = 1
        self.log = FrameLog()
        self.partition_of: dict[int, int] = {}
        self.partitions: VisualPartitions | None = None
        # Of each view that is read, the generation of its blocks.
        self._readers: list[int] = []
        self.stored = StoredBlocks(stream, tiers, self._readers)
        # Whether it is known what the lowest tier has of another process, and is taken over.
        self.known = False
        # Whether the manifest in the lowest tier is of an earlier moment.
        self.unsaved = False
        # Frames before it are forgotten.
        self.first_frame = 0
        self.waiting_bytes = 0
        # Heads with their new blocks, to be stored together.
        self._ready: list[tuple[int, int, Head, list[tuple[BlockKey, Block]]]] = []
        self._ready_bytes = 0
        # By layer and head: the blocks that hold the index; and of those whose index changed since, about its bytes.
        self._parts: dict[tuple[int, int], list[BlockKey]] = {}
        self._unwritten: dict[tuple[int, int], int] = {}
        self._window: list[BlockKey] = []
        # Time of the newest frame that a restored memory holds although it may still be in the restored window.
        self._seen: int | None = None
        self._skipped: int | None = None
        # Frames before this time of the camera are forgotten, also those that are not known yet.
        self._forget_past: int | None = None
        self._gone: list[tuple[int, int, int]] = []
        self._failed_upto = -1
        # Raw query rows of who asked last, per layer; kept off the device, where those of every stream would be much.
        self._asked: list[Tensor] = []
        self.exclusive = threading.RLock()
        self._lock = threading.Lock()
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

    def time_of(self, pts: int) -> int:
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

    def pts_of(self, frame: int) -> int:
        """Time (microseconds) of a frame of which something is held."""
        return self.log.at(frame)

    def frames_since(self, pts: int) -> int:
        """Number of the first frame at or after ``pts``."""
        with self._lock:
            return self.log.since(pts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.shape is None else self.shape.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head: key, value, frame and cell."""
        assert self.shape is not None
        return 2 * self.shape.width * self.shape.dtype.itemsize + 8

    @property
    def window_limit(self) -> int:
        """Most bytes that a saved window may have."""
        return self.spec.cap_bytes // _WINDOW

    @property
    def limit(self) -> int:
        """Most bytes that blocks, index and window may take, of one version or two: what the cap leaves beside frames
        that wait."""
        cap = min(self.spec.cap_bytes, self.tiers.capacity(self.stream))
        return cap - cap // _WAITING

    def view(self) -> MemoryView:
        """As it is now. Blocks that it names are kept until :meth:`close_view`."""
        with self._lock:
            heads = tuple(tuple(row) for row in self.heads)
            times = FrameLog(list(self.log.numbers), list(self.log.times), self.log.following, self.log.shift)
            view = MemoryView(self.stream, heads, tuple(self.recent), times, self.first_frame, self.stored.generation)
            self._readers.append(view.generation)
        return view

    def close_view(self, view: MemoryView, gone: Sequence[tuple[int, int, int]] = ()) -> None:
        """A view is not read any more; ``gone``: layer, head and cluster (uid) of blocks that turned out to be gone."""
        with self._lock:
            self._readers.remove(view.generation)
            self._gone += gone

    # -- frames in --------------------------------------------------------------------------------
    def add(self, chunk: KVChunk) -> None:
        """:meth:`accept`, and :meth:`settle` where that is due."""
        self.accept(chunk)
        if self.due:
            self.settle()

    @torch.inference_mode()
    def accept(self, chunk: KVChunk) -> None:
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
    def due(self) -> bool:
        """Whether enough frames wait."""
        return len(self.recent) >= self.spec.block_frames or self.waiting_bytes >= self.spec.cap_bytes // _WAITING

    def observe(self, queries: Sequence[Tensor]) -> None:
        """Raw queries per layer ``[Hkv, r, D]`` of who asked last, for compressors that go by them."""
        if self.wants_queries:
            self._asked = [rows.cpu() for rows in queries]
            self.compressor.observe(self._asked)

    @property
    def wants_queries(self) -> bool:
        """Whether what is kept depends on who asked last (:meth:`observe`)."""
        return self.compressor.wants_queries

    def change(self, spec: MemorySpec) -> None:
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
        if not self.stored.verify():
            self._unwritten.update({(layer, h): head.index_bytes for layer, h, head in self.every_head()})
            self.unsaved = True
        with self._lock:
            gone, self._gone = self._gone, []
        for layer, h, uid in gone:
            self.lose(layer, h, [uid])
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
                    self.partition_of[chunk.index] = self.partitions.add(chunk.look.cpu())
        new = joined_frames(frames)
        if self.spec.keep < 1:
            new = self.thinned(new, self.spec.keep)
        layers = make_room(self, new)
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

    def _added(self, number: int, h: int, layer: LayerKV, until: int, head: Head) -> Change:
        frame, cell = layer.frame[h].cpu(), layer.cell[h].cpu()
        # An earlier attempt may have got as far as this head.
        new = (frame >= head.settled).nonzero()[:, 0]
        head.settled = max(head.settled, until)
        if not len(new):
            return Change([], [])
        there = new.to(layer.key.device)
        tokens = NewTokens(
            key=layer.key[h][there],
            value=layer.value[h][there],
            frame=frame[new],
            place=self._place(frame[new], cell[new]),
            partition=torch.tensor([self.partition_of.get(n, 0) for n in frame[new].tolist()], dtype=torch.int64),
        )
        return head.add(tokens, cell[new], self.loader(number, h), self.loader(number, h, top=True))

    def _done(self, frames: Sequence[KVChunk]) -> None:
        """Frames that wait no longer."""
        done = {chunk.index for chunk in frames}
        with self._lock:
            self.recent = [chunk for chunk in self.recent if chunk.index not in done]
            self.waiting_bytes = sum(map(_bytes, self.recent))

    def _begin(self) -> None:
        assert self.shape is not None
        organiser = organisers.get(self.spec.organiser)
        self.compressor = self._compressor_of(self.spec)
        heads = [
            [
                Head(organiser(self.shape.width, **self.spec.organiser_options), self._place)
                for _ in range(self.shape.heads)
            ]
            for _ in range(self.shape.layers)
        ]
        if organiser.wants_partitions and self.recent:
            self.partitions = VisualPartitions(len(self.recent[0].look))
        with self._lock:
            self.heads = heads

    def _place(self, frame: Tensor, cell: Tensor) -> Tensor:
        row = torch.div(cell, self.columns, rounding_mode="floor")
        with self._lock:
            seconds = self.log.seconds(frame)
        return torch.stack([seconds.float(), row.float(), (cell - row * self.columns).float()], dim=1)

    def thinned(self, frames: list[LayerKV], share: float) -> list[LayerKV]:
        """What the compressor keeps of new frames that are to be taken in to ``share``."""
        budget = max(1, int(share * frames[0].tokens))
        chosen = self.compressor.select(frames, budget)
        self.counts.compressed_away += sum(
            layer.heads * (layer.tokens - stays.shape[1]) for layer, stays in zip(frames, chosen, strict=True)
        )
        return [layer.take(stays) for layer, stays in zip(frames, chosen, strict=True)]

    def _split_pending(self) -> None:
        """Clusters to split whose members are at hand are split now; the others when they were loaded for somebody."""
        for number, h, head in list(self.every_head()):
            for uid in head.table.uid[head.organiser.pending].tolist():
                self._change(number, h, partial(self._split, number, h, uid))

    def _split(self, number: int, h: int, uid: int, head: Head) -> Change:
        (cluster,) = head.numbers([uid])
        (loaded,) = self.loader(number, h, top=True)([int(head.table.block[cluster])])
        if loaded.block is None or not head.is_of(cluster, loaded.block):
            raise OutOfReachError
        return head.split(cluster, loaded.block)

    # -- forgetting -------------------------------------------------------------------------------
    @torch.inference_mode()
    def forget(self, *, before_frame: int | None = None) -> None:
        """Forget frames before a number, or everything: in every tier, and here. Nothing of them is read from now on;
        what a tier cannot do now is done later."""
        with self.exclusive:
            if before_frame is None:
                self.tiers.drop(self.stream)
                with self._lock:
                    self.heads, self.recent, self.log = [], [], FrameLog(following=self.log.following)
                    self.first_frame = self.log.following
                    self._gone = []
                    self._forget_stored()
                self.waiting_bytes, self.known = 0, False
                self.partition_of, self.partitions, self._seen = {}, None, None
                return
            with self._lock:
                self.first_frame = max(self.first_frame, before_frame)
                self.recent = [chunk for chunk in self.recent if chunk.index >= before_frame]
                self.waiting_bytes = sum(map(_bytes, self.recent))
                if not self.known and self.log.times:
                    # Of what is not known yet, too.
                    kept = [time for n, time in zip(self.log.numbers, self.log.times, strict=True) if n >= before_frame]
                    self._forget_past = (kept[0] if kept else self.log.times[-1] + 1) - self.log.shift
            if self.known and self._forget_old():
                self._trim_frames()
            with self._lock:
                self.log.forget_before(before_frame)

    def _forget_old(self) -> bool:
        self.publish()
        for number, h, head in list(self.every_head()):
            kept = (head.frame >= self.first_frame).nonzero()[:, 0]
            if len(kept) < head.tokens and not self.narrow(number, h, kept):
                return False
        return self.publish()

    def _expire(self) -> None:
        times = self.log.times
        if self.spec.retention_s is None or not times:
            return
        limit = times[-1] - round(self.spec.retention_s * MICROSECONDS)
        # In steps: forgetting rewrites blocks.
        if times[0] < limit - round(self.spec.retention_s * MICROSECONDS / 16):
            self.forget(before_frame=self.log.since(limit))

    def settled_frames(self) -> list[int]:
        """Numbers of the frames that are in clusters."""
        with self._lock:
            waiting = self.recent[0].index if self.recent else self.log.following
            return [number for number in self.log.numbers if number < waiting]

    def _trim_frames(self) -> None:
        """Frames of which nothing is held any more need no time."""
        held = [head.frame for _, _, head in self.every_head() if head.tokens]
        there = set(torch.unique(torch.cat(held)).tolist()) if held else set()
        with self._lock:
            there.update(chunk.index for chunk in self.recent)
            self.log.keep(there)
        self.partition_of = {frame: number for frame, number in self.partition_of.items() if frame in there}

    # -- blocks -----------------------------------------------------------------------------------
    def lose(self, layer: int, h: int, uids: Sequence[int]) -> None:
        """Blocks of clusters turned out to be gone for good (damaged, evicted, or of another memory)."""

        def lose(head: Head) -> Change:
            self.counts.lost += head.lose(uids)
            return Change([], [])

        # What waits to be stored may be of the head as it was.
        self.publish()
        self._change(layer, h, lose)
        self.publish()

    def narrow(self, layer: int, h: int, kept: Tensor, blocks: dict[int, Block] | None = None) -> bool:
        """Leave only the tokens ``kept`` (ascending numbers) of a head; ``blocks``: its own, if at hand. False where
        that cannot be done now."""

        def at_hand(numbers: list[int]) -> list[Loaded]:
            assert blocks is not None
            return [Loaded(Outcome.HIT, blocks[number]) for number in numbers]

        load = self.loader(layer, h) if blocks is None else at_hand
        return self._change(layer, h, lambda head: head.keep(kept, load))

    def _change(self, layer: int, h: int, work: Callable[[Head], Change]) -> bool:
        """Have a copy of a head changed; it takes the head's place with :meth:`publish`. False where that cannot be
        done now."""
        if any((layer, h) == ready[:2] for ready in self._ready) and not self.publish():
            return False
        self.give_way()
        while True:
            head = self.heads[layer][h].copy()
            try:
                change = work(head)
                break
            except GoneError as error:
                self.lose(layer, h, error.uids)
            except OutOfReachError:
                return False
        keys = [self.stored.new_key(layer, h) for _ in change.blocks]
        head.table.block[change.clusters] = torch.tensor([key.block for key in keys], dtype=torch.int64)
        nbytes = sum(cell_size(block.nbytes) for block in change.blocks)
        if nbytes + _INDEX * head.index_bytes > self._room() and not self.make_durable():
            return False
        if nbytes and nbytes + _INDEX * head.index_bytes > self._room():
            return False
        self._ready.append((layer, h, head, list(zip(keys, change.blocks, strict=True))))
        self._ready_bytes += nbytes
        full = self._ready_bytes >= _BATCH_BYTES or sum(len(items) for *_, items in self._ready) >= _BATCH
        return not full or self.publish()

    def _room(self) -> float:
        """Bytes that more blocks may take, once what is ready and the index of what changed are written."""
        index = sum(self._unwritten.values()) + sum(head.index_bytes for _, _, head, _ in self._ready)
        return self.limit - self.stored.nbytes - self._ready_bytes - _INDEX * index

    def publish(self) -> bool:
        """Store the new blocks of the heads that changed, and put these in the place of those before; False, and the
        changes are given up, where the lowest tier does not take the blocks."""
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        items = [item for *_, blocks in ready for item in blocks]
        self.give_way()
        if items and not self.stored.store(items):
            return False
        for layer, h, head, _ in ready:
            before = set(self.heads[layer][h].table.block.tolist())
            with self._lock:
                self.heads[layer][h] = head
                self.stored.replace(
                    BlockKey(self.stream, layer, h, number) for number in before - set(head.table.block.tolist())
                )
            self._unwritten[layer, h] = head.index_bytes
            self.unsaved = True
        return True

    def key_of(self, layer: int, h: int, cluster: int) -> BlockKey:
        """Where the block of cluster number ``cluster`` (of a head's table) lies."""
        return BlockKey(self.stream, layer, h, int(self.heads[layer][h].table.block[cluster]))

    def loader(self, layer: int, h: int, *, top: bool = False) -> Load:
        """What the tiers have of one head's blocks; ``top``: only what the uppermost has."""
        source = self.tiers.upper if top else self.tiers
        return lambda numbers: source.load([BlockKey(self.stream, layer, h, number) for number in numbers])

    def every_head(self) -> Iterator[tuple[int, int, Head]]:
        """(layer, head, what it holds)."""
        for number, heads in enumerate(self.heads):
            for h, head in enumerate(heads):
                yield number, h, head

    # -- saving and restoring ---------------------------------------------------------------------
    @torch.inference_mode()
    def save(self, window: bytes | None = b"") -> Outcome:
        """Write to the tiers what it takes to find the blocks again, then delete what it no longer names; ``HIT``: the
        lowest tier has it. ``window``: the engine's state of the stream at the moment when all that is settled had left
        it; None: that which is saved already stands."""
        with self.exclusive:
            if not self.known:
                return Outcome.RETRY
            if window is not None and not self._save_window(window):
                return Outcome.RETRY
            return Outcome.HIT if self._commit() else Outcome.RETRY

    def make_durable(self) -> bool:
        """:meth:`save` in the middle of changes, which makes room."""
        return self.publish() and self._commit()

    def _commit(self) -> bool:
        if self.unsaved:
            if not self._write_parts():
                return False
            if self.tiers.put_manifest(self.stream, self._manifest().dump()) is not Outcome.HIT:
                return False
            self.unsaved = False
            self.stored.acknowledged()
        self.stored.sweep()
        return True

    def _write_parts(self) -> bool:
        """Write the index of the heads whose index changed; False where the lowest tier does not take it."""
        items: list[tuple[BlockKey, Block]] = []
        parts: dict[tuple[int, int], list[BlockKey]] = {}
        changed = sorted(self._unwritten)
        for layer, h in changed:
            self.give_way()
            of_head = self._byte_items(dump_tensors(self.heads[layer][h].state()), layer, h)
            items += of_head
            parts[layer, h] = [key for key, _ in of_head]
            full = sum(block.nbytes for _, block in items) >= _BATCH_BYTES or len(items) >= _BATCH
            if not full and (layer, h) != changed[-1]:
                continue
            self.give_way()
            if not self.stored.store(items, copies=False):
                return False
            for at, keys in parts.items():
                self.stored.replace(self._parts.get(at, ()))
                self._parts[at] = keys
                del self._unwritten[at]
            items, parts = [], {}
        return True

    def _save_window(self, window: bytes) -> bool:
        if not window and not self._window:
            return True
        if len(window) > self.window_limit:
            self.counts.windows_not_saved += 1
            window = b""
        items = self._byte_items(window, 0, 0)
        if items and not self.stored.store(items, copies=False):
            return False
        self.stored.replace(self._window)
        self._window, self.unsaved = [key for key, _ in items], True
        return True

    def _byte_items(self, data: bytes, layer: int, h: int) -> list[tuple[BlockKey, Block]]:
        return [(self.stored.new_key(layer, h), block) for block in byte_blocks(data)]

    def _manifest(self) -> Manifest:
        """A memory as it is. Frames that wait are in no block and not in it: who restores goes on without them."""
        with self._lock:
            state = self.log.state()
        settled = len(self.settled_frames())
        header = {
            "layers": len(self.heads),
            "heads": len(self.heads[0]) if self.heads else 0,
            "width": 0 if self.shape is None else self.shape.width,
            "rows": self.rows,
            "columns": self.columns,
            "dtype": str(self.dtype).removeprefix("torch."),
            "organiser": self.spec.organiser,
            "first_frame": self.first_frame,
            "log": state | {"numbers": state["numbers"][:settled], "times": state["times"][:settled]},
            "partition_of": [[frame, partition] for frame, partition in self.partition_of.items()],
            "tokens": [head.tokens for _, _, head in self.every_head()],
            # A head that nothing was put into yet has none.
            "parts": [[key.block for key in self._parts.get((layer, h), ())] for layer, h, _ in self.every_head()],
            "window": [key.block for key in self._window],
        }
        return Manifest(header, {} if self.partitions is None else self.partitions.state())

    @torch.inference_mode()
    def restore(self, *, sweep: bool = True) -> Outcome:
        """Take over what the lowest tier holds of this stream. ``RETRY``: it cannot be asked now, and nothing is
        written before it was; ``MISS``: it holds nothing that can be gone on with. ``sweep``: what no manifest names is
        deleted."""
        with self.exclusive:
            if self.known:
                return Outcome.HIT if self.heads else Outcome.MISS
            outcome, data = self.tiers.manifest(self.stream)
            if outcome is Outcome.RETRY or outcome is Outcome.PENDING:
                return Outcome.RETRY
            found = False
            if data is not None:
                try:
                    found = self._take_over(data)
                except OutOfReachError:
                    return Outcome.RETRY
                except Exception as error:
                    log.warning("what the tiers hold of camera %r cannot be gone on with: %r", self.stream, error)
                self.counts.unreadable += not found
            self.known = True
            if sweep:
                self.stored.sweep()
            else:
                self.stored.leave_unlisted()
            return Outcome.HIT if found else Outcome.MISS

    def restored_window(self) -> bytes:
        """The window's state that was saved with what was restored; empty where there is none, or it cannot be had."""
        loaded = self.tiers.load(self._window)
        blocks = [one.block for one in loaded if one.block is not None]
        return block_bytes(blocks) if len(blocks) == len(loaded) else b""

    def _take_over(self, data: bytes) -> bool:
        """Become what a manifest says; False where there is none that is understood here.

        Raises:
            OutOfReachError: the blocks of the index cannot be had now.
            Exception: it contradicts itself, or this memory.
        """
        manifest = Manifest.load(data)
        if manifest is None or manifest.header["organiser"] != self.spec.organiser:
            return False
        header, tensors = manifest.header, manifest.tensors
        layers, per_layer = int(header["layers"]), int(header["heads"])
        shape = MemoryShape(layers, per_layer, int(header["width"]), DTYPES[header["dtype"]]) if layers else self.shape
        if self.shape is not None and shape != self.shape:
            raise ValueError(f"KV of {shape} is not that of {self.shape}")
        whole_numbers(header["tokens"], layers * per_layer)
        parts = [whole_numbers(part) for part in header["parts"]]
        if len(parts) != layers * per_layer:
            raise ValueError("another number of heads than it says")
        saved = FrameLog(**header["log"])
        whole_numbers([saved.following, saved.shift])
        if len(whole_numbers(saved.numbers)) != len(whole_numbers(saved.times)):
            raise ValueError("frames without times")
        pairs = [whole_numbers(pair, 2) for pair in header["partition_of"]]
        # Nothing of this memory has changed yet.
        before = self.shape, self.rows, self.columns, self.log
        self.shape, self.rows, self.columns, self.log = shape, int(header["rows"]), int(header["columns"]), saved
        try:
            if layers:
                self._begin()
            for number, h, head in self.every_head():
                at = number * per_layer + h
                keys = [BlockKey(self.stream, number, h, block) for block in parts[at]]
                self._take_head(number, h, head, keys, header["tokens"][at])
            partitions = VisualPartitions.restore(tensors) if tensors else None
        except BaseException:
            self.heads = []
            self.shape, self.rows, self.columns, self.log = before
            self._forget_stored()
            raise
        with self._lock:
            self.first_frame = int(header["first_frame"])
            if self._forget_past is not None:
                self.first_frame = max(self.first_frame, saved.since(self._forget_past + saved.shift))
            self.partition_of, self.partitions = {pair[0]: pair[1] for pair in pairs}, partitions
            self._window = [BlockKey(self.stream, 0, 0, block) for block in whole_numbers(header["window"])]
            # Frames that came while the past was unknown follow it.
            waiting, self.recent = self.recent, []
            for chunk in waiting:
                number, time = self.log.add(chunk.pts - before[3].shift)
                self.recent.append(replace(chunk, index=number, pts=time))
            if self._window and not waiting:
                self._seen, self._skipped = (saved.times[-1] - saved.shift if saved.times else None), None
        for key in self._window:
            self.stored.found(key, PART_BYTES)
        return True

    def _forget_stored(self) -> None:
        self.stored = StoredBlocks(self.stream, self.tiers, self._readers)
        self._parts, self._unwritten, self._window, self.unsaved = {}, {}, [], False

    def _take_head(self, layer: int, h: int, head: Head, keys: list[BlockKey], tokens: int) -> None:
        if not keys:
            if tokens:
                raise ValueError(f"{tokens} tokens without an index")
            return
        loaded = self.tiers.lowest.load(keys)
        blocks = [one.block for one in loaded if one.block is not None]
        if any(one.block is None and one.outcome is not Outcome.MISS for one in loaded):
            raise OutOfReachError
        if len(blocks) < len(keys):
            self.counts.lost += tokens
            self._unwritten[layer, h], self._parts[layer, h] = head.index_bytes, []
            self.unsaved = True
            return
        head.load_state(load_parts(block_bytes(blocks)))
        self._parts[layer, h] = keys
        for key, block in zip(keys, blocks, strict=True):
            self.stored.found(key, block.nbytes)
        for number, count in zip(head.table.block.tolist(), head.table.count.tolist(), strict=True):
            self.stored.found(BlockKey(self.stream, layer, h, number), count * self.token_bytes)


def joined_frames(block: Sequence[KVChunk]) -> list[LayerKV]:
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
