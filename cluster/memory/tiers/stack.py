"""Tiers one above the other: what is remembered lies in the lowest, and copies of what is wanted lie above."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, runtime_checkable

from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState
from cluster.memory.tiers.owed import OwedDrops

_FLUSH_BATCH = 64


@runtime_checkable
class Holds(Protocol):
    """A tier that can keep blocks from being evicted."""

    def pin(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def unpin(self, keys: Sequence[BlockKey]) -> None: ...


@runtime_checkable
class Capped(Protocol):
    """A tier with a cap for each stream."""

    def cap(self, stream: str) -> int: ...

    def set_cap(self, stream: str, nbytes: int | None) -> None: ...


@dataclass(slots=True, eq=False)
class _Flight:
    """What was stored and dropped while a load was under way."""

    stored: set[BlockKey] = field(default_factory=set)
    dropped: set[BlockKey] = field(default_factory=set)
    streams: set[str] = field(default_factory=set)

    def dropped_meanwhile(self, key: BlockKey) -> bool:
        return key in self.dropped or key.stream in self.streams


class TierStack:
    """Writes through to every tier and reads from the uppermost that has it. Thread-safe: loads run beside each other
    and beside writes; writes wait for each other.

    What the lowest tier could not take for now is *dirty*: pinned in a tier above until :meth:`flush` has written it.
    If there is no room for that either, the oldest dirty blocks are lost, of the same stream first. A drop that a tier
    could not do is remembered, and what it covers is not given out. Tiers above the lowest should be near: they are
    written to under the lock that ends a load.

    Args:
        tiers: from the uppermost to the lowest, at least one, each with its own name.
        owed: most single blocks whose drop is remembered for a tier; beyond it whole streams are dropped there.

    Raises:
        ConfigError: no tiers, or two of one name.
    """

    def __init__(self, tiers: Sequence[Tier], *, owed: int = 65_536) -> None:
        self.tiers = tuple(tiers)
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"a memory needs one tier or more, each with its own name, not: {', '.join(names) or 'none'}"
            )
        self.upper, self.lowest = self.tiers[0], self.tiers[-1]
        self.counts = dict.fromkeys(("stored", "lost", "refused", "flushed", "promoted"), 0)
        self._owed = [OwedDrops(tier, owed) for tier in self.tiers]
        self._dirty: OrderedDict[BlockKey, int] = OrderedDict()
        self._manifest_at: dict[str, int] = {}
        self._flights: list[_Flight] = []
        self._writing = threading.Lock()
        self._lock = threading.Lock()

    @property
    def dirty(self) -> int:
        """Blocks that the lowest tier has not taken yet."""
        return len(self._dirty)

    # -- blocks ---------------------------------------------------------------------------------
    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> None:
        """Take blocks in, replacing what has the same key. What comes of each is in ``counts``: ``stored``; ``lost``:
        neither written nor held; ``refused``: larger than the lowest tier's cap, so only copies above may exist."""
        latest = dict(items)
        with self._writing:
            outcomes = self._write(list(latest.items()))
            with self._lock:
                # Loads that began before this may have what the lowest tier held before.
                for flight in self._flights:
                    flight.stored.update(latest)
                clean = []
                for (key, block), outcome in zip(latest.items(), outcomes, strict=True):
                    self._release(key)
                    if outcome is Outcome.RETRY:
                        self._keep_dirty(key, block)
                        continue
                    self._settled(key, outcome)
                    clean.append((key, block))
                for level in range(len(self.tiers) - 1):
                    self._copy(level, clean)

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """The blocks, in the order of ``keys``; each tier is asked once for all that those above it lack. What came
        from below is kept above. ``MISS`` is the lowest tier's word; ``RETRY`` if it could not say."""
        answers = [Loaded(Outcome.MISS)] * len(keys)
        source = [0] * len(keys)
        with self._flight() as flight:
            missing = list(range(len(keys)))
            for level, tier in enumerate(self.tiers):
                asked = [at for at in missing if not self._owed[level].covers(keys[at])]
                if not asked:
                    continue
                for at, got in zip(asked, tier.load([keys[at] for at in asked]), strict=True):
                    if got.outcome is Outcome.HIT or tier is self.lowest:
                        # Only a copy on its way is better than what the lowest tier says.
                        pending = answers[at].outcome is Outcome.PENDING
                        answers[at] = answers[at] if pending and got.block is None else got
                        source[at] = level
                    elif got.outcome is Outcome.PENDING:
                        answers[at] = got
                missing = [at for at in missing if answers[at].block is None]
            with self._lock:
                for at, key in enumerate(keys):
                    if flight.dropped_meanwhile(key):
                        answers[at] = Loaded(Outcome.MISS)
                for level in range(len(self.tiers) - 1):
                    found = [
                        (key, block)
                        for key, answer, below in zip(keys, answers, source, strict=True)
                        if (block := answer.block) is not None and below > level and key not in flight.stored
                    ]
                    self.counts["promoted"] += len(found)
                    self._copy(level, found)
        return answers

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int:
        """Forget blocks of a stream, or all of it and its manifest, in every tier; now, or once the tier can. From now
        on they are not given out. Returns how many blocks the tier that had most of them dropped now."""
        with self._writing:
            with self._lock:
                for flight in self._flights:
                    if keys is None:
                        flight.streams.add(stream)
                    else:
                        flight.dropped.update(keys)
                for owed in self._owed:
                    owed.remember(stream, keys)
                for key in [key for key in self._dirty if key.stream == stream] if keys is None else keys:
                    self._release(key)
            if keys is None:
                self._manifest_at.pop(stream, None)
            return max(owed.drop(stream, keys) for owed in self._owed)

    def flush(self, limit: int) -> int:
        """Do what was put off: drops, up to ``limit`` dirty blocks (oldest first), manifests. Call it regularly; it
        costs nothing while there is nothing to do. Returns how many blocks were written."""
        with self._writing:
            for owed in self._owed:
                owed.pay(limit)
            written, stuck = 0, set[str]()
            while written < limit:
                wanted = (key for key in self._dirty if key.stream not in stuck)
                batch = list(islice(wanted, min(limit - written, _FLUSH_BATCH)))
                if not batch:
                    break
                items = self._held(batch)
                outcomes = self._write(items)
                with self._lock:
                    for (key, _), outcome in zip(items, outcomes, strict=True):
                        if outcome is Outcome.RETRY:
                            stuck.add(key.stream)
                            continue
                        self._release(key)
                        self._settled(key, outcome)
                        written += outcome is Outcome.HIT
                if not self.lowest.state().up:
                    break
            self.counts["flushed"] += written
            late = ((stream, level) for stream, level in self._manifest_at.items() if level < len(self.tiers) - 1)
            for stream, level in list(islice(late, limit)):
                _, manifest = self.tiers[level].manifest(stream)
                if manifest is not None and not self._put_manifest(stream, manifest, len(self.tiers) - 1):
                    break
                self._manifest_at.pop(stream)
            return written

    # -- manifests ------------------------------------------------------------------------------
    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """Keep a manifest in the lowest tier that takes it; :meth:`flush` brings it down from a higher one."""
        with self._writing:
            for level in reversed(range(len(self.tiers))):
                if self._put_manifest(stream, manifest, level):
                    self._manifest_at[stream] = level
                    return Outcome.HIT
        return Outcome.RETRY

    def shared(self, stream: str) -> bool:
        """Whether another process finds the manifest put last: the uppermost tier is this one's own memory."""
        return self._manifest_at.get(stream, 0) > 0

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """The manifest from where it was put last, or, when nobody here put any, from the lowest tier that has one;
        ``RETRY`` if none has it and one could not be asked."""
        newest = self._manifest_at.get(stream)
        levels = reversed(range(len(self.tiers))) if newest is None else [newest]
        answer = Outcome.MISS
        for level in levels:
            if self._owed[level].covers_all(stream):
                continue
            outcome, manifest = self.tiers[level].manifest(stream)
            if outcome is Outcome.HIT:
                return outcome, manifest
            answer = outcome if outcome is Outcome.RETRY else answer
        return answer, None

    # -- how it is ------------------------------------------------------------------------------
    def usage(self, stream: str) -> dict[str, int]:
        """Bytes a stream takes, by the tier's name, uppermost first."""
        return {tier.name: tier.nbytes(stream) for tier in self.tiers}

    def states(self) -> dict[str, TierState]:
        """How each tier is, by its name, uppermost first."""
        return {tier.name: tier.state() for tier in self.tiers}

    def capacity(self, stream: str) -> int:
        """Most bytes a stream may hold: the cap of the lowest tier, without bound if that has none."""
        return self.lowest.cap(stream) if isinstance(self.lowest, Capped) else sys.maxsize

    def set_cap(self, stream: str, nbytes: int) -> None:
        """Another cap for a stream, in every tier that has caps of its own."""
        for tier in self.tiers:
            if isinstance(tier, Capped):
                tier.set_cap(stream, nbytes)

    def owed(self) -> dict[str, int]:
        """Streams of which each tier still has something to drop, by its name."""
        return {owed.tier.name: len(owed) for owed in self._owed}

    def close(self) -> None:
        """Close every tier."""
        for tier in self.tiers:
            tier.close()

    # -- inside ---------------------------------------------------------------------------------
    @contextmanager
    def _flight(self) -> Iterator[_Flight]:
        flight = _Flight()
        with self._lock:
            self._flights.append(flight)
        try:
            yield flight
        finally:
            with self._lock:
                self._flights.remove(flight)

    def _write(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """Store in the lowest tier, except streams that it is still to drop: those must wait for that."""
        owed = self._owed[-1]
        blocked = {stream for stream in {key.stream for key, _ in items} if not owed.pay_whole(stream)}
        passed = [item for item in items if item[0].stream not in blocked]
        outcomes = dict(zip((key for key, _ in passed), self.lowest.store(passed) if passed else (), strict=True))
        owed.replaced([key for key, outcome in outcomes.items() if outcome is Outcome.HIT])
        return [outcomes.get(key, Outcome.RETRY) for key, _ in items]

    def _held(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, Block]]:
        """Dirty blocks, from where they are held."""
        found = []
        for level, tier in enumerate(self.tiers[:-1]):
            here = [key for key in keys if self._dirty[key] == level]
            for key, loaded in zip(here, tier.load(here) if here else (), strict=True):
                if loaded.block is not None:
                    found.append((key, loaded.block))
                else:
                    # Somebody emptied that tier behind our back.
                    with self._lock:
                        self._lose(key)
        return found

    def _put_manifest(self, stream: str, manifest: bytes, level: int) -> bool:
        return self._owed[level].pay_whole(stream) and (self.tiers[level].put_manifest(stream, manifest) is Outcome.HIT)

    # -- under the lock -------------------------------------------------------------------------
    def _copy(self, level: int, items: Sequence[tuple[BlockKey, Block]]) -> None:
        """Put copies into a tier above the lowest, where nothing older may stay in their place."""
        tier, owed = self.tiers[level], self._owed[level]
        for stream in {key.stream for key, _ in items}:
            mine = [item for item in items if item[0].stream == stream]
            if not owed.pay_whole(stream):
                continue
            outcomes = tier.store(mine)
            taken = [key for (key, _), outcome in zip(mine, outcomes, strict=True) if outcome is Outcome.HIT]
            owed.replaced(taken)
            if len(taken) < len(mine):
                there = set(taken)
                owed.drop(stream, [key for key, _ in mine if key not in there])

    def _keep_dirty(self, key: BlockKey, block: Block) -> None:
        """Pin a block in the lowest tier above that takes it; copies go into the others."""
        holder = next(
            (level for level in reversed(range(len(self.tiers) - 1)) if self._pinned(level, key, block)), None
        )
        for level in range(len(self.tiers) - 1):
            if level != holder and holder is not None:
                self._copy(level, [(key, block)])
        if holder is None:
            self._lose(key)
        else:
            self._dirty[key] = holder

    def _pinned(self, level: int, key: BlockKey, block: Block) -> bool:
        """Whether a tier holds it now, after losing older dirty blocks if it takes that."""
        tier = self.tiers[level]
        if not isinstance(tier, Holds) or not self._owed[level].pay_whole(key.stream):
            return False
        while (outcome := tier.store([(key, block)])[0]) is Outcome.RETRY:
            there = [other for other, at in self._dirty.items() if at == level]
            if not there:
                return False
            self._lose(next((other for other in there if other.stream == key.stream), there[0]))
        if outcome is Outcome.HIT:
            self._owed[level].replaced([key])
        return outcome is Outcome.HIT and tier.pin([key]) == [True]

    def _release(self, key: BlockKey) -> None:
        """A block is not dirty any more."""
        level = self._dirty.pop(key, None)
        if level is not None:
            tier = self.tiers[level]
            assert isinstance(tier, Holds)
            tier.unpin([key])

    def _settled(self, key: BlockKey, outcome: Outcome) -> None:
        """The lowest tier took a block, or never will: then nothing older may stay there."""
        self.counts["stored" if outcome is Outcome.HIT else "refused"] += 1
        if outcome is not Outcome.HIT:
            self._owed[-1].remember(key.stream, [key])

    def _lose(self, key: BlockKey) -> None:
        """Give a block up: copies above go, and so does what the lowest tier may hold in its place, later."""
        self._release(key)
        for owed in self._owed[:-1]:
            owed.drop(key.stream, [key])
        self._owed[-1].remember(key.stream, [key])
        self.counts["lost"] += 1
