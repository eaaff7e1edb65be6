"""Tiers one above the other: what is remembered lies in the lowest, and copies of what is wanted lie above."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey, CappedTier, Loaded, Outcome, Tier, TierState

if TYPE_CHECKING:
    from cluster.memory.tiers.base import Outcome


Deletion = tuple[str, frozenset[BlockKey] | None]
"""A stream, and which of its blocks; None: all of it."""


class TierStack:
    """Writes through to every tier and reads from the uppermost that has it. Thread-safe; no lock is held while a tier
    works, so that one stream's slow call holds up no other's.

    What an outcome says of a block or manifest is the lowest tier's word: ``HIT`` means that this one has it. Blocks
    never change, so copies above need no care; where a tier above does not take one, there is none.

    A stream that is deleted whole is *being deleted* until every tier was certain to have done it
    (:meth:`finish_deletions`). Until then nothing of it is given out by the tiers that still owe it, and the lowest
    takes nothing new.

    Args:
        tiers: from the uppermost to the lowest, at least one, each with its own name.

    Raises:
        ConfigError: no tiers, or two of one name.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"a memory needs one tier or more, each with its own name, not: {', '.join(names) or 'none'}"
            )
        self.upper, self.lowest = self.tiers[0], self.tiers[-1]
        self.counts = dict.fromkeys(("stored", "refused", "promoted"), 0)
        # Per load under way, what was deleted meanwhile.
        self._loads: list[list[Deletion]] = []
        self._deleting: dict[str, set[int]] = {}
        self._deletions = threading.Lock()
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether another process finds what the lowest tier has: the uppermost is this one's own memory."""
        return len(self.tiers) > 1

    # -- blocks ---------------------------------------------------------------------------------
    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> list[Outcome]:
        """Take blocks in. ``RETRY``: the lowest tier may have it or not, ``MISS``: it never will. ``copies``: put what
        it took into the tiers above as well."""
        blocked = {stream for stream in {key.stream for key, _ in items} if self._finished(stream, self.lowest) is None}
        passed = [item for item in items if item[0].stream not in blocked]
        told = dict(zip((key for key, _ in passed), self.lowest.store(passed) if passed else (), strict=True))
        outcomes = [told.get(key, Outcome.RETRY) for key, _ in items]
        held = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT]
        with self._lock:
            self.counts["stored"] += len(held)
            self.counts["refused"] += outcomes.count(Outcome.MISS)
        for level in range(len(self.tiers) - 1) if copies else ():
            self._copy(level, held)
        return outcomes

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """The blocks, in the order of ``keys``; each tier is asked once for all that those above it lack. What came
        from below is kept above. ``MISS`` is the lowest tier's word; ``RETRY`` if it could not say."""
        answers = [Loaded(Outcome.MISS)] * len(keys)
        source = [0] * len(keys)
        deleted: list[Deletion] = []
        with self._lock:
            self._loads.append(deleted)
        try:
            missing = list(range(len(keys)))
            for level, tier in enumerate(self.tiers):
                asked = [at for at in missing if level not in self._deleting.get(keys[at].stream, ())]
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
            for level in range(len(self.tiers) - 1):
                found = [
                    (key, block)
                    for key, answer, below in zip(keys, answers, source, strict=True)
                    if (block := answer.block) is not None and below > level
                ]
                if found:
                    self.counts["promoted"] += len(found)
                    self._copy(level, found)
        finally:
            with self._lock:
                self._loads = [other for other in self._loads if other is not deleted]
        for stream, which in deleted:
            # Copies made after the deletion passed through a tier.
            late = [key for key in keys if key.stream == stream and (which is None or key in which)]
            for tier in self.tiers[:-1]:
                tier.drop(stream, late)
            gone = set(late)
            answers = [Loaded(Outcome.MISS) if key in gone else one for key, one in zip(keys, answers, strict=True)]
        return answers

    # -- whole streams --------------------------------------------------------------------------
    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        """Delete blocks of a stream, or all of it and its manifest, in every tier; returns how many the tier that had
        most of them deleted, None where some tier is not certain. Of a whole stream, what is not done now is done by
        :meth:`finish_deletions`, as long as this process lives; blocks are the caller's to ask for again."""
        if keys is not None:
            gone = [self.drop_blocks(level, stream, keys) for level in range(len(self.tiers))]
        else:
            self._tell_loads((stream, None))
            with self._lock:
                self._deleting[stream] = set(range(len(self.tiers)))
            gone = [self._finished(stream, tier) for tier in self.tiers]
        certain = [number for number in gone if number is not None]
        return max(certain) if len(certain) == len(gone) else None

    def drop_blocks(self, level: int, stream: str, keys: Sequence[BlockKey]) -> int | None:
        """Delete blocks in one tier; returns how many there were, None where it is not certain."""
        self._tell_loads((stream, frozenset(keys)))
        return self.tiers[level].drop(stream, keys)

    def finish_deletions(self) -> None:
        """Try again what tiers could not delete; costs nothing where there is nothing."""
        for stream in list(self._deleting):
            for tier in self.tiers:
                self._finished(stream, tier)

    @property
    def deleting(self) -> frozenset[str]:
        """Streams that some tier has not deleted yet."""
        with self._lock:
            return frozenset(self._deleting)

    # -- manifests ------------------------------------------------------------------------------
    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """Replace a stream's manifest. ``RETRY``: the lowest tier may have it or not, ``MISS``: it never will."""
        if self._finished(stream, self.lowest) is None:
            return Outcome.RETRY
        return self.lowest.put_manifest(stream, manifest)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """The lowest tier's manifest; ``RETRY`` where it cannot be asked."""
        if self._finished(stream, self.lowest) is None:
            return Outcome.RETRY, None
        return self.lowest.manifest(stream)

    # -- how it is ------------------------------------------------------------------------------
    def usage(self, stream: str) -> dict[str, int]:
        """Bytes a stream takes, by the tier's name, uppermost first."""
        return {tier.name: tier.nbytes(stream) for tier in self.tiers}

    def states(self) -> dict[str, TierState]:
        """How each tier is, by its name, uppermost first."""
        return {tier.name: tier.state() for tier in self.tiers}

    def capacity(self, stream: str) -> int:
        """Most bytes a stream may hold: the cap of the lowest tier, without bound if that has none."""
        return self.lowest.cap(stream) if isinstance(self.lowest, CappedTier) else sys.maxsize

    def set_cap(self, stream: str, nbytes: int) -> None:
        """Another cap for a stream, in every tier that has caps of its own."""
        for tier in self.tiers:
            if isinstance(tier, CappedTier):
                tier.set_cap(stream, nbytes)

    def close(self) -> None:
        """Close every tier."""
        for tier in self.tiers:
            tier.close()

    # -- inside ---------------------------------------------------------------------------------
    def _copy(self, level: int, items: Sequence[tuple[BlockKey, Block]]) -> None:
        wanted = [item for item in items if level not in self._deleting.get(item[0].stream, ())]
        if wanted:
            self.tiers[level].store(wanted)

    def _tell_loads(self, deletion: Deletion) -> None:
        with self._lock:
            for deleted in self._loads:
                deleted.append(deletion)

    def _finished(self, stream: str, tier: Tier) -> int | None:
        """How many blocks a tier deletes now of a stream that it was to delete; None while it is not certain to."""
        level = self.tiers.index(tier)
        if level not in self._deleting.get(stream, ()):
            return 0
        # One thread at a time, so that no deletion ends after another thread has begun to store anew.
        with self._deletions:
            if level not in self._deleting.get(stream, ()):
                return 0
            gone = tier.drop(stream)
            if gone is None:
                return None
            with self._lock:
                owing = self._deleting.get(stream, set())
                owing.discard(level)
                if not owing:
                    self._deleting.pop(stream, None)
            return gone
