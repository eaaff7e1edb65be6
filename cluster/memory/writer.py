"""Threads that do what takes time for the memories of many streams, one job of a stream at a time, between steps."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

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
            self.add_block(key, block.nbytes)
        try:
            done = all(outcome is Outcome.HIT for outcome in self.tiers.store(items, copies=copies))
        except BaseException:
            self._discard(key for key, _ in items)
            raise
        if not done:
            self._discard(key for key, _ in items)
        return done

    def add_block(self, key: BlockKey, nbytes: int) -> None:
        """The lowest tier holds this block."""
        self._sizes[key] = cell_size(nbytes)
        self.nbytes += self._sizes[key]

    def mark_replaced(self, keys: Iterable[BlockKey]) -> None:
        """The index does not name these any more."""
        self.generation += 1
        self._replaced.update(dict.fromkeys(keys, self.generation))

    def manifest_written(self) -> None:
        """The lowest tier has a manifest of what the index names now."""
        for unnamed in self._unnamed:
            unnamed.update(self._replaced)
        self._replaced.clear()

    def delete_unnamed(self) -> None:
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

    def keep_unlisted(self) -> None:
        """Delete nothing but what is replaced here: another process may be writing this stream."""
        self._unlisted.clear()

    def verify_lowest_tier(self) -> bool:
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


log = logging.getLogger(__name__)

THREADS = 4
"""Streams whose jobs run side by side: a tier that is slow for some holds up no other."""

PATIENCE_S = 1.0
"""Longest that one piece of a job waits for a step of the engine's: an engine that never rests does not stop it."""

_IDLE_S = 5.0


class MemoryWriter:
    """Calls ``work(stream)`` for every stream that was woken, in the order in which they were; a stream that is woken
    while its job runs gets another one after it. Thread-safe. Threads start when there is something to do, and end when
    there was nothing for a while.

    At most one entry waits per stream, so the queue is bounded by the number of streams.
    """

    def __init__(self, work: Callable[[str], None], *, threads: int = THREADS) -> None:
        self._work, self._most = work, threads
        self._waiting: dict[str, None] = {}
        self._busy: set[str] = set()
        self._threads = 0
        self._changed = threading.Condition()
        self._stepping = False
        self._stepped = threading.Condition()

    def schedule(self, stream: str) -> None:
        """There is something to do for a stream; returns at once."""
        with self._changed:
            self._waiting[stream] = None
            if len(self._waiting) + len(self._busy) > self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, name=f"memory {self._threads}", daemon=True).start()
            self._changed.notify_all()

    @contextmanager
    def engine_step(self) -> Iterator[None]:
        """While the engine computes windows: jobs stand aside from their next piece on."""
        self._stepping = True
        try:
            yield
        finally:
            with self._stepped:
                self._stepping = False
                self._stepped.notify_all()

    def yield_to_engine(self) -> None:
        """Between two pieces of a job: wait for the step that runs, if one does, for :data:`PATIENCE_S` at most.

        The two would share Python's lock and the cores, and no window is to wait for its camera's past.
        """
        if self._stepping:
            with self._stepped:
                self._stepped.wait_for(lambda: not self._stepping, PATIENCE_S)

    def is_waiting(self, stream: str) -> bool:
        """Whether a job of this stream waits or runs."""
        with self._changed:
            return stream in self._waiting or stream in self._busy

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def _run(self) -> None:
        _use_one_core()
        while (stream := self._next()) is not None:
            try:
                self._work(stream)
            except Exception:
                log.exception("the memory of camera %r could not be written", stream)
            with self._changed:
                self._busy.remove(stream)
                self._changed.notify_all()

    def _next(self) -> str | None:
        until = time.monotonic() + _IDLE_S
        with self._changed:
            while True:
                stream = next((each for each in self._waiting if each not in self._busy), None)
                if stream is not None:
                    del self._waiting[stream]
                    self._busy.add(stream)
                    return stream
                left = until - time.monotonic()
                if left <= 0:
                    self._threads -= 1
                    return None
                self._changed.wait(left)


def _use_one_core() -> None:
    """Have torch compute on this thread alone when it is called here. Each thread that calls it otherwise gets as many
    helpers as there are cores, which spin for a while after every call and slow the engine's steps down by a third."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That holds for this thread, and for all that call torch for the first time later, unless it is set anew.
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
