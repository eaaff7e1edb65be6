"""Blocks between an engine's folder and a tier of memory, so that a window outlives its host and can go to another.

The folder serves the engine core; the tier (host arena, Redis, a node's tier over gRPC) is slow, may be down, and must
never make the core wait for it. So it is the replica that talks to it: it writes through in a thread of its own, and
fetches before a window is planned that needs the blocks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from cluster.engine.vllm.connector.post import Errand, Post, Shelf
from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, Fault, KVShape
from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey, Outcome


class Courier(Post):
    """Writes a stream's blocks through to ``tier``, and brings them back. Thread-safe.

    A block becomes one block of the tier per layer and head; its key there is a digest of its own key, so nothing but
    the keys must be known to find it.

    Args:
        folder: of the engine.
        tier: not closed with the courier.
        shape: KV of one token in one shard of the folder.
        fingerprint: as in the engine's transfer configuration.
        cap_bytes: likewise.
        waiting: most blocks that wait to be written or dropped; above it the oldest no longer are, and are counted.
    """

    def __init__(
        self, folder: BlockFolder, tier: Shelf, *, shape: KVShape, fingerprint: str, cap_bytes: int, waiting: int = 1024
    ) -> None:
        if waiting < 1:
            raise ConfigError(f"a courier must let at least one block wait, not {waiting}")
        self.folder, self.shape = folder, shape
        self._stores = [
            BlockStore(folder, shape=shape, fingerprint=fingerprint, shard=shard, cap_bytes=cap_bytes // folder.shards)
            for shard in range(folder.shards)
        ]
        self._most = waiting
        # By stream and key: whether it is to be in the tier (or to go from it).
        self._waiting: OrderedDict[tuple[str, str], bool] = OrderedDict()
        # Last: the thread that looks at all this begins there.
        super().__init__(tier)

    def keep(self, stream: str, keys: Sequence[str]) -> None:
        """Write these blocks to the tier some time soon; never waits."""
        self._queue(stream, keys, wanted=True)

    def drop(self, stream: str, keys: Sequence[str]) -> None:
        """Forget blocks: in the folder now, in the tier some time soon."""
        self.folder.drop(keys)
        self._queue(stream, keys, wanted=False)

    def restore(self, stream: str, blocks: Sequence[tuple[str, int]], deadline_s: float) -> set[str]:
        """Bring blocks, named by key and tokens, back into the folder; which of them are there when it returns.

        Blocks that are there need no tier. Ends after ``deadline_s`` and one call of the tier.
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

    def close(self) -> None:
        """Stop writing; what still waits is lost, and counted."""
        with self._changed:
            self.counts["dropped"] += len(self._waiting)
            self._waiting.clear()
        super().close()

    # -- under the lock ---------------------------------------------------------------------------
    def _idle(self) -> bool:
        return super()._idle() and not self._waiting

    def _waits(self, stream: str) -> bool:
        return super()._waits(stream) or not self._ready(stream)

    def _ready(self, stream: str) -> bool:
        return all(name != stream for name, _ in self._waiting)

    def _hurry(self, stream: str) -> None:
        super()._hurry(stream)
        for name in [name for name in reversed(self._waiting) if name[0] == stream]:
            self._waiting.move_to_end(name, last=False)

    def _cancel(self, stream: str) -> None:
        super()._cancel(stream)
        for name in [name for name in self._waiting if name[0] == stream]:
            del self._waiting[name]

    def _take(self) -> Errand | None:
        errand = super()._take()
        if errand is None and self._waiting:
            (stream, key), wanted = self._waiting.popitem(last=False)
            errand = self._to_store(stream, key) if wanted else self._to_drop(stream, key)
        return errand

    def _to_store(self, stream: str, key: str) -> Errand:
        def again() -> None:
            if (stream, key) not in self._waiting:
                self._waiting[stream, key] = True
                self._waiting.move_to_end((stream, key), last=False)

        def done(outcome: Outcome) -> None:
            self.counts["kept" if outcome is Outcome.HIT else "refused"] += 1

        return Errand(stream, lambda: self._store(stream, key), again, done)

    def _to_drop(self, stream: str, key: str) -> Errand:
        def drop() -> Outcome:
            done = self.tier.drop(stream, self._names(stream, key)) is not None
            return Outcome.HIT if done else Outcome.RETRY

        def again() -> None:
            self._waiting.setdefault((stream, key), False)

        return Errand(stream, drop, again, lambda _: None)

    def _queue(self, stream: str, keys: Sequence[str], *, wanted: bool) -> None:
        with self._changed:
            for key in keys:
                self._waiting[stream, key] = wanted
                # What goes makes room for what comes.
                self._waiting.move_to_end((stream, key), last=wanted)
            while len(self._waiting) > self._most:
                self._waiting.popitem(last=False)
                self.counts["dropped"] += 1
            self._changed.notify_all()

    # -- at the tier ------------------------------------------------------------------------------
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


def _parts(block: Tensor) -> list[Block]:
    """A block ``[2, layers, tokens, heads, size]`` as one block per layer and head."""
    tokens = block.shape[2]
    place = torch.arange(tokens, dtype=torch.int32)
    frame = torch.zeros(tokens, dtype=torch.int32)
    return [
        Block(block[0, layer, :, head].contiguous(), block[1, layer, :, head].contiguous(), frame, place)
        for layer in range(block.shape[1])
        for head in range(block.shape[3])
    ]
