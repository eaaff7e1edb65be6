"""The heads of one stream's memory, their blocks in the tiers, and the manifest that names these.

A head changes as a copy, which takes its place once the tiers have its new blocks; what is saved is at every moment a
whole memory of some moment before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.memory.head_memory import BlocksLostError, BlocksUnavailableError, HeadChange, HeadMemory, Load
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
from cluster.memory.organise.mosaic import VisualPartitions
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import StoredBlocks
from cluster.registry import organisers
from cluster.types import MemorySpec

log = logging.getLogger(__name__)

# Share of the cap that frames which wait may take, in any case; and that a saved window may.
WAITING = 8
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


class TieredHeads:
    """What a memory holds in clusters. One call that changes it at a time, by who holds ``exclusive``.

    Args:
        stream: its name.
        spec: how it remembers.
        tiers: where blocks lie; other streams share them.
        shape: of the model's KV; what another process left in another shape is not gone on with.
        give_way: called between two pieces of what takes time.
    """

    def __init__(
        self, stream: str, spec: MemorySpec, tiers: TierStack, shape: MemoryShape | None, give_way: Callable[[], None]
    ) -> None:
        self.stream, self.spec, self.tiers = stream, spec, tiers
        self.shape = shape
        self.yield_to_engine = give_way
        self.heads: list[list[HeadMemory]] = []
        self.counts = MemoryCounts()
        self.rows = self.columns = 1
        self.log = FrameLog()
        self.partition_of: dict[int, int] = {}
        self.partitions: VisualPartitions | None = None
        # Of each view that is read, the generation of its blocks.
        self._readers: list[int] = []
        self.stored = StoredBlocks(stream, tiers, self._readers)
        # Whether it is known what the lowest tier has of another process, and is taken over.
        self.restored = False
        # Whether the manifest in the lowest tier is of an earlier moment.
        self.unsaved = False
        # Frames before it are forgotten.
        self.first_frame = 0
        # Heads with their new blocks, to be stored together.
        self._ready: list[tuple[int, int, HeadMemory, list[tuple[BlockKey, Block]]]] = []
        self._ready_bytes = 0
        # By layer and head: the blocks that hold the index; and of those whose index changed since, about its bytes.
        self._parts: dict[tuple[int, int], list[BlockKey]] = {}
        self._unwritten: dict[tuple[int, int], int] = {}
        self._window: list[BlockKey] = []
        self.exclusive = threading.RLock()
        self._lock = threading.Lock()

    def settled_frames(self) -> list[int]:
        """Numbers of the frames that are in clusters."""
        raise NotImplementedError

    def _go_on(self, saved: FrameLog, before: FrameLog, first_frame: int) -> None:
        """Frames that came while the past was unknown follow what was restored; under the lock. ``before``: the log as
        it was."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Empty heads, as soon as the shape of the KV is known."""
        assert self.shape is not None
        organiser = organisers.get(self.spec.organiser)
        heads = [
            [
                HeadMemory(organiser(self.shape.width, **self.spec.organiser_options), self._place)
                for _ in range(self.shape.heads)
            ]
            for _ in range(self.shape.layers)
        ]
        with self._lock:
            self.heads = heads

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.shape is None else self.shape.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head: key, value, frame and cell."""
        assert self.shape is not None
        return 2 * self.shape.width * self.shape.dtype.itemsize + 8

    @property
    def max_window_bytes(self) -> int:
        """Most bytes that a saved window may have."""
        return self.spec.cap_bytes // _WINDOW

    @property
    def max_bytes(self) -> int:
        """Most bytes that blocks, index and window may take, of one version or two: what the cap leaves beside frames
        that wait."""
        cap = min(self.spec.cap_bytes, self.tiers.capacity(self.stream))
        return cap - cap // WAITING

    def _place(self, frame: Tensor, cell: Tensor) -> Tensor:
        row = torch.div(cell, self.columns, rounding_mode="floor")
        with self._lock:
            seconds = self.log.seconds(frame)
        return torch.stack([seconds.float(), row.float(), (cell - row * self.columns).float()], dim=1)

    # -- blocks -----------------------------------------------------------------------------------
    def drop_lost_clusters(self, layer: int, h: int, uids: Sequence[int]) -> None:
        """Blocks of clusters turned out to be gone for good (damaged, evicted, or of another memory)."""

        def lose(head: HeadMemory) -> HeadChange:
            self.counts.lost += head.drop_clusters(uids)
            return HeadChange([], [])

        # What waits to be stored may be of the head as it was.
        self.publish()
        self._change(layer, h, lose)
        self.publish()

    def keep_tokens(self, layer: int, h: int, kept: Tensor, blocks: dict[int, Block] | None = None) -> bool:
        """Leave only the tokens ``kept`` (ascending numbers) of a head; ``blocks``: its own, if at hand. False where
        that cannot be done now."""

        def at_hand(numbers: list[int]) -> list[Loaded]:
            assert blocks is not None
            return [Loaded(Outcome.HIT, blocks[number]) for number in numbers]

        load = self.block_loader(layer, h) if blocks is None else at_hand
        return self._change(layer, h, lambda head: head.keep_tokens(kept, load))

    def _change(self, layer: int, h: int, work: Callable[[HeadMemory], HeadChange]) -> bool:
        """Have a copy of a head changed; it takes the head's place with :meth:`publish`. False where that cannot be
        done now."""
        if any((layer, h) == ready[:2] for ready in self._ready) and not self.publish():
            return False
        self.yield_to_engine()
        while True:
            head = self.heads[layer][h].copy()
            try:
                change = work(head)
                break
            except BlocksLostError as error:
                self.drop_lost_clusters(layer, h, error.uids)
            except BlocksUnavailableError:
                return False
        keys = [self.stored.new_key(layer, h) for _ in change.blocks]
        head.table.block[change.clusters] = torch.tensor([key.block for key in keys], dtype=torch.int64)
        nbytes = sum(cell_size(block.nbytes) for block in change.blocks)
        if nbytes + _INDEX * head.index_bytes > self._free_bytes() and not self.make_durable():
            return False
        if nbytes and nbytes + _INDEX * head.index_bytes > self._free_bytes():
            return False
        self._ready.append((layer, h, head, list(zip(keys, change.blocks, strict=True))))
        self._ready_bytes += nbytes
        full = self._ready_bytes >= _BATCH_BYTES or sum(len(items) for *_, items in self._ready) >= _BATCH
        return not full or self.publish()

    def _free_bytes(self) -> float:
        """Bytes that more blocks may take, once what is ready and the index of what changed are written."""
        index = sum(self._unwritten.values()) + sum(head.index_bytes for _, _, head, _ in self._ready)
        return self.max_bytes - self.stored.nbytes - self._ready_bytes - _INDEX * index

    def publish(self) -> bool:
        """Store the new blocks of the heads that changed, and put these in the place of those before; False, and the
        changes are given up, where the lowest tier does not take the blocks."""
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        items = [item for *_, blocks in ready for item in blocks]
        self.yield_to_engine()
        if items and not self.stored.store(items):
            return False
        for layer, h, head, _ in ready:
            before = set(self.heads[layer][h].table.block.tolist())
            with self._lock:
                self.heads[layer][h] = head
                self.stored.mark_replaced(
                    BlockKey(self.stream, layer, h, number) for number in before - set(head.table.block.tolist())
                )
            self._unwritten[layer, h] = head.index_bytes
            self.unsaved = True
        return True

    def key_of(self, layer: int, h: int, cluster: int) -> BlockKey:
        """Where the block of cluster number ``cluster`` (of a head's table) lies."""
        return BlockKey(self.stream, layer, h, int(self.heads[layer][h].table.block[cluster]))

    def block_loader(self, layer: int, h: int, *, top: bool = False) -> Load:
        """What the tiers have of one head's blocks; ``top``: only what the uppermost has."""
        source = self.tiers.upper if top else self.tiers
        return lambda numbers: source.load([BlockKey(self.stream, layer, h, number) for number in numbers])

    def iter_heads(self) -> Iterator[tuple[int, int, HeadMemory]]:
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
            if not self.restored:
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
            self.stored.manifest_written()
        self.stored.delete_unnamed()
        return True

    def _write_parts(self) -> bool:
        """Write the index of the heads whose index changed; False where the lowest tier does not take it."""
        items: list[tuple[BlockKey, Block]] = []
        parts: dict[tuple[int, int], list[BlockKey]] = {}
        changed = sorted(self._unwritten)
        for layer, h in changed:
            self.yield_to_engine()
            of_head = self._byte_items(dump_tensors(self.heads[layer][h].state()), layer, h)
            items += of_head
            parts[layer, h] = [key for key, _ in of_head]
            full = sum(block.nbytes for _, block in items) >= _BATCH_BYTES or len(items) >= _BATCH
            if not full and (layer, h) != changed[-1]:
                continue
            self.yield_to_engine()
            if not self.stored.store(items, copies=False):
                return False
            for at, keys in parts.items():
                self.stored.mark_replaced(self._parts.get(at, ()))
                self._parts[at] = keys
                del self._unwritten[at]
            items, parts = [], {}
        return True

    def _save_window(self, window: bytes) -> bool:
        if not window and not self._window:
            return True
        if len(window) > self.max_window_bytes:
            self.counts.windows_not_saved += 1
            window = b""
        items = self._byte_items(window, 0, 0)
        if items and not self.stored.store(items, copies=False):
            return False
        self.stored.mark_replaced(self._window)
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
            "tokens": [head.tokens for _, _, head in self.iter_heads()],
            # A head that nothing was put into yet has none.
            "parts": [[key.block for key in self._parts.get((layer, h), ())] for layer, h, _ in self.iter_heads()],
            "window": [key.block for key in self._window],
        }
        return Manifest(header, {} if self.partitions is None else self.partitions.state())

    @torch.inference_mode()
    def restore(self, *, sweep: bool = True) -> Outcome:
        """Take over what the lowest tier holds of this stream. ``RETRY``: it cannot be asked now, and nothing is
        written before it was; ``MISS``: it holds nothing that can be gone on with. ``sweep``: what no manifest names is
        deleted."""
        with self.exclusive:
            if self.restored:
                return Outcome.HIT if self.heads else Outcome.MISS
            outcome, data = self.tiers.manifest(self.stream)
            if outcome is Outcome.RETRY or outcome is Outcome.PENDING:
                return Outcome.RETRY
            found = False
            if data is not None:
                try:
                    found = self._take_over(data)
                except BlocksUnavailableError:
                    return Outcome.RETRY
                except Exception as error:
                    log.warning("what the tiers hold of camera %r cannot be gone on with: %r", self.stream, error)
                self.counts.unreadable += not found
            self.restored = True
            if sweep:
                self.stored.delete_unnamed()
            else:
                self.stored.keep_unlisted()
            return Outcome.HIT if found else Outcome.MISS

    def restored_window(self) -> bytes:
        """The window's state that was saved with what was restored; empty where there is none, or it cannot be had."""
        loaded = self.tiers.load(self._window)
        blocks = [one.block for one in loaded if one.block is not None]
        return block_bytes(blocks) if len(blocks) == len(loaded) else b""

    def _take_over(self, data: bytes) -> bool:
        """Become what a manifest says; False where there is none that is understood here.

        Raises:
            BlocksUnavailableError: the blocks of the index cannot be had now.
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
        whole_numbers([saved.next_number, saved.shift])
        if len(whole_numbers(saved.numbers)) != len(whole_numbers(saved.times)):
            raise ValueError("frames without times")
        pairs = [whole_numbers(pair, 2) for pair in header["partition_of"]]
        # Nothing of this memory has changed yet.
        before = self.shape, self.rows, self.columns, self.log
        self.shape, self.rows, self.columns, self.log = shape, int(header["rows"]), int(header["columns"]), saved
        try:
            if layers:
                self._begin()
            for number, h, head in self.iter_heads():
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
            self.partition_of, self.partitions = {pair[0]: pair[1] for pair in pairs}, partitions
            self._window = [BlockKey(self.stream, 0, 0, block) for block in whole_numbers(header["window"])]
            self._go_on(saved, before[3], int(header["first_frame"]))
        for key in self._window:
            self.stored.add_block(key, PART_BYTES)
        return True

    def _forget_stored(self) -> None:
        self.stored = StoredBlocks(self.stream, self.tiers, self._readers)
        self._parts, self._unwritten, self._window, self.unsaved = {}, {}, [], False

    def _take_head(self, layer: int, h: int, head: HeadMemory, keys: list[BlockKey], tokens: int) -> None:
        if not keys:
            if tokens:
                raise ValueError(f"{tokens} tokens without an index")
            return
        loaded = self.tiers.lowest.load(keys)
        blocks = [one.block for one in loaded if one.block is not None]
        if any(one.block is None and one.outcome is not Outcome.MISS for one in loaded):
            raise BlocksUnavailableError
        if len(blocks) < len(keys):
            self.counts.lost += tokens
            self._unwritten[layer, h], self._parts[layer, h] = head.index_bytes, []
            self.unsaved = True
            return
        head.load_state(load_parts(block_bytes(blocks)))
        self._parts[layer, h] = keys
        for key, block in zip(keys, blocks, strict=True):
            self.stored.add_block(key, block.nbytes)
        for number, count in zip(head.table.block.tolist(), head.table.count.tolist(), strict=True):
            self.stored.add_block(BlockKey(self.stream, layer, h, number), count * self.token_bytes)
