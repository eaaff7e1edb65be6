"""Tier stack: the lowest tier holds everything, upper ones cache copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cluster.errors import ConfigError
from cluster.memory.manifest import read_life
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState

Deletion = tuple[str, frozenset[BlockKey] | None]
"""A stream and the blocks deleted; None: all of them."""

# Every how many questions the slower way is tried, and the span of the moving average, in questions.
_TRIED_EVERY, _REMEMBERED = 8, 4


class LoadAhead:
    """Decides whether questions prefetch blocks, by measuring which way gets the blocks sooner.

    A wrong prediction costs bandwidth and CPU time, a right one hides latency; the balance depends on the model, the
    link and the machine. The first two questions try both ways, then one in eight the slower one. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions = 0
        # Moving average of the seconds from one layer's blocks to the next's, with and without prefetch.
        self._seconds: dict[bool, float] = {}

    def choose(self) -> bool:
        with self._lock:
            self._questions += 1
            if len(self._seconds) < 2:
                return True not in self._seconds
            faster = self._seconds[True] <= self._seconds[False]
            return faster != (self._questions % _TRIED_EVERY == 0)

    def note(self, ahead: bool, seconds: float) -> None:
        with self._lock:
            before = self._seconds.get(ahead, seconds)
            self._seconds[ahead] = before + (seconds - before) / _REMEMBERED


class TierStack:
    """Writes through to all tiers and reads from the uppermost that has a block. Thread-safe; no lock is held during
    tier calls, so a slow stream does not block others.

    Outcomes are the lowest tier's: ``HIT`` means that it holds the block or manifest. Blocks are immutable, so copies
    never become stale.

    A deleted stream is *being deleted* until every tier has confirmed it (:meth:`finish_deletions`). Until then,
    unconfirmed tiers are not read for it, and the lowest accepts nothing new.

    Args:
        tiers: from the uppermost to the lowest, at least one, with distinct names (else ``ConfigError``).
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
        self.load_ahead = LoadAhead()
        # Whether this process certainly still owns its streams; if not, each manifest write checks first.
        self.confirmed: Callable[[], bool] = lambda: True
        # Deletions during each running load.
        self._loads: list[list[Deletion]] = []
        # Streams being deleted: levels of the tiers yet to confirm, and lives of the cameras (empty matches any).
        self._deleting: dict[str, set[int]] = {}
        self._lives: dict[str, set[str]] = {}
        self._deletions = threading.Lock()
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether other processes can read the lowest tier; a single tier is this process's memory."""
        return len(self.tiers) > 1

    # -- blocks ---------------------------------------------------------------------------------
    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> list[Outcome]:
        """Store blocks. ``RETRY``: the lowest tier may or may not have the block; ``MISS``: it never will. ``copies``:
        also store accepted blocks in the tiers above."""
        blocked = {
            stream for stream in {key.stream for key, _ in items} if self._finish_deletion(stream, self.lowest) is None
        }
        passed = [item for item in items if item[0].stream not in blocked]
        by_key = dict(zip((key for key, _ in passed), self.lowest.store(passed) if passed else (), strict=True))
        outcomes = [by_key.get(key, Outcome.RETRY) for key, _ in items]
        held = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT]
        with self._lock:
            self.counts["stored"] += len(held)
            self.counts["refused"] += outcomes.count(Outcome.MISS)
        for level in range(len(self.tiers) - 1) if copies else ():
            self._copy(level, held)
        return outcomes

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """Load blocks in the order of ``keys``, with one call per tier for what the tiers above lack; hits are copied
        upwards. A block found in no tier gets the lowest tier's outcome, ``MISS`` or ``RETRY``."""
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
                        answers[at], source[at] = got, level
                missing = [at for at in missing if answers[at].block is None]
            for level in range(len(self.tiers) - 1):
                found = [
                    (key, block)
                    for key, answer, below in zip(keys, answers, source, strict=True)
                    if (block := answer.block) is not None and below > level
                ]
                if found:
                    with self._lock:
                        self.counts["promoted"] += len(found)
                    self._copy(level, found)
        finally:
            with self._lock:
                self._loads = [other for other in self._loads if other is not deleted]
        for stream, which in deleted:
            # Remove copies made after the deletion had reached a tier.
            late = [key for key in keys if key.stream == stream and (which is None or key in which)]
            for tier in self.tiers[:-1] if late else ():
                tier.drop(stream, late)
            gone = set(late)
            answers = [Loaded(Outcome.MISS) if key in gone else one for key, one in zip(keys, answers, strict=True)]
        return answers

    # -- whole streams --------------------------------------------------------------------------
    def drop(self, stream: str, life: str = "") -> int | None:
        """Delete a stream and its manifest in every tier; with a ``life``, not in the lowest if the manifest there is a
        namesake's, whose process deletes unnamed blocks. Returns the largest count of any tier, None if some tier is
        uncertain; :meth:`finish_deletions` then repeats the deletion while this process lives."""
        # Not while another deletion ends, which would confirm this one.
        with self._deletions, self._lock:
            self._deleting[stream] = set(range(len(self.tiers)))
            self._lives.setdefault(stream, set()).add(life)
        # Then, so that a load that begins in between knows of it.
        self._note_deletion((stream, None))
        gone = [self._finish_deletion(stream, tier) for tier in self.tiers]
        certain = [number for number in gone if number is not None]
        return max(certain) if len(certain) == len(gone) else None

    def clear(self, stream: str) -> None:
        """Delete a stream, skipping the search for its blocks if no tier holds any."""
        # Reading the manifest also makes the lowest tier notice other processes' writes.
        unknown = self.manifest(stream)[0] is not Outcome.MISS
        if unknown or not all(state.up for state in self.states().values()) or any(self.usage(stream).values()):
            self.drop(stream)

    def drop_copies(self, stream: str) -> None:
        """Delete a stream's copies above the lowest tier, as after a move no other process can reach this node's."""
        with self._lock:
            if self.shared:
                self._deleting.setdefault(stream, set()).update(range(len(self.tiers) - 1))
        self._note_deletion((stream, None))
        for tier in self.tiers[:-1]:
            self._finish_deletion(stream, tier)

    def drop_blocks(self, level: int, stream: str, keys: Sequence[BlockKey]) -> int | None:
        """Delete blocks in one tier; returns how many existed, None if uncertain, which the caller must repeat."""
        self._note_deletion((stream, frozenset(keys)))
        return self.tiers[level].drop(stream, keys)

    def finish_deletions(self) -> None:
        """Retry incomplete deletions; free if there are none."""
        for stream in list(self._deleting):
            for tier in self.tiers:
                self._finish_deletion(stream, tier)

    @property
    def deleting(self) -> frozenset[str]:
        """Streams whose deletion is incomplete in some tier."""
        with self._lock:
            return frozenset(self._deleting)

    # -- manifests ------------------------------------------------------------------------------
    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """Replace a stream's manifest. ``RETRY``: the lowest tier may or may not have it; ``MISS``: it never will."""
        if self._finish_deletion(stream, self.lowest) is None:
            return Outcome.RETRY
        return self.lowest.put_manifest(stream, manifest)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """The lowest tier's manifest; ``RETRY`` if unavailable."""
        if self._finish_deletion(stream, self.lowest) is None:
            return Outcome.RETRY, None
        return self.lowest.manifest(stream)

    def renew(self, stream: str) -> None:
        """Renew the expiry of a stream in use; see :meth:`Tier.renew`."""
        for level, tier in enumerate(self.tiers):
            if level not in self._deleting.get(stream, ()):
                tier.renew(stream)

    # -- state ----------------------------------------------------------------------------------
    def usage(self, stream: str) -> dict[str, int]:
        """Bytes of a stream by tier name, uppermost first."""
        return {tier.name: tier.nbytes(stream) for tier in self.tiers}

    def states(self) -> dict[str, TierState]:
        return {tier.name: tier.state() for tier in self.tiers}

    @property
    def trouble(self) -> str:
        """The tiers that do not work, with reasons; empty if all do."""
        return "; ".join(f"{name}: {state.trouble}" for name, state in self.states().items() if state.trouble)

    def set_cap(self, stream: str, nbytes: int | None, *, shrinking: bool = False) -> None:
        """Set a stream's cap in all tiers; see :meth:`Tier.set_cap`."""
        for tier in self.tiers:
            tier.set_cap(stream, nbytes, shrinking=shrinking)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    # -- internal -------------------------------------------------------------------------------
    def _copy(self, level: int, items: Sequence[tuple[BlockKey, Block]]) -> None:
        wanted = [item for item in items if level not in self._deleting.get(item[0].stream, ())]
        if wanted:
            self.tiers[level].store(wanted)

    def _note_deletion(self, deletion: Deletion) -> None:
        with self._lock:
            for deleted in self._loads:
                deleted.append(deletion)

    def _finish_deletion(self, stream: str, tier: Tier) -> int | None:
        """Delete a stream that is being deleted in one tier; returns how many blocks existed, None if uncertain."""
        level = self.tiers.index(tier)
        if level not in self._deleting.get(stream, ()):
            return 0
        # Serialised, so that no deletion ends after another thread has begun to store again.
        with self._deletions:
            if level not in self._deleting.get(stream, ()):
                return 0
            gone = self._drop_lowest(stream) if tier is self.lowest else tier.drop(stream)
            if gone is None:
                return None
            with self._lock:
                if tier is self.lowest:
                    self._lives.pop(stream, None)
                unconfirmed = self._deleting.get(stream, set())
                unconfirmed.discard(level)
                if not unconfirmed:
                    self._deleting.pop(stream, None)
            return gone

    def _drop_lowest(self, stream: str) -> int | None:
        lives = self._lives[stream]
        if "" not in lives:
            outcome, data = self.lowest.manifest(stream)
            if outcome is Outcome.RETRY:
                return None
            if data is not None and read_life(data) not in lives:
                return 0
        return self.lowest.drop(stream)
