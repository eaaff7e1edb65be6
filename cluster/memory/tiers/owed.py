"""Drops that a tier could not do, until it has done them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cluster.memory.tiers.base import BlockKey, Tier


class OwedDrops:
    """What is still to be dropped in one tier; from the moment it is asked for, nothing of it may be given out.

    More than ``limit`` single blocks are not remembered: the stream that owes most is then dropped whole (``widened``).
    Thread-safe, but drops and stores in the tier must wait for each other.
    """

    def __init__(self, tier: Tier, limit: int) -> None:
        self.tier, self.limit = tier, limit
        self.widened = 0
        self._streams: dict[str, set[BlockKey] | None] = {}
        self._blocks = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Streams of which anything is to be dropped."""
        return len(self._streams)

    def covers(self, key: BlockKey) -> bool:
        """Whether this block is to be dropped."""
        with self._lock:
            owed = self._streams.get(key.stream, ())
            return owed is None or key in owed

    def covers_all(self, stream: str) -> bool:
        """Whether the stream is to be dropped whole."""
        with self._lock:
            return self._streams.get(stream, ()) is None

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int:
        """Drop in the tier, and remember what it could not do; returns how many blocks went."""
        if keys is not None and (not keys or self.covers_all(stream)):
            return 0
        self.remember(stream, keys)
        gone = self.tier.drop(stream, keys)
        if gone is not None:
            if keys is None:
                with self._lock:
                    self._blocks -= len(self._streams.pop(stream, None) or ())
            else:
                self.replaced(keys)
        return gone or 0

    def remember(self, stream: str, keys: Sequence[BlockKey] | None) -> None:
        """To be dropped when :meth:`pay` is next called."""
        if keys is not None and not keys:
            return
        with self._lock:
            owed = self._streams.setdefault(stream, set())
            if owed is None:
                return
            self._blocks -= len(owed)
            if keys is None:
                self._streams[stream] = None
                return
            owed.update(keys)
            self._blocks += len(owed)
            while self._blocks > self.limit:
                most = max(self._streams, key=lambda name: len(self._streams[name] or ()))
                self._blocks -= len(self._streams[most] or ())
                self._streams[most] = None
                self.widened += 1

    def replaced(self, keys: Sequence[BlockKey]) -> None:
        """These are not to be dropped any more: they are gone, or others took their place."""
        with self._lock:
            for key in keys:
                owed = self._streams.get(key.stream)
                if owed is not None and key in owed:
                    owed.remove(key)
                    self._blocks -= 1
                    if not owed:
                        del self._streams[key.stream]

    def pay(self, limit: int) -> None:
        """Try again, up to ``limit`` blocks and whole streams; stops at the first failure."""
        with self._lock:
            todo = [(stream, None if keys is None else list(keys)) for stream, keys in self._streams.items()]
        for stream, keys in todo:
            part = None if keys is None else keys[:limit]
            limit -= 1 if part is None else len(part)
            self.drop(stream, part)
            failed = self.covers_all(stream) if part is None else self.covers(part[0])
            if failed or limit <= 0:
                return

    def pay_whole(self, stream: str) -> bool:
        """Whether blocks of the stream may be written: it is not, or no longer, to be dropped whole."""
        if self.covers_all(stream):
            self.drop(stream)
        return not self.covers_all(stream)
