"""Tier in this process's memory."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, chain
from typing import Self

import torch

from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierSettings, TierState
from cluster.memory.tiers.codec import check_block
from cluster.memory.tiers.slabs import Cell, Slabs


@dataclass(slots=True, eq=False)
class _Held:
    """A stored block: ``cell`` holds key, value, frame and cell, concatenated."""

    cell: Cell
    dtype: torch.dtype
    count: int
    width: int
    used: int


@dataclass(slots=True, eq=False)
class _Stream:
    """``used``: bytes in cells, including the manifest. ``by_size``: all blocks by cell size, least recently used
    first. ``manifest``: its cell and length. ``rank``: of its valid heap entry, at most ``-used / cap``."""

    name: str
    used: int = 0
    rank: float = 0.0
    held: dict[BlockKey, _Held] = field(default_factory=dict)
    by_size: dict[int, OrderedDict[BlockKey, int]] = field(default_factory=dict)
    manifest: tuple[Cell, int] | None = None

    def oldest(self) -> BlockKey | None:
        firsts = [next(iter(queue.items())) for queue in self.by_size.values()]
        return min(firsts, key=lambda first: first[1])[0] if firsts else None

    def oldest_for(self, size: int, now: int) -> BlockKey | None:
        """Block to evict for a cell of this size: the LRU block of that size, which is sure to make room, unless it was
        used more recently than halfway between the overall LRU block's use and now."""
        oldest = self.oldest()
        if oldest is None or size not in self.by_size:
            return oldest
        alike, used = next(iter(self.by_size[size].items()))
        since = self.by_size[self.held[oldest].cell.nbytes][oldest]
        return alike if used - since <= now - used else oldest

    def touch(self, key: BlockKey, tick: int) -> None:
        queue = self.by_size.setdefault(self.held[key].cell.nbytes, OrderedDict())
        queue[key] = tick
        queue.move_to_end(key)

    def unlink(self, key: BlockKey) -> None:
        """Remove a block from its LRU queue, before its cell is freed."""
        size = self.held[key].cell.nbytes
        del self.by_size[size][key]
        if not self.by_size[size]:
            del self.by_size[size]


_SLAB, _LEAST_SLAB, _SLABS = 2**22, 2**14, 64
# Stale entries allowed in the heap of streams, in addition to the number of streams.
_MAX_STALE = 64


class Arena(Tier):
    """Blocks and manifests in slabs of host memory, with a total cap and one per stream.

    Sizes count as allocated: rounded up to the cell (by at most a quarter, or 4 KiB for large ones). A block occupies
    one cell and moves in one copy. Loaded blocks are copies, unaffected by later eviction. Replacing a block frees the
    old one first, so a refused replacement leaves neither.

    A stream at its cap evicts its least recently used blocks. When the arena is full, the stream that uses most of its
    cap, in proportion, does; a heap finds it in O(log n). For a manifest, or a block of a size that this stream lacks,
    whole slabs are evicted. Manifests are never evicted.

    Args:
        total_bytes: maximum memory reserved.
        stream_bytes: cap of each stream, which :meth:`set_cap` can only lower; default: the total.
        evicts: False for the lowest tier, which refuses (``RETRY``) what does not fit.
        pinned: page-locked memory, with CUDA.
    """

    at_hand = True

    def __init__(
        self,
        total_bytes: int,
        *,
        name: str = "host",
        stream_bytes: int | None = None,
        evicts: bool = True,
        pinned: bool = False,
        slab_bytes: int | None = None,
    ) -> None:
        super().__init__(name, total_bytes if stream_bytes is None else stream_bytes)
        self.evicts = evicts
        # With fewer slabs than cell sizes, blocks of one size would evict others from a nearly empty arena.
        slab = slab_bytes or min(_SLAB, max(_LEAST_SLAB, 1 << (max(total_bytes // _SLABS, 1).bit_length() - 1)))
        self._slabs = Slabs(total_bytes, slab_bytes=slab, pinned=pinned)
        # Streams with blocks or a manifest.
        self._streams: dict[str, _Stream] = {}
        # Heap of their ranks and names: first the stream that uses most of its cap.
        self._ranked: list[tuple[float, str]] = []
        self._used = self._tick = 0
        self._state = TierState()
        self._lock = threading.Lock()

    @classmethod
    def from_settings(cls, settings: TierSettings) -> Self:
        return cls(settings.host_bytes, name="host", pinned=settings.pinned)

    @property
    def reserved(self) -> int:
        """Bytes of all slabs, used or not."""
        return self._slabs.reserved

    def contents(self) -> tuple[int, int]:
        """Numbers of streams with blocks, and of blocks."""
        with self._lock:
            blocks = [len(owner.held) for owner in self._streams.values() if owner.held]
            return len(blocks), sum(blocks)

    def set_cap(self, stream: str, nbytes: int | None, *, shrinking: bool = False) -> None:
        """See :class:`Tier`; immediately evicts what exceeds the new cap."""
        with self._lock:
            super().set_cap(stream, nbytes, shrinking=shrinking)
            if self.evicts and (owner := self._streams.get(stream)) is not None:
                self._rank(owner)
                self._shrink(owner, self.cap(stream))

    # -- Tier -----------------------------------------------------------------------------------
    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            return [Outcome.MISS if self._find(key) is None else Outcome.HIT for key in keys]

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """See :class:`Tier`. A block evicted for a later one of ``items`` counts as not stored."""
        with self._lock:
            outcomes = [self._put(key, block) for key, block in items]
            for at, (key, _) in enumerate(items):
                if outcomes[at] is Outcome.HIT and self._find(key) is None:
                    outcomes[at] = Outcome.RETRY
            self._count("retries", outcomes.count(Outcome.RETRY))
            return outcomes

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        with self._lock:
            found = [self._find(key) for key in keys]
            hits = [held for held in found if held is not None]
            blocks = iter(self._copy_out(hits))
            for key, held in zip(keys, found, strict=True):
                if held is not None:
                    self._touch(key)
            self._count("hits", len(hits))
            self._count("misses", len(found) - len(hits))
            self._count("bytes_out", sum(held.used for held in hits))
            return [Loaded(Outcome.MISS) if held is None else Loaded(Outcome.HIT, next(blocks)) for held in found]

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        with self._lock:
            owner = self._streams.get(stream)
            return Outcome.HIT, [] if owner is None else list(owner.held)

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        with self._lock:
            owner = self._streams.get(stream)
            if owner is None:
                return 0
            gone = [key for key in (list(owner.held) if keys is None else dict.fromkeys(keys)) if key in owner.held]
            for key in gone:
                self._free(key)
            if keys is None:
                self._pop_manifest(owner)
            self._count("dropped", len(gone))
            return len(gone)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See :class:`Tier`. Evicts blocks to make room; without ``HIT`` the previous manifest stays."""
        with self._lock:
            if not self._state.up:
                return Outcome.RETRY
            size, cap = self._slabs.cell_bytes(len(manifest), alone=True), self.cap(stream)
            if size > min(cap, self._slabs.total_bytes):
                self._count("too_large", 1)
                return Outcome.MISS
            owner = self._streams.get(stream) or _Stream(stream)
            last = self._pop_manifest(owner)
            if self.evicts:
                self._shrink(owner, cap - size)
            if owner.used + size <= cap and self._write_manifest(owner, manifest):
                return Outcome.HIT
            if last is not None:
                self._write_manifest(owner, last)
            self._count("retries", 1)
            return Outcome.RETRY

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        with self._lock:
            owner = self._streams.get(stream)
            found = None if owner is None else _manifest_of(owner)
            return (Outcome.MISS if found is None else Outcome.HIT), found

    def nbytes(self, stream: str | None = None) -> int:
        with self._lock:
            if stream is None:
                return self._used
            return self._streams[stream].used if stream in self._streams else 0

    def state(self) -> TierState:
        with self._lock:
            return TierState(self._state.up, self._state.reason, dict(self._state.counts))

    def close(self) -> None:
        with self._lock:
            self._state.up, self._state.reason = False, "closed"
            for owner in list(self._streams.values()):
                for key in list(owner.held):
                    self._free(key)
                self._pop_manifest(owner)
            self._slabs.release()

    # -- under the lock -------------------------------------------------------------------------
    def _find(self, key: BlockKey) -> _Held | None:
        owner = self._streams.get(key.stream)
        return None if owner is None else owner.held.get(key)

    def _touch(self, key: BlockKey) -> None:
        self._tick += 1
        self._streams[key.stream].touch(key, self._tick)

    def _count(self, what: str, by: int) -> None:
        if by:
            self._state.counts[what] = self._state.counts.get(what, 0) + by

    def _put(self, key: BlockKey, block: Block) -> Outcome:
        if not self._state.up:
            return Outcome.RETRY
        count, width = check_block(block)
        owner = self._streams.get(key.stream) or _Stream(key.stream)
        if key in owner.held:
            self._free(key)
        used = 2 * block.key.nbytes + 8 * count
        size, cap = self._slabs.cell_bytes(used), self.cap(key.stream)
        if size > min(cap, self._slabs.total_bytes):
            return Outcome.MISS
        if self.evicts:
            self._shrink(owner, cap - size)
        cell = self._allocate(used) if owner.used + size <= cap else None
        if cell is None:
            return Outcome.RETRY
        held = _Held(cell, block.key.dtype, count, width, used)
        memory = cell.memory
        begin = int(memory.storage_offset())
        inside = _block(memory.view(held.dtype), memory.view(torch.int32), begin, held)
        for part in ("key", "value", "frame", "cell"):
            getattr(inside, part).copy_(getattr(block, part))
        owner.held[key] = held
        self._charge(owner, cell)
        self._touch(key)
        self._count("stored", 1)
        self._count("bytes_in", used)
        return Outcome.HIT

    def _copy_out(self, found: Sequence[_Held]) -> list[Block]:
        """Copy blocks into one buffer: a question loads hundreds of small ones."""
        if not found:
            return []
        # Whole cells, as their sizes are multiples of every dtype's, and each needs no view.
        begins = accumulate((held.cell.nbytes for held in found), initial=0)
        copied = torch.cat([held.cell.memory for held in found])
        whole = {dtype: copied.view(dtype) for dtype in {held.dtype for held in found}}
        numbers = copied.view(torch.int32)
        return [_block(whole[held.dtype], numbers, begin, held) for held, begin in zip(found, begins, strict=False)]

    def _empty_slabs(self, nbytes: int) -> bool:
        """Evict whole slabs of at least ``nbytes`` in total, least recently used first; False, evicting nothing, if
        there are too few. Evicting by block age alone would nearly empty all slabs before freeing one."""
        slabs: dict[tuple[int, int], list[tuple[int, BlockKey]]] = {}
        for owner in self._streams.values():
            for key, tick in chain.from_iterable(queue.items() for queue in owner.by_size.values()):
                slabs.setdefault(owner.held[key].cell.slab, []).append((tick, key))
        chosen: list[tuple[int, BlockKey]] = []
        for (_, size), blocks in sorted(slabs.items(), key=lambda slab: max(slab[1])):
            if nbytes > 0:
                nbytes -= size
                chosen += blocks
        if nbytes > 0 or not chosen:
            return False
        for _, key in chosen:
            self._evict(key)
        return True

    def _allocate(self, nbytes: int) -> Cell | None:
        slabs, size = self._slabs, self._slabs.cell_bytes(nbytes)
        while (cell := slabs.allocate(nbytes)) is None and self.evicts:
            victim = self._first_ranked()
            oldest = None if victim is None else victim.oldest_for(size, self._tick)
            if victim is None or oldest is None:
                return None
            alike = size > slabs.largest or size in victim.by_size
            if alike or not self._empty_slabs(slabs.slab_bytes - slabs.spare):
                self._evict(oldest)
        return cell

    def _first_ranked(self) -> _Stream | None:
        """The stream with blocks, if any, that uses most of its cap, and so is furthest above its share."""
        while self._ranked:
            rank, name = self._ranked[0]
            owner = self._streams.get(name)
            if owner is None or owner.rank != rank:
                heappop(self._ranked)
                continue
            now = -owner.used / self.cap(name) if owner.by_size else 0.0
            if rank == now:
                return owner
            # Decreases since the entry was pushed are applied lazily.
            owner.rank = now
            heapreplace(self._ranked, (now, name))
        return None

    def _rank(self, owner: _Stream) -> None:
        """Update a stream's rank after it has grown, or its cap has shrunk."""
        if (rank := -owner.used / self.cap(owner.name)) >= owner.rank:
            return
        owner.rank = rank
        heappush(self._ranked, (rank, owner.name))
        if len(self._ranked) > 2 * len(self._streams) + _MAX_STALE:
            self._ranked = [(owner.rank, name) for name, owner in self._streams.items()]
            heapify(self._ranked)

    def _shrink(self, owner: _Stream, most: int) -> None:
        while owner.used > most and (oldest := owner.oldest()) is not None:
            self._evict(oldest)

    def _evict(self, key: BlockKey) -> None:
        self._free(key)
        self._count("evicted", 1)

    def _free(self, key: BlockKey) -> None:
        owner = self._streams[key.stream]
        owner.unlink(key)
        self._discharge(owner, owner.held.pop(key).cell)

    def _pop_manifest(self, owner: _Stream) -> bytes | None:
        found = _manifest_of(owner)
        if owner.manifest is not None:
            self._discharge(owner, owner.manifest[0])
            owner.manifest = None
        return found

    def _write_manifest(self, owner: _Stream, manifest: bytes) -> bool:
        lacking = self._slabs.cell_bytes(len(manifest), alone=True) - self._slabs.spare
        if lacking > 0 and not (self.evicts and self._empty_slabs(lacking)):
            return False
        if (cell := self._slabs.allocate(len(manifest), alone=True)) is None:
            return False
        if manifest:
            cell.memory[: len(manifest)].copy_(torch.frombuffer(bytearray(manifest), dtype=torch.uint8))
        owner.manifest = cell, len(manifest)
        self._charge(owner, cell)
        return True

    def _charge(self, owner: _Stream, cell: Cell) -> None:
        owner.used += cell.nbytes
        self._used += cell.nbytes
        self._streams[owner.name] = owner
        if self.evicts:
            self._rank(owner)

    def _discharge(self, owner: _Stream, cell: Cell) -> None:
        owner.used -= cell.nbytes
        self._used -= cell.nbytes
        self._slabs.free(cell)
        if not owner.used:
            del self._streams[owner.name]


def _manifest_of(owner: _Stream) -> bytes | None:
    if owner.manifest is None:
        return None
    cell, size = owner.manifest
    return cell.memory[:size].numpy().tobytes()


def _block(kv: torch.Tensor, numbers: torch.Tensor, begin: int, held: _Held) -> Block:
    """The block at byte ``begin`` of a storage viewed both as ``kv`` and as int32 ``numbers``. Keys and values together
    take a multiple of 4 bytes, so the numbers after them are aligned. One operation per part."""
    count, width = held.count, held.width
    first = begin // kv.itemsize
    places = (begin + held.used) // 4 - 2 * count
    return Block(
        kv.as_strided((count, width), (width, 1), first),
        kv.as_strided((count, width), (width, 1), first + count * width),
        numbers.as_strided((count,), (1,), places),
        numbers.as_strided((count,), (1,), places + count),
    )
