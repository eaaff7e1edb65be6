"""What one stream remembers: frames come in, blocks of clusters lie in the tiers, and the cap is never exceeded.

Frames wait as they came until a block of them is complete. Then, layer by layer and head by head, their tokens are put
into clusters, and every cluster whose members changed is written to the tiers as one block. When the cap would be
exceeded, the compressor says first which tokens stay. One thread makes all calls.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cluster.memory.chunk import KVChunk
from cluster.memory.compress import compressors
from cluster.memory.head import Change, Head, Load
from cluster.memory.layer import LayerKV
from cluster.memory.manifest import Manifest
from cluster.memory.organise import organisers
from cluster.memory.organise.base import NewTokens
from cluster.memory.organise.partitions import VisualPartitions
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, MemorySpec, MemoryStatus

# Blocks of frames that may wait while no tier takes any; older frames are dropped then.
_WAITING_BLOCKS = 4
# Of the room in the lowest tier, what is used; and how much more than the tokens before them new ones are taken to need,
# for they come in smaller clusters, which tiers round up more.
_ROUNDING = 0.9
_FRESH = 1.6
# Compressions in a row: thinner clusters do not always take less room.
_TRIES = 6


@dataclass(slots=True)
class MemoryCounts:
    """What happened: ``frames`` that came, blocks of them that were ``settled``, tokens of all layers and heads."""

    frames: int = 0
    settled: int = 0
    compressions: int = 0
    compressed_away: int = 0
    lost: int = 0
    frames_dropped: int = 0


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
        self._frames: list[int] = []
        self._pts: list[int] = []
        self._next = 0
        self._shift = 0
        self._partition_of: dict[int, int] = {}
        self._partitions: VisualPartitions | None = None
        # What each block takes, rounded up as host memory does: tiers far away are not asked for it at every frame.
        self._sizes: dict[BlockKey, int] = {}
        self.held_bytes = 0
        # Fails on an unknown name or option before the first frame comes.
        self._compressor = compressors.get(spec.compressor)(1, **spec.compressor_options)

    # -- what is held -----------------------------------------------------------------------------
    @property
    def tokens(self) -> int:
        """Tokens of all layers and heads."""
        settled = sum(head.tokens for _, _, head in self._every_head())
        return settled + sum(chunk.tokens * chunk.key.shape[0] * chunk.key.shape[1] for chunk in self.recent)

    @property
    def oldest(self) -> int | None:
        """Time (microseconds) of the oldest frame of which anything is held."""
        return self._pts[0] if self._pts else None

    @property
    def newest(self) -> int | None:
        """Time (microseconds) of the newest frame that came in."""
        return self._pts[-1] if self._pts else None

    def time_of(self, pts: int) -> int:
        """The camera's time as the memory counts it."""
        return pts + self._shift if self._pts else pts

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
        return len(self._frames)

    def status(self) -> MemoryStatus:
        """What there is and how it is."""
        states = self.tiers.states().items()
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
            tier_states={name: "" if state.up else state.reason for name, state in states},
        )

    def pts_of(self, frame: int) -> int:
        """Time (microseconds) of a frame of which something is held."""
        return self._pts[bisect.bisect_left(self._frames, frame)]

    def seconds(self, frame: Tensor) -> Tensor:
        """Times ``[n]`` float64 in seconds of frames ``[n]``."""
        numbers = torch.tensor(self._frames, dtype=torch.int64)
        times = torch.tensor(self._pts, dtype=torch.float64) / MICROSECONDS
        return times[torch.searchsorted(numbers, frame.to(torch.int64).cpu().contiguous())]

    def frames_since(self, pts: int) -> int:
        """Number of the first frame at or after ``pts``."""
        place = bisect.bisect_left(self._pts, pts)
        return self._frames[place] if place < len(self._frames) else (self._frames[-1] + 1 if self._frames else 0)

    # -- frames in --------------------------------------------------------------------------------
    @torch.inference_mode()
    def add(self, chunk: KVChunk) -> None:
        """Take in one frame that left the window, after all that left before.

        Frames are numbered anew: a camera whose decoder was restarted counts from 0 again.

        Raises:
            ValueError: its KV has another shape than that of the frames before.
        """
        if not self.heads:
            self._begin(chunk)
        elif (len(self.heads), len(self.heads[0])) != chunk.key.shape[:2]:
            raise ValueError(f"KV {tuple(chunk.key.shape)} of {self.stream} does not fit a memory of other shape")
        # A clock that was set back goes on from where it was: time in a memory never runs backwards.
        if self._pts and chunk.pts + self._shift <= self._pts[-1]:
            self._shift = self._pts[-1] + MICROSECONDS - chunk.pts
        chunk = replace(chunk, index=self._next, pts=chunk.pts + self._shift)
        self._next += 1
        self._frames.append(chunk.index)
        self._pts.append(chunk.pts)
        self.recent.append(chunk)
        self.counts.frames += 1
        if self._partitions is not None:
            self._partition_of[chunk.index] = self._partitions.add(chunk.look.cpu())
        if len(self.recent) >= self.spec.block_frames:
            self.settle()

    def observe(self, queries: Sequence[Tensor]) -> None:
        """Raw queries per layer ``[Hkv, r, D]`` of who asked last, for compressors that go by them."""
        self._compressor.observe(queries)

    def change(self, spec: MemorySpec) -> None:
        """Other settings from here on; the organiser stays."""
        compressor = compressors.get(spec.compressor)(self.columns, **spec.compressor_options)
        self.spec, self._compressor = spec, compressor

    @torch.inference_mode()
    def settle(self) -> None:
        """Put the frames that wait into clusters and write them to the tiers."""
        if not self.recent:
            return
        self._expire()
        if not self._can_write():
            limit = _WAITING_BLOCKS * self.spec.block_frames
            self.counts.frames_dropped += max(0, len(self.recent) - limit)
            del self.recent[: max(0, len(self.recent) - limit)]
            return
        frames = _joined(self.recent)
        if self.spec.keep < 1:
            frames = self._thinned(frames, self.spec.keep)
        frames = self._make_room(frames)
        self.recent = []
        for number, (layer, heads) in enumerate(zip(frames, self.heads, strict=True)):
            for h, head in enumerate(heads):
                tokens = NewTokens(
                    key=layer.key[h],
                    value=layer.value[h],
                    frame=layer.frame[h].cpu(),
                    place=self._place(layer.frame[h].cpu(), layer.cell[h].cpu()),
                    partition=self._partition(layer.frame[h].cpu()),
                )
                load, resident = self._loader(number, h), self._loader(number, h, top=True)
                self._apply(number, h, head.add(tokens, layer.cell[h].cpu(), load, resident))
                self._split_resident(number, h, resident)
        self._trim_frames()
        self.counts.settled += 1
        self.tiers.flush(64)

    def _begin(self, chunk: KVChunk) -> None:
        layers, heads, _, width = chunk.key.shape
        self.rows, self.columns, self.dtype = chunk.rows, chunk.columns, chunk.key.dtype
        self._compressor = compressors.get(self.spec.compressor)(chunk.columns, **self.spec.compressor_options)
        organiser = organisers.get(self.spec.organiser)
        self.heads = [
            [Head(organiser(width, **self.spec.organiser_options), self._place) for _ in range(heads)]
            for _ in range(layers)
        ]
        if self.spec.organiser == "mosaic":
            self._partitions = VisualPartitions(len(chunk.look))

    def _can_write(self) -> bool:
        """Whether the lowest tier works: while it does not, a cluster's old members may be out of reach."""
        states = list(self.tiers.states().values())
        return states[-1].up

    def _place(self, frame: Tensor, cell: Tensor) -> Tensor:
        row = torch.div(cell, self.columns, rounding_mode="floor")
        return torch.stack([self.seconds(frame).float(), row.float(), (cell - row * self.columns).float()], dim=1)

    def _partition(self, frame: Tensor) -> Tensor:
        return torch.tensor([self._partition_of.get(number, 0) for number in frame.tolist()], dtype=torch.int64)

    def _thinned(self, frames: list[LayerKV], share: float) -> list[LayerKV]:
        budget = max(1, int(share * frames[0].tokens))
        chosen = self._compressor.select(frames, budget)
        self.counts.compressed_away += sum(
            layer.heads * (layer.tokens - stays.shape[1]) for layer, stays in zip(frames, chosen, strict=True)
        )
        return [layer.take(stays) for layer, stays in zip(frames, chosen, strict=True)]

    def _split_resident(self, layer: int, h: int, resident: Load) -> None:
        """Clusters to split whose members are at hand are split now; the others when they are next loaded."""
        head = self.heads[layer][h]
        uids = head.organiser.table.uid[head.organiser.pending].tolist()
        for uid, block in resident(uids).items() if uids else ():
            self.split_if_pending(layer, h, uid, block)

    # -- room -------------------------------------------------------------------------------------
    def _make_room(self, frames: list[LayerKV]) -> list[LayerKV]:
        """Compress until these new frames fit below the cap; what of them is to be taken in."""
        capacity = min(self.spec.cap_bytes, self.tiers.capacity(self.stream)) * _ROUNDING
        wanted = self._bytes_of(frames)
        for _ in range(_TRIES):
            held = self.held_bytes
            if held + wanted <= capacity or not held:
                break
            self._compress(min(self.spec.target, max(0.1, 0.9 * (capacity - wanted) / held)))
            wanted = self._bytes_of(frames)
        settled = self._frames[: len(self._frames) - len(self.recent)]
        if self.held_bytes + wanted > capacity and settled:
            # As rounding may leave it for a cap of few blocks: the older half goes.
            self.forget(before_frame=settled[len(settled) // 2])
        room = capacity - self.held_bytes
        return frames if wanted <= room else self._thinned(frames, max(0.0, room / wanted))

    def _bytes_of(self, frames: Sequence[LayerKV]) -> float:
        """What more frames will take, going by what is held: tiers round blocks up, small ones most."""
        tokens = sum(layer.heads * layer.tokens for layer in frames)
        settled = sum(head.tokens for _, _, head in self._every_head())
        return _FRESH * tokens * max(self._token_bytes, self.held_bytes / settled if settled else 0.0)

    @property
    def _token_bytes(self) -> int:
        """Of one token of one head: key, value, frame and cell."""
        return 2 * self.heads[0][0].organiser.table.mean.shape[1] * self.dtype.itemsize + 8

    def _compress(self, share: float) -> None:
        self.counts.compressions += 1
        per_head = [[self._all_of(number, h) for h in range(len(heads))] for number, heads in enumerate(self.heads)]
        even = all(kv.tokens == heads[0].tokens for heads in per_head for kv in heads)
        if even:
            layers = [_stacked(heads) for heads in per_head]
            chosen = self._compressor.select(layers, int(share * layers[0].tokens))
            kept = [[stays[h] for h in range(len(stays))] for stays in chosen]
        else:
            # Heads that lost blocks hold fewer tokens than others: each is chosen from by itself.
            columns = [
                self._compressor.select([heads[h] for heads in per_head], int(share * min(k[h].tokens for k in per_head)))
                for h in range(len(per_head[0]))
            ]
            kept = [[columns[h][number][0] for h in range(len(columns))] for number in range(len(per_head))]
        for number, heads in enumerate(self.heads):
            for h, head in enumerate(heads):
                before = head.tokens
                self._apply(number, h, head.keep(kept[number][h].cpu(), self._loader(number, h)))
                self.counts.compressed_away += before - head.tokens

    def _all_of(self, layer: int, h: int) -> LayerKV:
        """All tokens of a head in time order, from the tiers; blocks that cannot be had are given up."""
        head = self.heads[layer][h]
        uids = torch.unique(head.uids()).tolist()
        blocks = self._loader(layer, h)(uids)
        for uid in uids:
            if uid not in blocks or len(blocks[uid]) != int((head.uids() == uid).sum()):
                self.counts.lost += head.lose(uid)
                self._drop([self._key(layer, h, uid)])
        at = head.uids()
        width = head.organiser.table.mean.shape[1]
        key = torch.empty(head.tokens, width, dtype=self.dtype)
        value = torch.empty_like(key)
        for uid in torch.unique(at).tolist():
            rows = (at == uid).nonzero()[:, 0]
            key[rows], value[rows] = blocks[uid].key.cpu(), blocks[uid].value.cpu()
        return LayerKV(key[None], value[None], head.frame[None].to(torch.int64), head.cell[None].to(torch.int64))

    # -- forgetting -------------------------------------------------------------------------------
    @torch.inference_mode()
    def forget(self, *, before_frame: int | None = None) -> None:
        """Forget frames before a number, or everything: in every tier, and here."""
        if before_frame is None:
            self.tiers.drop(self.stream)
            self._sizes, self.held_bytes = {}, 0
            self.heads, self.recent, self._frames, self._pts = [], [], [], []
            self._partition_of, self._partitions = {}, None
            return
        self.recent = [chunk for chunk in self.recent if chunk.index >= before_frame]
        for number, h, head in self._every_head():
            kept = (head.frame >= before_frame).nonzero()[:, 0]
            if len(kept) < head.tokens:
                self._apply(number, h, head.keep(kept, self._loader(number, h)))
        place = bisect.bisect_left(self._frames, before_frame)
        del self._frames[:place], self._pts[:place]
        self._trim_frames()

    def _expire(self) -> None:
        if self.spec.retention_s is None or not self._pts:
            return
        limit = self._pts[-1] - round(self.spec.retention_s * MICROSECONDS)
        # In steps of a block: forgetting rewrites blocks.
        if self._pts[0] < limit - round(self.spec.retention_s * MICROSECONDS / 16):
            self.forget(before_frame=self.frames_since(limit))

    def _trim_frames(self) -> None:
        """Frames of which nothing is held any more need no time."""
        held = [head.frame for _, _, head in self._every_head() if head.tokens]
        parts = [*held, torch.tensor([chunk.index for chunk in self.recent], dtype=torch.int32)]
        there = set(torch.unique(torch.cat(parts)).tolist())
        kept = [place for place, frame in enumerate(self._frames) if frame in there]
        self._frames, self._pts = [self._frames[place] for place in kept], [self._pts[place] for place in kept]
        self._partition_of = {frame: self._partition_of[frame] for frame in self._frames if frame in self._partition_of}

    # -- blocks -----------------------------------------------------------------------------------
    @torch.inference_mode()
    def lose(self, layer: int, h: int, uid: int) -> None:
        """A block turned out to be gone for good (damaged, evicted, or of another memory)."""
        self.counts.lost += self.heads[layer][h].lose(uid)
        self._drop([self._key(layer, h, uid)])

    @torch.inference_mode()
    def split_if_pending(self, layer: int, h: int, uid: int, block: Block) -> None:
        """A cluster that waited for being loaded is split, now that it is."""
        head = self.heads[layer][h]
        table = head.organiser.table
        for cluster in (table.uid == uid).nonzero()[:, 0].tolist():
            if bool(head.organiser.pending[cluster]) and len(block) == int(table.count[cluster]):
                self._apply(layer, h, head.split(cluster, block))

    def key_of(self, layer: int, h: int, cluster: int) -> BlockKey:
        """Where the block of cluster number ``cluster`` (of a head's table) lies."""
        return self._key(layer, h, int(self.heads[layer][h].organiser.table.uid[cluster]))

    def _key(self, layer: int, h: int, uid: int) -> BlockKey:
        return BlockKey(self.stream, layer, h, uid)

    def _loader(self, layer: int, h: int, *, top: bool = False) -> Load:
        def load(uids: list[int]) -> dict[int, Block]:
            keys = [self._key(layer, h, uid) for uid in uids]
            loaded = self.tiers.upper.load(keys) if top else self.tiers.load(keys)
            found = {uid: each.block for uid, each in zip(uids, loaded, strict=True)}
            return {uid: block for uid, block in found.items() if block is not None}

        return load

    def _apply(self, layer: int, h: int, change: Change) -> None:
        self.counts.lost += change.lost
        # Dropped first, so that what is stored never stands beside what it replaces.
        if change.drop:
            self._drop([self._key(layer, h, uid) for uid in change.drop])
        if change.store:
            items = [(self._key(layer, h, uid), block) for uid, block in change.store.items()]
            for key, block in items:
                self._size(key, block.nbytes)
            self.tiers.store(items)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.held_bytes -= self._sizes.pop(key, 0)
        self.tiers.drop(self.stream, keys)

    def _size(self, key: BlockKey, nbytes: int) -> None:
        size = cell_size(nbytes)
        self.held_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _every_head(self) -> Iterator[tuple[int, int, Head]]:
        for number, heads in enumerate(self.heads):
            for h, head in enumerate(heads):
                yield number, h, head

    # -- restoring --------------------------------------------------------------------------------
    def manifest(self, window: bytes = b"") -> bytes:
        """Everything but the KV; ``window``: the engine's state of the stream, kept with it."""
        tensors: dict[str, Tensor] = {}
        for number, h, head in self._every_head():
            tensors |= {f"{number}.{h}.{name}": tensor for name, tensor in head.state().items()}
        if self._partitions is not None:
            tensors |= {f"partitions.{name}": tensor for name, tensor in self._partitions.state().items()}
        header: dict[str, Any] = {
            "layers": len(self.heads),
            "heads": len(self.heads[0]) if self.heads else 0,
            "width": self.heads[0][0].organiser.table.mean.shape[1] if self.heads else 0,
            "rows": self.rows,
            "columns": self.columns,
            "next": self._next,
            "shift": self._shift,
            "dtype": str(self.dtype).removeprefix("torch."),
            "organiser": self.spec.organiser,
            # Frames that wait are not in any block: who restores goes on from the window and these are lost.
            "frames": self._frames[: len(self._frames) - len(self.recent)],
            "pts": self._pts[: len(self._pts) - len(self.recent)],
            "partition_of": [self._partition_of.get(frame, 0) for frame in self._frames],
        }
        return Manifest(header, tensors, window).dump()

    def save(self, window: bytes = b"") -> Outcome:
        """Write the manifest to the tiers."""
        return self.tiers.put_manifest(self.stream, self.manifest(window))

    @torch.inference_mode()
    def restore(self) -> bytes | None:
        """Take over what the tiers hold of this stream; the window's state that was saved with it, None if nothing was
        found, or only what another organiser made."""
        _, data = self.tiers.manifest(self.stream)
        manifest = Manifest.load(data) if data is not None else None
        if manifest is None or manifest.header["organiser"] != self.spec.organiser:
            return None
        header, tensors = manifest.header, manifest.tensors
        self.rows, self.columns = header["rows"], header["columns"]
        self._next, self._shift = header["next"], header["shift"]
        self.dtype = getattr(torch, header["dtype"])
        self._frames, self._pts = list(header["frames"]), list(header["pts"])
        self._partition_of = dict(zip(self._frames, header["partition_of"], strict=False))
        self._compressor = compressors.get(self.spec.compressor)(self.columns, **self.spec.compressor_options)
        organiser = organisers.get(self.spec.organiser)
        self.heads = []
        for number in range(header["layers"]):
            self.heads.append([])
            for h in range(header["heads"]):
                prefix = f"{number}.{h}."
                state = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                head = Head(organiser(header["width"], **self.spec.organiser_options), self._place)
                head.load_state(state)
                self.heads[-1].append(head)
                table = head.organiser.table
                for uid, count in zip(table.uid.tolist(), table.count.tolist(), strict=True):
                    self._size(self._key(number, h, uid), count * self._token_bytes)
        parts = {n.removeprefix("partitions."): t for n, t in tensors.items() if n.startswith("partitions.")}
        if parts:
            self._partitions = VisualPartitions.restore(parts)
        return manifest.window


def _joined(block: Sequence[KVChunk]) -> list[LayerKV]:
    """Frames one after the other, layer by layer."""
    key = torch.cat([chunk.key for chunk in block], dim=2)
    value = torch.cat([chunk.value for chunk in block], dim=2)
    cell = torch.cat([chunk.cell for chunk in block])
    frame = torch.cat([torch.full_like(chunk.cell, chunk.index) for chunk in block])
    heads = key.shape[1]
    return [
        LayerKV(key[layer], value[layer], frame.expand(heads, -1), cell.expand(heads, -1)) for layer in range(len(key))
    ]


def _stacked(heads: Sequence[LayerKV]) -> LayerKV:
    return LayerKV(*(torch.cat([getattr(kv, name) for kv in heads]) for name in ("key", "value", "frame", "cell")))
