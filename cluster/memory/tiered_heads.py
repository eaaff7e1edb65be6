"""Heads of one stream's memory, their blocks in the tiers, and the manifest that names them.

Heads are changed copy-on-write: the copy replaces the original once the tiers hold its new blocks, so the saved state
is always a consistent earlier memory.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cluster.memory.cap import WINDOW, CappedMemory
from cluster.memory.head_memory import (
    BlocksLostError,
    BlocksUnavailableError,
    HeadChange,
    HeadMemory,
    Load,
    MemoryShape,
)
from cluster.memory.manifest import (
    DTYPES,
    LAYOUT,
    FrameLog,
    StoredManifest,
    check_integers,
    check_parts,
    dump_manifest,
    dump_tensors,
    from_byte_blocks,
    load_manifest,
    load_parts,
)
from cluster.memory.organise.mosaic import VisualPartitions
from cluster.memory.quantise import dequantise, measure_channels, quantise
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import StoredBlocks
from cluster.registry import organisers
from cluster.types import MemorySpec

log = logging.getLogger(__name__)

# Maximum bytes and blocks per tier call, which has a deadline.
_BATCH_BYTES, _BATCH = 2**20, 256
_KV = ("key", "value")
# Stored size of a head's index relative to its tensors: tiers round up.
INDEX = 1.3


class TieredHeads(CappedMemory):
    """Clustered part of a :class:`~cluster.memory.stream.StreamMemory`. Hold ``exclusive`` for every mutating call."""

    def __init__(
        self,
        stream: str,
        spec: MemorySpec,
        tiers: TierStack,
        shape: MemoryShape | None,
        yield_to_engine: Callable[[], None],
    ) -> None:
        super().__init__(stream, spec, tiers)
        self.shape, self.life = shape, spec.life
        self.yield_to_engine = yield_to_engine
        self.heads = []
        self.rows = self.columns = 1
        self.log = FrameLog()
        self.partition_of: dict[int, int] = {}
        self.partitions: VisualPartitions | None = None
        # Block generation of each open view.
        self._readers: list[int] = []
        self.stored = StoredBlocks(stream, tiers, self._readers)
        self.manifest = StoredManifest(stream, tiers)
        # Whether an earlier process's stored memory was looked up and, if found, restored.
        self.restored = False
        # Whether everything the previous owner wrote is restored, so that this process may write; whether it then
        # deletes blocks that no manifest names.
        self.owned, self._sweeps = False, True
        # Whether the stored manifest is outdated.
        self.unsaved = False
        # Frames below this number are deleted.
        self.first_frame = 0
        # Number of deletions by time, and how many of them the lowest tier has committed.
        self.hidden = self.deleted = 0
        # Changed heads with their new blocks, to be stored in one batch.
        self._ready: list[tuple[int, int, HeadMemory, list[tuple[BlockKey, Block]]]] = []
        self._ready_bytes = 0
        # By layer and head: blocks of the stored index, and approximate size of each index not written yet.
        self._parts: dict[tuple[int, int], list[BlockKey]] = {}
        self._unwritten: dict[tuple[int, int], int] = {}
        self._compressor_hash = 0
        # Compressor that set the tokens' weights.
        self._weighed_by = spec.compressor
        self.exclusive = threading.RLock()

    def _append_waiting(self, saved: FrameLog, first_frame: int) -> None:
        """Replace the log by the restored one and append the waiting frames. Called with the lock held."""
        raise NotImplementedError

    def _save_compressor(self) -> bool:
        """Store the compressor's state; False if the lowest tier refuses."""
        raise NotImplementedError

    def _load_compressor_state(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`_save_compressor` stored."""
        raise NotImplementedError

    def _new_heads(self) -> list[list[HeadMemory]]:
        assert self.shape is not None
        organiser = organisers.get(self.spec.organiser)
        return [
            [HeadMemory(organiser(self.shape.width, **self.spec.organiser_options)) for _ in range(self.shape.heads)]
            for _ in range(self.shape.layers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.shape is None else self.shape.dtype

    @property
    def token_bytes(self) -> int:
        """:meth:`MemorySpec.token_bytes` for this model."""
        assert self.shape is not None
        return self.spec.token_bytes(self.shape.width, self.shape.dtype.itemsize)

    # -- blocks -----------------------------------------------------------------------------------
    def drop_lost_clusters(self, layer: int, h: int, uids: Sequence[int]) -> bool:
        """Drop clusters whose blocks are lost (damaged, evicted, or foreign). False if they could not be dropped."""

        def lose(head: HeadMemory) -> HeadChange:
            self.counts.lose_tokens(head.drop_clusters(uids))
            return HeadChange([], [])

        # Pending changes may be based on the old head.
        self.publish()
        return self._change(layer, h, lose) and self.publish()

    def keep_tokens(
        self, layer: int, h: int, kept: Tensor, load: Load | None = None, weight: Tensor | None = None
    ) -> bool:
        """Keep only the tokens ``kept`` (ascending indices) of a head. ``load``: loads its blocks, by default from the
        tiers; ``weight``: new weights of those kept. False if blocks are unavailable."""
        load = self.block_loader(layer, h) if load is None else load
        return self._change(layer, h, lambda head: head.keep_tokens(kept, load, weight))

    def _change(self, layer: int, h: int, work: Callable[[HeadMemory], HeadChange]) -> bool:
        """Apply ``work`` to a copy of a head, to be swapped in by :meth:`publish`. False if blocks are unavailable or
        there is no room."""
        if any((layer, h) == ready[:2] for ready in self._ready) and not self.publish():
            return False
        self.yield_to_engine()
        while True:
            head = self.heads[layer][h].copy()
            try:
                change = work(head)
                break
            except BlocksLostError as error:
                if not self.drop_lost_clusters(layer, h, error.uids):
                    return False
            except BlocksUnavailableError:
                return False
        blocks = change.blocks
        if blocks and self.spec.kv_dtype == "int8":
            if not len(head.channels):
                head.channels = measure_channels(*(torch.cat([getattr(b, part) for b in blocks]) for part in _KV))
            blocks = quantise(blocks, head.channels)
        keys = [self.stored.new_key(layer, h) for _ in blocks]
        head.table.block[change.clusters] = torch.tensor([key.block for key in keys], dtype=torch.int64)
        nbytes = sum(cell_size(block.nbytes) for block in blocks)
        if nbytes + INDEX * head.index_bytes > self._free_bytes():
            durable = self.make_durable()
            # A change without new blocks only frees room, so it is never refused for lack of it.
            if nbytes and (not durable or nbytes + INDEX * head.index_bytes > self._free_bytes()):
                return False
        self._ready.append((layer, h, head, list(zip(keys, blocks, strict=True))))
        self._ready_bytes += nbytes
        full = self._ready_bytes >= _BATCH_BYTES or sum(len(items) for *_, items in self._ready) >= _BATCH
        return not full or self.publish()

    def _free_bytes(self) -> float:
        """Bytes left for new blocks once pending blocks and index are written."""
        index = sum(self._unwritten.values()) + sum(head.index_bytes for _, _, head, _ in self._ready)
        return self.max_bytes - self.stored.nbytes - self._ready_bytes - INDEX * index

    def publish(self) -> bool:
        """Store the new blocks of changed heads and swap the heads in. If the lowest tier refuses, discard the changes
        and return False."""
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

    def block_loader(self, layer: int, h: int, *, top: bool = False) -> Load:
        """A loader of one head's blocks by number, dequantised to float32; ``top``: from the uppermost tier only."""
        source = self.tiers.upper if top else self.tiers

        def load(numbers: list[int]) -> list[Loaded]:
            loaded = source.load([BlockKey(self.stream, layer, h, number) for number in numbers])
            if not len(channels := self.heads[layer][h].channels):
                return loaded
            blocks = iter(dequantise([one.block for one in loaded if one.block is not None], channels))
            return [one if one.block is None else Loaded(one.outcome, next(blocks)) for one in loaded]

        return load

    def iter_heads(self) -> Iterator[tuple[int, int, HeadMemory]]:
        for number, heads in enumerate(self.heads):
            for h, head in enumerate(heads):
                yield number, h, head

    # -- saving and restoring ---------------------------------------------------------------------
    @torch.inference_mode()
    def save(self, window: bytes | None = b"", hidden: int | None = None) -> Outcome:
        """Write changed index parts and the manifest, then delete blocks it no longer names. ``HIT``: the lowest tier
        has it.

        ``window``: the engine's window state when all settled frames had just left it; None keeps the saved one, unless
        that contains deleted frames. ``hidden``: its value at that time (default: the current one).
        """
        with self.exclusive:
            if not self.restored or not self.take_over():
                return Outcome.RETRY
            hidden = self.hidden if hidden is None else hidden
            if window is None and self.deleted < hidden:
                window = b""
            fits = window is None or self.has_room_for_window(len(window))
            if window is not None and not self._put_bytes("window", window if fits else b""):
                return Outcome.RETRY
            if not self._commit():
                return Outcome.RETRY
            if not any(bool((head.frame[:1] < self.first_frame).any()) for _, _, head in self.iter_heads()):
                self.deleted = max(self.deleted, hidden)
            return Outcome.HIT

    def make_durable(self) -> bool:
        """Commit amid a series of changes, to free replaced blocks."""
        return self.publish() and self._commit()

    def _commit(self) -> bool:
        if self.unsaved:
            if not self._write_parts() or not self._save_compressor():
                return False
            if not self.manifest.write(self._manifest()):
                return False
            self.unsaved = False
            self.stored.manifest_written()
        self.stored.delete_unnamed()
        if self.cap_bytes > self.settings_cap_bytes:
            self.apply_cap()
        return True

    def _write_parts(self) -> bool:
        """Write the index of changed heads; False if the lowest tier refuses."""
        items: list[tuple[BlockKey, Block]] = []
        parts: dict[tuple[int, int], list[BlockKey]] = {}
        changed = sorted(self._unwritten)
        for layer, h in changed:
            self.yield_to_engine()
            of_head = self.stored.byte_items(dump_tensors(self.heads[layer][h].state()), layer, h)
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

    def _put_bytes(self, name: str, data: bytes) -> bool:
        self.unsaved |= bool(data or self.stored.named.get(name))
        return self.stored.put_bytes(name, data)

    def drop_states(self) -> None:
        """Drop the saved window and compressor state; the next save restores those that fit the configured cap."""
        for name in self.stored.named:
            self._put_bytes(name, b"")
        self._compressor_hash = 0

    def _manifest(self) -> bytes:
        """Manifest of the current heads; waiting frames are not part of it."""
        with self._lock:
            stored = self.log.copy()
        # Frames settled in at least one head; the others may follow later.
        stored.delete_after(max((head.settled for _, _, head in self.iter_heads()), default=0) - 1)
        header = {
            "owner": self.manifest.owner,
            "life": self.life,
            "layers": len(self.heads),
            "heads": len(self.heads[0]) if self.heads else 0,
            "width": 0 if self.shape is None else self.shape.width,
            "rows": self.rows,
            "columns": self.columns,
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: getattr(self.spec, name) for name in LAYOUT},
            "cap_bytes": self.cap_bytes,
            "first_frame": self.first_frame,
            "log": stored.state(),
            "partition_of": [[frame, partition] for frame, partition in self.partition_of.items()],
            "tokens": [head.tokens for _, _, head in self.iter_heads()],
            # None for empty heads.
            "parts": [[key.block for key in self._parts.get((layer, h), ())] for layer, h, _ in self.iter_heads()],
            "named": {name: [key.block for key in keys] for name, keys in self.stored.named.items()},
            "compressor": self.spec.compressor,
        }
        return dump_manifest(header, {} if self.partitions is None else self.partitions.state())

    @torch.inference_mode()
    def restore(self, *, sweep: bool = True) -> Outcome:
        """Restore the stream from the lowest tier. ``RETRY``: unavailable, so nothing may be written yet; ``MISS``:
        nothing usable. ``sweep``: delete blocks that no manifest names before the first write."""
        with self.exclusive:
            if self.restored:
                return Outcome.HIT if self.heads else Outcome.MISS
            outcome, data = self.manifest.read()
            if outcome is Outcome.RETRY:
                return Outcome.RETRY
            found = False
            if data is not None:
                try:
                    found = self._load_manifest(data, LAYOUT if sweep else LAYOUT[:2])
                except BlocksUnavailableError:
                    return Outcome.RETRY
                except Exception as error:
                    log.warning("cannot restore the stored memory of camera %r: %r", self.stream, error)
                self.counts.unreadable += not found
            self.restored, self._sweeps = True, sweep
            if self.cap_bytes > self.settings_cap_bytes:
                self.apply_cap()
            return Outcome.HIT if found else Outcome.MISS

    def take_over(self) -> bool:
        """Become the writer before the first write, restoring what another process has written since. False if the
        lowest tier cannot be read now."""
        if self.restore() is Outcome.RETRY:
            return False
        if not self.owned:
            if (found := self.manifest.compare()) == "unreadable":
                return False
            if found in ("earlier", "later"):
                self.heads, self.restored = [], False
                self._reset_stored()
                if self.restore(sweep=self._sweeps) is Outcome.RETRY:
                    return False
            self.owned = True
            # A new manifest tells the previous owner that it has lost the memory.
            self.unsaved |= bool(self.heads)
            if not self._sweeps:
                self.stored.keep_unlisted()
            self.stored.delete_unnamed()
        return True

    def _load_manifest(self, data: bytes, layout: Sequence[str]) -> bool:
        """Restore from a manifest; False if its version, ``layout`` or camera differs. ``BlocksUnavailableError``:
        index blocks cannot be loaded now; other exceptions: the manifest is inconsistent or does not fit this
        memory."""
        loaded = load_manifest(data)
        if loaded is None or any(loaded[0][name] != getattr(self.spec, name) for name in layout):
            return False
        header, tensors = loaded
        if self.life not in ("", header["life"]):
            return False
        self.life = header["life"]
        layers, per_layer = int(header["layers"]), int(header["heads"])
        shape = MemoryShape(layers, per_layer, int(header["width"]), DTYPES[header["dtype"]]) if layers else self.shape
        if self.shape is not None and shape != self.shape:
            raise ValueError(f"KV of {shape} instead of {self.shape}")
        parts = check_parts(header, layers * per_layer)
        saved = FrameLog.restore(header["log"])
        pairs = [check_integers(pair, 2) for pair in header["partition_of"]]
        # For rollback on errors. A stored memory without heads has no frames, hence no grid.
        before = self.shape, self.rows, self.columns
        self.shape, heads = shape, []
        try:
            if layers:
                self.rows, self.columns = int(header["rows"]), int(header["columns"])
                heads = self._new_heads()
            for at, head in enumerate(itertools.chain(*heads)):
                number, h = divmod(at, per_layer)
                keys = [BlockKey(self.stream, number, h, block) for block in parts[at]]
                self._load_head(number, h, head, keys, header["tokens"][at])
            partitions = VisualPartitions.restore(tensors) if tensors else None
        except BaseException:
            self.shape, self.rows, self.columns = before
            self._reset_stored()
            raise
        with self._lock:
            # Readers must see heads and log together: the log has the frames' times.
            self.heads, self._weighed_by = heads, header["compressor"]
            self.partition_of, self.partitions = {pair[0]: pair[1] for pair in pairs}, partitions
            named = {name: check_integers(blocks) for name, blocks in header["named"].items()}
            # The cap may have been lowered since it was written.
            self.cap_bytes = max(self.cap_bytes, int(header["cap_bytes"]))
            self.stored.add_named(named, self.cap_bytes // WINDOW)
            self._append_waiting(saved, int(header["first_frame"]))
        if header["compressor"] == self.spec.compressor and (state := self.stored.load_bytes("compressor")):
            self._load_compressor_state(load_parts(state))
        return True

    def _reset_stored(self) -> None:
        self.stored = StoredBlocks(self.stream, self.tiers, self._readers)
        self._parts, self._unwritten, self.unsaved, self._compressor_hash = {}, {}, False, 0

    def _load_head(self, layer: int, h: int, head: HeadMemory, keys: list[BlockKey], tokens: int) -> None:
        if not keys:
            if tokens:
                raise ValueError(f"{tokens} tokens without an index")
            return
        loaded = self.tiers.lowest.load(keys)
        blocks = [one.block for one in loaded if one.block is not None]
        if any(one.block is None and one.outcome is not Outcome.MISS for one in loaded):
            raise BlocksUnavailableError
        if len(blocks) < len(keys):
            self.counts.lose_tokens(tokens)
            self._unwritten[layer, h], self._parts[layer, h] = head.index_bytes, []
            self.unsaved = True
            return
        head.load_state(load_parts(from_byte_blocks(blocks)))
        self._parts[layer, h] = keys
        for key, block in zip(keys, blocks, strict=True):
            self.stored.add_block(key, block.nbytes)
        for number, count in zip(head.table.block.tolist(), head.table.count.tolist(), strict=True):
            self.stored.add_block(BlockKey(self.stream, layer, h, number), count * self.token_bytes)
