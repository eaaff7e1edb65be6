"""The blocks of one stream in the tiers, and when each may be deleted.

A block is written once and never changes. The manifest in the lowest tier is the commit: it names the blocks that a
memory is made of. What replaces a block is written beside it; the old one is deleted when the lowest tier has
acknowledged a manifest that no longer names it, and no question that began before reads it any more.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence

from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack


class StoredBlocks:
    """Which blocks of a stream the lowest tier holds or may hold. Not thread-safe, but for :attr:`readers`.

    * ``nbytes``: of all of them, rounded up as host memory does it
    * ``generation``: how often blocks were replaced; ``readers``: the generation that each question under way reads
    """

    def __init__(self, stream: str, tiers: TierStack, readers: Sequence[int]) -> None:
        self.stream, self.tiers, self.readers = stream, tiers, readers
        self.nbytes = 0
        self.generation = 0
        self._sizes: dict[BlockKey, int] = {}
        # Named by the manifest in the tier, perhaps, and not by the next one; with the generation that replaced each.
        self._replaced: dict[BlockKey, int] = {}
        # Per tier: named by no manifest, to be deleted.
        self._unnamed: list[dict[BlockKey, int]] = [{} for _ in tiers.tiers]
        # Tiers in which another process may have left blocks that no manifest names.
        self._unlisted = set(range(len(tiers.tiers)))
        # Never those of another process, whose blocks may still lie somewhere.
        self._numbers = itertools.count(secrets.randbits(30) << 32)
        self._failures = self._failed()

    @property
    def named_bytes(self) -> int:
        """Bytes of the blocks that the next manifest names."""
        spare = self._replaced.keys() | self._unnamed[-1].keys()
        return self.nbytes - sum(self._sizes.get(key, 0) for key in spare)

    def new_key(self, layer: int, head: int) -> BlockKey:
        """A key that nothing was ever stored under."""
        return BlockKey(self.stream, layer, head, next(self._numbers))

    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> bool:
        """Whether the lowest tier has all of them; if not, what it may have of them is deleted later."""
        for key, block in items:
            self.found(key, block.nbytes)
        try:
            done = all(outcome is Outcome.HIT for outcome in self.tiers.store(items, copies=copies))
        except BaseException:
            self._discard(key for key, _ in items)
            raise
        if not done:
            self._discard(key for key, _ in items)
        return done

    def found(self, key: BlockKey, nbytes: int) -> None:
        """The lowest tier holds this block."""
        self._sizes[key] = cell_size(nbytes)
        self.nbytes += self._sizes[key]

    def replace(self, keys: Iterable[BlockKey]) -> None:
        """The index does not name these any more."""
        self.generation += 1
        self._replaced.update(dict.fromkeys(keys, self.generation))

    def acknowledged(self) -> None:
        """The lowest tier has a manifest of what the index names now."""
        for unnamed in self._unnamed:
            unnamed.update(self._replaced)
        self._replaced.clear()

    def sweep(self) -> None:
        """Delete what no manifest names, in every tier that can now."""
        for level, unnamed in enumerate(self._unnamed):
            if level in self._unlisted:
                outcome, keys = self.tiers.tiers[level].list_blocks(self.stream)
                if outcome is not Outcome.HIT:
                    continue
                self._unlisted.remove(level)
                unnamed.update(dict.fromkeys((key for key in keys if key not in self._sizes), 0))
            oldest = min(self.readers, default=self.generation)
            ready = [key for key, since in unnamed.items() if since <= oldest]
            if ready and self.tiers.drop_blocks(level, self.stream, ready) is not None:
                for key in ready:
                    del unnamed[key]
                    if level == len(self._unnamed) - 1:
                        self.nbytes -= self._sizes.pop(key, 0)

    def leave_unlisted(self) -> None:
        """Delete nothing but what is replaced here: another process may be writing this stream."""
        self._unlisted.clear()

    def verify(self) -> bool:
        """Ask the lowest tier what it holds, once after each time that it failed, since a server that was restarted may
        be empty; write again what it lacks and a tier above has. False where something was missing."""
        failures = self._failed()
        if failures == self._failures or not self.tiers.shared:
            return True
        outcome, listed = self.tiers.lowest.list_blocks(self.stream)
        if outcome is not Outcome.HIT or self._sizes.keys() <= set(listed):
            self._failures = failures if outcome is Outcome.HIT else self._failures
            return True
        missing = self._sizes.keys() - set(listed)
        for key in missing:
            self._unnamed[-1].pop(key, None)
        wanted = list(missing - self._replaced.keys())
        for tier in self.tiers.tiers[:-1]:
            loaded = zip(wanted, tier.load(wanted), strict=True)
            found = [(key, one.block) for key, one in loaded if one.block is not None]
            if Outcome.RETRY in self.tiers.store(found, copies=False):
                return False
            there = {key for key, _ in found}
            missing -= there
            wanted = [key for key in wanted if key not in there]
        for key in missing:
            self.nbytes -= self._sizes.pop(key)
            self._replaced.pop(key, None)
        self._failures = failures
        return False

    def _discard(self, keys: Iterable[BlockKey]) -> None:
        gone = dict.fromkeys(keys, 0)
        for unnamed in self._unnamed:
            unnamed.update(gone)

    def _failed(self) -> int:
        return self.tiers.lowest.state().counts.get("failures", 0)
