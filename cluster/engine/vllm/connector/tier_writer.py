"""Asynchronous copies of a vLLM engine's blocks and manifests in a memory tier, so that windows outlive the host.

The shared folder serves the engine core; a tier (host arena, Redis, a node's tier over gRPC) is slow and may be down,
and must never block the core. So the replica writes through in a background thread, and restores blocks before planning
a window that needs them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, Fault, KVShape
from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome

PAUSE_S = 0.5
"""Pause after a ``RETRY``."""
DELETE_S = CLOSE_S = 30.0
"""Longest wait for a running tier call; tiers have shorter deadlines."""


T = TypeVar("T")


class TierLike(Protocol):
    """A tier of :mod:`cluster.memory.tiers`, or a stack of them. Thread-safe; no call raises."""

    def store(self, items: Sequence[tuple[BlockKey, Block]], /) -> list[Outcome]: ...

    def load(self, keys: Sequence[BlockKey], /) -> list[Loaded]: ...

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None, /) -> int | None: ...

    def put_manifest(self, stream: str, manifest: bytes, /) -> Outcome: ...

    def manifest(self, stream: str, /) -> tuple[Outcome, bytes | None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """A queued tier operation; ``counted``: counter to increment when done, "" for none."""

    stream: str
    run: Callable[[], Outcome]
    counted: str = ""


class TierWriter:
    """Writes the newest manifest of each stream to ``tier`` in the background. Thread-safe.

    Failed writes are retried; a newer manifest replaces a queued one, so the queue is bounded by the number of streams.

    * ``counts``: ``retries``; manifests ``noted`` (written) or ``refused`` for good
    """

    def __init__(self, tier: TierLike) -> None:
        self.tier = tier
        self.counts: Counter[str] = Counter()
        # Pending deletions of whole streams, done before anything else.
        self._clears: OrderedDict[str, WriteJob] = OrderedDict()
        self._manifests: OrderedDict[str, WriteJob] = OrderedDict()
        # By stream and key, oldest first. A stream's manifest waits for them.
        self._blocks: OrderedDict[tuple[str, str], WriteJob] = OrderedDict()
        self._busy: str | None = None
        # Do not retry the job in flight.
        self._dismissed = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kv-writer", daemon=True)
        self._thread.start()

    def queue_manifest(self, stream: str, manifest: Callable[[], bytes]) -> None:
        """Queue a stream's manifest, written after its queued blocks.

        ``manifest`` is called in the writing thread, and only if it is written.
        """
        with self._changed:
            self._manifests[stream] = WriteJob(stream, lambda: self.tier.put_manifest(stream, manifest()), "noted")
            self._changed.notify_all()

    def read_manifest(self, stream: str) -> bytes | None:
        """The last written manifest; None if there is none or the tier is unavailable."""
        with self._changed:
            if stream in self._clears:
                return None
        return self.tier.manifest(stream)[1]

    def queue_clear(self, stream: str) -> None:
        """Queue the deletion of everything the tier holds of a stream, and cancel its queued writes."""
        with self._changed:
            self._cancel(stream)
            self._clears[stream] = WriteJob(stream, lambda: _dropped(self.tier.drop(stream)))
            self._changed.notify_all()

    def cancel_stream(self, stream: str) -> None:
        """Cancel a stream's queued writes, as another process may continue it."""
        with self._changed:
            self._cancel(stream)

    def delete_stream(self, stream: str) -> None:
        """Delete everything of a stream, in the tier too; blocks for at most the tier's deadline."""
        with self._changed:
            self._cancel(stream)
            self._clears.pop(stream, None)
            # A write in flight would arrive after the deletion.
            self._changed.wait_for(lambda: self._busy != stream, timeout=DELETE_S)
        self.tier.drop(stream)

    def wait_stream_written(self, stream: str, deadline_s: float) -> bool:
        """Wait until nothing of a stream is queued; False after ``deadline_s``."""
        with self._changed:
            if stream in self._manifests:
                self._manifests.move_to_end(stream, last=False)
            for name in reversed(self._blocks_of(stream)):
                self._blocks.move_to_end(name, last=False)
            return self._changed.wait_for(lambda: self._busy != stream and not self._waits(stream), timeout=deadline_s)

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is queued; False after ``deadline_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting() and self._busy is None, timeout=deadline_s)

    def close(self) -> None:
        """Stop writing; queued blocks are dropped and counted."""
        with self._changed:
            self.counts["dropped"] += len(self._blocks)
            self._blocks.clear()
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_S)

    # -- under the lock ---------------------------------------------------------------------------
    def _waiting(self) -> bool:
        return bool(self._clears or self._manifests or self._blocks)

    def _waits(self, stream: str) -> bool:
        return stream in self._manifests or stream in self._clears or bool(self._blocks_of(stream))

    def _blocks_of(self, stream: str) -> list[tuple[str, str]]:
        return [name for name in self._blocks if name[0] == stream]

    def _cancel(self, stream: str) -> None:
        """Remove a stream's queued writes."""
        self._manifests.pop(stream, None)
        for name in self._blocks_of(stream):
            del self._blocks[name]
        self._dismissed = self._dismissed or self._busy == stream

    def _take(self) -> tuple[WriteJob, Callable[[], None]]:
        """The next job, and a function that requeues it after a ``RETRY``."""
        if self._clears:
            return next(iter(self._clears.values())), lambda: None
        stream = next((stream for stream in self._manifests if not self._blocks_of(stream)), None)
        if stream is not None:
            job = self._manifests.pop(stream)
            return job, partial(_put_back, self._manifests, stream, job, last=True)
        name, job = self._blocks.popitem(last=False)
        return job, partial(_put_back, self._blocks, name, job, last=not job.counted)

    # -- the thread -------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting())
                if self._closed:
                    return
                job, put_back = self._take()
                self._busy, self._dismissed = job.stream, False
            outcome = job.run()
            with self._changed:
                self._busy = None
                if outcome is Outcome.RETRY and not self._closed:
                    self.counts["retries"] += 1
                    if not self._dismissed:
                        put_back()
                elif job.counted:
                    self.counts[job.counted if outcome is Outcome.HIT else "refused"] += 1
                elif self._clears.get(job.stream) is job:
                    del self._clears[job.stream]
                self._changed.notify_all()
                if outcome is Outcome.RETRY:
                    self._changed.wait_for(lambda: self._closed, timeout=PAUSE_S)


class BlockWriter(TierWriter):
    """Writes a stream's blocks through to ``tier`` as well, and restores them. Thread-safe.

    A block becomes one tier block per layer and head, under a digest of its key, so the keys suffice to find it.

    Args:
        folder: of the engine.
        tier: not closed with the writer.
        shape: KV of one token in one shard of the folder.
        fingerprint: as in the engine's transfer configuration.
        cap_bytes: likewise.
        waiting: most queued blocks; above it the oldest are dropped and counted.
    """

    def __init__(
        self,
        folder: BlockFolder,
        tier: TierLike,
        *,
        shape: KVShape,
        fingerprint: str,
        cap_bytes: int,
        waiting: int = 1024,
    ) -> None:
        if waiting < 1:
            raise ConfigError(f"waiting must be at least 1, not {waiting}")
        self.folder, self.shape = folder, shape
        self._stores = [
            BlockStore(folder, shape=shape, fingerprint=fingerprint, shard=shard, cap_bytes=cap_bytes // folder.shards)
            for shard in range(folder.shards)
        ]
        self._most = waiting
        # Last, as it starts the thread that uses these attributes.
        super().__init__(tier)

    def queue_blocks(self, stream: str, keys: Sequence[str]) -> None:
        """Queue blocks to be written; never blocks."""
        self._queue(stream, keys, self._store, "kept")

    def drop_blocks(self, stream: str, keys: Sequence[str]) -> None:
        """Delete blocks from the folder now and from the tier in the background."""
        self.folder.drop_blocks(keys)
        self._queue(stream, keys, self._drop, "")

    def restore_blocks(self, stream: str, blocks: Sequence[tuple[str, int]], deadline_s: float) -> set[str]:
        """Restore blocks (key and tokens) into the folder; returns those present.

        Blocks already there need no tier. Returns after ``deadline_s`` and one call of the tier at the latest.
        """
        ends = time.monotonic() + deadline_s
        there = set()
        for key, tokens in blocks:
            if self.folder.tokens(key) == tokens:
                there.add(key)
            elif time.monotonic() < ends and self._fetch(stream, key, tokens):
                there.add(key)
                self.counts["restored"] += 1
            else:
                self.counts["missing"] += 1
        return there

    def _queue(self, stream: str, keys: Sequence[str], run: Callable[[str, str], Outcome], counted: str) -> None:
        with self._changed:
            for key in keys:
                self._blocks[stream, key] = WriteJob(stream, partial(run, stream, key), counted)
                # Deletions first, to make room.
                self._blocks.move_to_end((stream, key), last=bool(counted))
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)
                self.counts["dropped"] += 1
            self._changed.notify_all()

    # -- at the tier ------------------------------------------------------------------------------
    def _drop(self, stream: str, key: str) -> Outcome:
        return _dropped(self.tier.drop(stream, self._names(stream, key)))

    def _store(self, stream: str, key: str) -> Outcome:
        items: list[tuple[BlockKey, Block]] = []
        names = self._names(stream, key)
        for store in self._stores:
            block = store.get(key, again=False)
            if isinstance(block, Fault):
                return Outcome.MISS
            items += zip(names[len(items) :], _parts(block), strict=False)
        outcomes = set(self.tier.store(items) or ())
        if Outcome.MISS in outcomes:
            return Outcome.MISS
        return Outcome.RETRY if Outcome.RETRY in outcomes else Outcome.HIT

    def _fetch(self, stream: str, key: str, tokens: int) -> bool:
        loaded = self.tier.load(self._names(stream, key))
        parts = [each.block for each in loaded if each.block is not None]
        fits = [part for part in parts if part.key.shape == (tokens, self.shape.size)]
        if len(fits) < len(loaded):
            return False
        each = len(loaded) // len(self._stores)
        for shard, store in enumerate(self._stores):
            block = torch.empty(self.shape.block(tokens), dtype=self.shape.dtype)
            for number, part in enumerate(fits[shard * each : (shard + 1) * each]):
                layer, head = divmod(number, self.shape.heads)
                block[0, layer, :, head], block[1, layer, :, head] = part.key, part.value
            if not store.put([(key, block)], again=False)[0]:
                return False
        return True

    def _names(self, stream: str, key: str) -> list[BlockKey]:
        uid = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
        return [
            BlockKey(stream, layer, shard * self.shape.heads + head, uid)
            for shard in range(self.folder.shards)
            for layer in range(self.shape.layers)
            for head in range(self.shape.heads)
        ]


def _put_back(queue: OrderedDict[T, WriteJob], name: T, job: WriteJob, *, last: bool) -> None:
    """Requeue a job, unless a newer one of its name is queued."""
    if name not in queue:
        queue[name] = job
        queue.move_to_end(name, last=last)


def _dropped(count: int | None) -> Outcome:
    return Outcome.RETRY if count is None else Outcome.HIT


def _parts(block: Tensor) -> list[Block]:
    """Split a block ``[2, layers, tokens, heads, size]`` by layer and head."""
    tokens = block.shape[2]
    place = torch.arange(tokens, dtype=torch.int32)
    frame = torch.zeros(tokens, dtype=torch.int32)
    return [
        Block(block[0, layer, :, head].contiguous(), block[1, layer, :, head].contiguous(), frame, place)
        for layer in range(block.shape[1])
        for head in range(block.shape[3])
    ]
