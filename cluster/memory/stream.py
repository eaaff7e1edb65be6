"""What one stream remembers: frames come in, blocks of clusters lie in the tiers, and the cap is never exceeded.

Frames wait as they came until a block of them is complete. Then, layer by layer and head by head, their tokens are put
into clusters, and every cluster whose members changed is written to the tiers as one block. When the cap would be
exceeded, the compressor says first which tokens stay. One thread makes all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from cluster.memory.chunk import KVChunk
from cluster.memory.compress import compressors
from cluster.memory.compress.base import Compressor
from cluster.memory.frame_log import FrameLog
from cluster.memory.head import Change, Head, Load
from cluster.memory.layer import LayerKV
from cluster.memory.manifest import Manifest, manifest_of, take_over
from cluster.memory.organise import organisers
from cluster.memory.organise.base import NewTokens
from cluster.memory.organise.partitions import VisualPartitions
from cluster.memory.room import make_room
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec, MemoryStatus

# Blocks of frames that may wait while the memory cannot be compressed; older frames are dropped then.
_WAITING_BLOCKS = 4
# Clusters of a head that may wait for their block to come into reach again; beyond it they are lost.
_TAILS = 256


@dataclass(slots=True)
class MemoryCounts:
    """What happened: ``frames`` that came, blocks of them that were ``settled``, tokens of all layers and heads."""

    frames: int = 0
    settled: int = 0
    compressions: int = 0
    compressed_away: int = 0
    lost: int = 0
    frames_dropped: int = 0


HeadChange = tuple[int, int, Change]
"""Layer, head, and what a call did to its blocks."""


class StreamMemory:
    """The memory of one stream.

    Args:
        stream: its name.
        spec: how it remembers.
        tiers: where blocks lie; other streams share them.
    """

    def __init__(self, stream: str, spec: MemorySpec, tiers: TierStack) -> None:
        self.stream, self.spec, self.tiers = stream, spec, tiers
        self.heads: list[list[Head]] = []
        self.recent: list[KVChunk] = []
        self.counts = MemoryCounts()
        self.rows = self.columns = 1
        self.dtype: torch.dtype = torch.float32
        self.log = FrameLog()
        self.partition_of: dict[int, int] = {}
        self.partitions: VisualPartitions | None = None
        # What each block takes, rounded up as host memory does: tiers far away are not asked for it at every frame.
        self._sizes: dict[BlockKey, int] = {}
        self.held_bytes = 0
        # Whether the manifest in the tiers is of an earlier moment.
        self.unsaved = False
        # Raw query rows of who asked last, per layer; kept off the device, where those of every stream would be much.
        self._asked: list[Tensor] = []
        # Fails on an unknown name or option before the first frame comes.
        self.compressor = self._compressor_of(spec)

    # -- what is held -----------------------------------------------------------------------------
    @property
    def tokens(self) -> int:
        """Tokens of all layers and heads."""
        settled = sum(head.tokens for _, _, head in self.every_head())
        return settled + sum(chunk.tokens * chunk.key.shape[0] * chunk.key.shape[1] for chunk in self.recent)

    @property
    def oldest(self) -> int | None:
        """Time (microseconds) of the oldest frame of which anything is held."""
        return self.log.times[0] if self.log.times else None

    @property
    def newest(self) -> int | None:
        """Time (microseconds) of the newest frame that came in."""
        return self.log.times[-1] if self.log.times else None

    def time_of(self, pts: int) -> int:
        """The camera's time as the memory counts it."""
        return self.log.time_of(pts)

    def nbytes(self) -> dict[str, int]:
        """Bytes of KV per tier, as each tier says, and of the frames that wait (``recent``)."""
        return {"recent": self.waiting_bytes, **self.tiers.usage(self.stream)}

    @property
    def waiting_bytes(self) -> int:
        """Bytes of KV that is in no block yet."""
        return sum(chunk.key.nbytes + chunk.value.nbytes for chunk in self.recent)

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
            tier_bytes=self.nbytes(),
            compressor=self.spec.compressor,
            organiser=self.spec.organiser,
            retriever=self.spec.retriever,
            counts=asdict(self.counts),
            tier_states={name: state.trouble for name, state in self.tiers.states().items()},
        )

    def pts_of(self, frame: int) -> int:
        """Time (microseconds) of a frame of which something is held."""
        return self.log.at(frame)

    def seconds(self, frame: Tensor) -> Tensor:
        """Times ``[n]`` float64 in seconds of frames ``[n]``."""
        return self.log.seconds(frame)

    def frames_since(self, pts: int) -> int:
        """Number of the first frame at or after ``pts``."""
        return self.log.since(pts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head: key, value, frame and cell."""
        return 2 * self.heads[0][0].organiser.table.mean.shape[1] * self.dtype.itemsize + 8

    # -- frames in --------------------------------------------------------------------------------
    @torch.inference_mode()
    def add(self, chunk: KVChunk) -> None:
        """Take in one frame that left the window, after all that left before; it gets a number and time of the memory's
        own (:class:`FrameLog`).

        Raises:
            ValueError: its KV has another shape than that of the frames before.
        """
        if not self.heads:
            self._begin(chunk)
        elif (len(self.heads), len(self.heads[0])) != chunk.key.shape[:2]:
            raise ValueError(f"KV {tuple(chunk.key.shape)} of {self.stream} does not fit a memory of other shape")
        number, time = self.log.add(chunk.pts)
        chunk = replace(chunk, index=number, pts=time)
        self.recent.append(chunk)
        self.counts.frames += 1
        if self.partitions is not None:
            self.partition_of[chunk.index] = self.partitions.add(chunk.look.cpu())
        if len(self.recent) >= self.spec.block_frames:
            self.settle()

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
        compressor = compressors.get(spec.compressor)(self.columns, **spec.compressor_options)
        compressor.observe([rows[heads] for rows in self._asked])
        return compressor

    @torch.inference_mode()
    def settle(self) -> None:
        """Put the frames that wait into clusters and write them to the tiers."""
        if not self.recent:
            return
        self._expire()
        frames = joined_frames(self.recent)
        if self.spec.keep < 1:
            frames = self.thinned(frames, self.spec.keep)
        room = make_room(self, frames)
        if room is None:
            # What would have to be compressed is out of reach: wait for it, but not with ever more.
            dropped = max(0, len(self.recent) - _WAITING_BLOCKS * self.spec.block_frames)
            self.counts.frames_dropped += dropped
            del self.recent[:dropped]
            return
        frames, self.recent = room, []
        changes: list[HeadChange] = []
        for number, (layer, heads) in enumerate(zip(frames, self.heads, strict=True)):
            for h, head in enumerate(heads):
                tokens = NewTokens(
                    key=layer.key[h],
                    value=layer.value[h],
                    frame=layer.frame[h].cpu(),
                    place=self._place(layer.frame[h].cpu(), layer.cell[h].cpu()),
                    partition=self._partition(layer.frame[h].cpu()),
                )
                load, resident = self.loader(number, h), self.loader(number, h, top=True)
                if head.tails:
                    self.carry_out([(number, h, head.join_tails(load, _TAILS))])
                changes.append((number, h, head.add(tokens, layer.cell[h].cpu(), load, resident)))
                for uid in list(head.tails)[_TAILS:]:
                    self.lose(number, h, uid)
        self.carry_out(changes)
        self.carry_out([change for number, h, _ in self.every_head() for change in self._splits(number, h)])
        self._trim_frames()
        self.counts.settled += 1
        self.tiers.flush(64)

    def _begin(self, chunk: KVChunk) -> None:
        layers, heads, _, width = chunk.key.shape
        self.rows, self.columns, self.dtype = chunk.rows, chunk.columns, chunk.key.dtype
        self.begin_heads(layers, heads, width)
        if organisers.get(self.spec.organiser).wants_partitions:
            self.partitions = VisualPartitions(len(chunk.look))

    def _place(self, frame: Tensor, cell: Tensor) -> Tensor:
        row = torch.div(cell, self.columns, rounding_mode="floor")
        return torch.stack([self.seconds(frame).float(), row.float(), (cell - row * self.columns).float()], dim=1)

    def _partition(self, frame: Tensor) -> Tensor:
        return torch.tensor([self.partition_of.get(number, 0) for number in frame.tolist()], dtype=torch.int64)

    def thinned(self, frames: list[LayerKV], share: float) -> list[LayerKV]:
        """What the compressor keeps of new frames that are to be taken in to ``share``."""
        budget = max(1, int(share * frames[0].tokens))
        chosen = self.compressor.select(frames, budget)
        self.counts.compressed_away += sum(
            layer.heads * (layer.tokens - stays.shape[1]) for layer, stays in zip(frames, chosen, strict=True)
        )
        return [layer.take(stays) for layer, stays in zip(frames, chosen, strict=True)]

    def _splits(self, layer: int, h: int) -> Iterator[HeadChange]:
        """Clusters to split whose members are at hand are split now; the others when they are next loaded."""
        head = self.heads[layer][h]
        uids = head.organiser.table.uid[head.organiser.pending].tolist()
        for uid, loaded in self.loader(layer, h, top=True)(uids).items() if uids else ():
            if loaded.block is not None:
                yield from self._split(layer, h, uid, loaded.block)

    # -- forgetting -------------------------------------------------------------------------------
    @torch.inference_mode()
    def forget(self, *, before_frame: int | None = None) -> None:
        """Forget frames before a number, or everything: in every tier, and here."""
        if before_frame is None:
            self.tiers.drop(self.stream)
            self._sizes, self.held_bytes = {}, 0
            self.heads, self.recent, self.log = [], [], FrameLog(following=self.log.following)
            self.partition_of, self.partitions = {}, None
            return
        self.recent = [chunk for chunk in self.recent if chunk.index >= before_frame]
        changes: list[HeadChange] = []
        for number, h, head in self.every_head():
            kept = (head.frame >= before_frame).nonzero()[:, 0]
            if len(kept) < head.tokens:
                changes.append((number, h, head.keep(kept, self.loader(number, h))))
        self.carry_out(changes)
        self.log.forget_before(before_frame)
        self._trim_frames()

    def _expire(self) -> None:
        times = self.log.times
        if self.spec.retention_s is None or not times:
            return
        limit = times[-1] - round(self.spec.retention_s * MICROSECONDS)
        # In steps: forgetting rewrites blocks.
        if times[0] < limit - round(self.spec.retention_s * MICROSECONDS / 16):
            self.forget(before_frame=self.log.since(limit))

    def _trim_frames(self) -> None:
        """Frames of which nothing is held any more need no time."""
        held = [head.frame for _, _, head in self.every_head() if head.tokens]
        parts = [*held, torch.tensor([chunk.index for chunk in self.recent], dtype=torch.int32)]
        there = set(torch.unique(torch.cat(parts)).tolist())
        self.log.keep(there)
        self.partition_of = {frame: number for frame, number in self.partition_of.items() if frame in there}

    # -- blocks -----------------------------------------------------------------------------------
    @torch.inference_mode()
    def lose(self, layer: int, h: int, uid: int) -> None:
        """A block turned out to be gone for good (damaged, evicted, or of another memory)."""
        self.counts.lost += self.heads[layer][h].lose(uid)
        self._drop([self._key(layer, h, uid)])

    @torch.inference_mode()
    def split_if_pending(self, layer: int, h: int, uid: int, block: Block) -> None:
        """A cluster that waited for being loaded is split, now that it is."""
        self.carry_out(list(self._split(layer, h, uid, block)))

    def _split(self, layer: int, h: int, uid: int, block: Block) -> Iterator[HeadChange]:
        head = self.heads[layer][h]
        table = head.organiser.table
        for cluster in (table.uid == uid).nonzero()[:, 0].tolist():
            if bool(head.organiser.pending[cluster]) and (whole := head.complete(uid, block)) is not None:
                yield layer, h, head.split(cluster, whole)

    def key_of(self, layer: int, h: int, cluster: int) -> BlockKey:
        """Where the block of cluster number ``cluster`` (of a head's table) lies."""
        return self._key(layer, h, int(self.heads[layer][h].organiser.table.uid[cluster]))

    def _key(self, layer: int, h: int, uid: int) -> BlockKey:
        return BlockKey(self.stream, layer, h, uid)

    def loader(self, layer: int, h: int, *, top: bool = False) -> Load:
        """What the tiers have of one head's clusters; ``top``: only what the uppermost has."""

        def load(uids: list[int]) -> dict[int, Loaded]:
            keys = [self._key(layer, h, uid) for uid in uids]
            loaded = self.tiers.upper.load(keys) if top else self.tiers.load(keys)
            return dict(zip(uids, loaded, strict=True))

        return load

    def carry_out(self, changes: Sequence[HeadChange]) -> None:
        """Write what heads' calls did to their blocks, in one call to the tiers for all of them."""
        self.unsaved |= bool(changes)
        self.counts.lost += sum(change.lost for _, _, change in changes)
        # Dropped first, so that what is stored never stands beside what it replaces.
        gone = [self._key(layer, h, uid) for layer, h, change in changes for uid in change.drop]
        if gone:
            self._drop(gone)
        items = []
        for layer, h, change in changes:
            for uid, block in change.store.items():
                self.note_size(layer, h, uid, block.nbytes)
                items.append((self._key(layer, h, uid), block))
        if items:
            self.tiers.store(items)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.held_bytes -= self._sizes.pop(key, 0)
        self.tiers.drop(self.stream, keys)

    def note_size(self, layer: int, h: int, uid: int, nbytes: int) -> None:
        """A block of so many bytes lies in the tiers."""
        key, size = self._key(layer, h, uid), cell_size(nbytes)
        self.held_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def every_head(self) -> Iterator[tuple[int, int, Head]]:
        """(layer, head, what it holds)."""
        for number, heads in enumerate(self.heads):
            for h, head in enumerate(heads):
                yield number, h, head

    # -- restoring --------------------------------------------------------------------------------
    def save(self, window: bytes = b"") -> Outcome:
        """Write to the tiers what it takes to find the blocks again; ``window``: the engine's state of the stream."""
        outcome = self.tiers.put_manifest(self.stream, manifest_of(self, window).dump())
        self.unsaved = outcome is not Outcome.HIT
        return outcome

    @torch.inference_mode()
    def restore(self) -> bytes | None:
        """Take over what the tiers hold of this stream; the window's state that was saved with it, None if nothing was
        found, or only what another organiser made."""
        _, data = self.tiers.manifest(self.stream)
        manifest = Manifest.load(data) if data is not None else None
        return manifest.window if manifest is not None and take_over(self, manifest) else None

    def begin_heads(self, layers: int, heads: int, width: int) -> None:
        """Nothing is held, in this shape."""
        organiser = organisers.get(self.spec.organiser)
        self.compressor = self._compressor_of(self.spec)
        self.heads = [
            [Head(organiser(width, **self.spec.organiser_options), self._place) for _ in range(heads)]
            for _ in range(layers)
        ]


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
