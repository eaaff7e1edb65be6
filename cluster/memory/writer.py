"""Background writer of camera memories: one job per stream at a time, yielding to engine steps."""

from __future__ import annotations

import atexit
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from cluster.memory.manifest import PART_BYTES, StoredManifest, from_byte_blocks, to_byte_blocks
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.slabs import cell_size
from cluster.memory.tiers.stack import TierStack

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

_LIST_PAUSE_S = 5.0
"""Pause after a tier failed to list its blocks, which may take several calls, each up to the deadline."""


class StoredBlocks:
    """Accounting of a stream's blocks in the lowest tier. Not thread-safe except for :attr:`readers`.

    * ``nbytes``: total of the allocated cells
    * ``named``: byte blocks other than the heads' index (window state, compressor state), by name
    * ``generation``: counts replacements; ``readers``: the generation each open view reads
    """

    def __init__(self, stream: str, tiers: TierStack, readers: Sequence[int]) -> None:
        self.stream, self.tiers, self.readers = stream, tiers, readers
        self.nbytes = 0
        self.generation = 0
        self.named: dict[str, list[BlockKey]] = {}
        self._sizes: dict[BlockKey, int] = {}
        # Possibly named by the stored manifest but not by the next one; with the generation that replaced each.
        self._replaced: dict[BlockKey, int] = {}
        # Per tier: blocks to delete, with that generation.
        self._unnamed: list[dict[BlockKey, int]] = [{} for _ in tiers.tiers]
        # Whether to list tiers for other processes' unnamed blocks; the tiers still to be listed.
        self._lists, self._unlisted = True, set(range(len(tiers.tiers)))
        self._list_after = 0.0
        # Random start, so that other processes' numbers are not reused.
        self._numbers = itertools.count(secrets.randbits(30) << 32)
        self._failures = self._failed()

    @property
    def named_bytes(self) -> int:
        """Bytes of blocks that the next manifest names."""
        spare = self._replaced.keys() | self._unnamed[-1].keys()
        return self.nbytes - sum(self._sizes.get(key, 0) for key in spare)

    def new_key(self, layer: int, head: int) -> BlockKey:
        """A key that was never used before."""
        return BlockKey(self.stream, layer, head, next(self._numbers))

    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> bool:
        """Store blocks; if the lowest tier refuses any, all of them are marked for deletion and the result is False."""
        for key, block in items:
            self.add_block(key, block.nbytes)
        try:
            done = all(outcome is Outcome.HIT for outcome in self.tiers.store(items, copies=copies))
        except BaseException:
            self._discard(key for key, _ in items)
            raise
        if not done:
            self._discard(key for key, _ in items)
            # A full tier is retried every second; leftovers of the attempts must not add up to the cap.
            self.delete_unnamed()
        return done

    def byte_items(self, data: bytes, layer: int, head: int) -> list[tuple[BlockKey, Block]]:
        return [(self.new_key(layer, head), block) for block in to_byte_blocks(data)]

    def put_bytes(self, name: str, data: bytes) -> bool:
        """Replace the bytes stored under a name; False, leaving them in place, if the lowest tier refuses."""
        items = self.byte_items(data, 0, 0)
        if items and not self.store(items, copies=False):
            return False
        if before := self.named.get(name):
            self.mark_replaced(before)
        self.named[name] = [key for key, _ in items]
        return True

    def load_bytes(self, name: str) -> bytes:
        """The bytes stored under a name; empty if there are none or they cannot be loaded."""
        loaded = self.tiers.load(self.named.get(name, []))
        blocks = [one.block for one in loaded if one.block is not None]
        return from_byte_blocks(blocks) if len(blocks) == len(loaded) else b""

    def add_named(self, named: Mapping[str, Sequence[int]], most: int) -> None:
        """Record a restored manifest's named bytes, by block number; none exceeds ``most`` bytes."""
        self.named = {name: [BlockKey(self.stream, 0, 0, block) for block in blocks] for name, blocks in named.items()}
        for key in itertools.chain(*self.named.values()):
            self.add_block(key, min(PART_BYTES, most))

    def add_block(self, key: BlockKey, nbytes: int) -> None:
        """Record a block in the lowest tier."""
        self._sizes[key] = cell_size(nbytes)
        self.nbytes += self._sizes[key]

    def mark_replaced(self, keys: Iterable[BlockKey]) -> None:
        """Mark blocks that the index no longer names."""
        self.generation += 1
        self._replaced.update(dict.fromkeys(keys, self.generation))

    def manifest_written(self) -> None:
        """Call when the lowest tier has a manifest of the current index."""
        for unnamed in self._unnamed:
            unnamed.update(self._replaced)
        self._replaced.clear()

    def delete_unnamed(self) -> None:
        """Delete blocks that no manifest names and no open view reads, in every available tier. For an upper tier that
        is down, deletions are not queued, which would be unbounded; it is listed once it is back."""
        for level, unnamed in enumerate(self._unnamed):
            if level in self._unlisted and time.monotonic() >= self._list_after:
                outcome, keys = self.tiers.tiers[level].list_blocks(self.stream)
                if outcome is Outcome.HIT:
                    self._unlisted.remove(level)
                    unnamed.update(dict.fromkeys((key for key in keys if key not in self._sizes), 0))
                else:
                    self._list_after = time.monotonic() + _LIST_PAUSE_S
            oldest = min(self.readers, default=self.generation)
            ready = [key for key, since in unnamed.items() if since <= oldest]
            if ready and self.tiers.drop_blocks(level, self.stream, ready) is not None:
                for key in ready:
                    del unnamed[key]
                    if level == len(self._unnamed) - 1:
                        self.nbytes -= self._sizes.pop(key, 0)
        for level, unnamed in enumerate(self._unnamed[:-1] if self._lists else ()):
            if gone := [key for key in unnamed if key not in self._sizes]:
                self._unlisted.add(level)
                for key in gone:
                    del unnamed[key]

    def deleted_everywhere(self, generation: int) -> bool:
        """Whether every tier has deleted all blocks replaced up to a generation."""
        left = itertools.chain.from_iterable(unnamed.values() for unnamed in self._unnamed)
        return not self._unlisted and all(since > generation for since in left)

    def keep_unlisted(self) -> None:
        """Limit deletion to blocks replaced here, as another process may be writing this stream."""
        self._lists = False
        self._unlisted.clear()

    def verify_lowest_tier(self, manifest: StoredManifest) -> bool:
        """After a failure of the lowest tier, compare its blocks with the record: a restarted server may be empty, or
        restored to an earlier state and ``manifest``. Rewrites missing blocks from the tiers above and marks
        reappeared ones for deletion. False if anything differed."""
        failures = self._failed()
        if failures == self._failures or not self.tiers.shared:
            return True
        outcome, listed = self.tiers.lowest.list_blocks(self.stream)
        # Blocks pending deletion may already be gone.
        missing = self._sizes.keys() - self._unnamed[-1].keys() - set(listed)
        back = set(listed) - self._sizes.keys() - self._unnamed[-1].keys() if self._lists else set()
        if back:
            there = manifest.compare()
            restored = there == "earlier" or (missing and there in ("same", "absent"))
            # Otherwise they may be those of a process that is taking the stream over.
            back = back if restored else set()
        self._unnamed[-1].update(dict.fromkeys(back, 0))
        if outcome is not Outcome.HIT or not (missing or back):
            self._failures = failures if outcome is Outcome.HIT else self._failures
            return True
        wanted = list(missing - self._replaced.keys())
        for tier in self.tiers.tiers[:-1]:
            loaded = zip(wanted, tier.load(wanted), strict=True)
            found = [(key, one.block) for key, one in loaded if one.block is not None]
            if Outcome.RETRY in self.tiers.store(found, copies=False):
                self.delete_unnamed()
                return False
            missing -= (rewritten := {key for key, _ in found})
            wanted = [key for key in wanted if key not in rewritten]
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
"""Concurrent jobs, so that a slow tier does not block other streams."""

MAX_SNAPSHOTS = 2 * THREADS
"""Maximum queued saves, and likewise last writes, whose windows are copied on the device: a 7B's takes 166 MB."""

PATIENCE_S = 1.0
"""Maximum wait of a job for an engine step, so that a busy engine does not starve it."""

_IDLE_S = 5.0
_EXIT_S = 10.0

_writers: weakref.WeakSet[MemoryWriter] = weakref.WeakSet()
_limiting = threading.Lock()

Window: TypeAlias = Callable[[], bytes]
"""Snapshot of a stream's window; serialised when called."""

SnapshotOf: TypeAlias = Callable[[str, Callable[[int], bool]], Window | None]
"""(stream, whether a window of n bytes has room) -> a snapshot of its window; None without a window or room."""


@dataclass(frozen=True, slots=True)
class PendingSave:
    """Pending write of one stream: settle frames up to ``upto``, then save ``window``, the window state as of that
    frame. ``hidden``: the memory's at the same time."""

    upto: int
    window: Window | None
    hidden: int


@dataclass(frozen=True, slots=True)
class LastWrite:
    """Last write of a memory before its release; ``saved``: whether memory and ``window`` were both written."""

    memory: StreamMemory
    window: Window | None
    saved: Future[bool] = field(default_factory=Future)

    def write(self) -> bool:
        """Write the memory; returns whether its window was saved with it. Failures are logged."""
        memory, stream = self.memory, self.memory.stream
        try:
            if memory.owned and memory.manifest.compare() == "later":
                # The hand-over took too long: writing now would overwrite the new owner's data.
                log.warning("camera %r: another process writes its memory; frames waiting here are dropped", stream)
                memory.counts.drop_frames(len(memory.recent))
                return False
            self._settle()
            if memory.recent:
                log.warning("camera %r: its last %d frames were not stored in memory", stream, len(memory.recent))
                memory.counts.drop_frames(len(memory.recent))
            elif self.window is not None and memory.save(self.window()) is Outcome.HIT:
                return bool(memory.stored.named["window"])
            memory.save()
        except Exception:
            log.exception("the memory of camera %r could not be written", stream)
        return False

    def _settle(self) -> None:
        try:
            self.memory.settle()
        except Exception:
            log.exception("cannot store the last frames of camera %r in its memory", self.memory.stream)


class MemoryWriter:
    """Calls ``work(stream)`` for scheduled streams in order; a stream scheduled while its job runs gets another job.
    Thread-safe. Threads start on demand and end when idle. The queue holds at most one entry per stream."""

    def __init__(self, work: Callable[[str], None]) -> None:
        self._work = work
        self._waiting: dict[str, Future[None]] = {}
        self._busy: set[str] = set()
        self._threads = 0
        self._ended = False
        self._changed = threading.Condition()
        self._stepping = False
        self._stepped = threading.Condition()
        _writers.add(self)

    def schedule(self, stream: str) -> Future[None]:
        """Enqueue a job for a stream; returns at once. The future completes with the job, or with its exception, and is
        cancelled after :meth:`end`."""
        done: Future[None] = Future()
        with self._changed:
            if self._ended:
                done.cancel()
                return done
            done = self._waiting.setdefault(stream, done)
            self._start_thread()
            self._changed.notify_all()
        return done

    def _start_thread(self) -> None:
        """Start a thread if there are more jobs; if there is no room for one, the next caller tries again."""
        if len(self._waiting) + len(self._busy) > self._threads < THREADS:
            with suppress(RuntimeError):
                threading.Thread(target=self._run, name=f"memory {self._threads + 1}", daemon=True).start()
                self._threads += 1

    @contextmanager
    def engine_step(self) -> Iterator[None]:
        """Context of an engine step, during which jobs pause at their next :meth:`yield_to_engine`."""
        self._stepping = True
        try:
            yield
        finally:
            self._resume_jobs()

    @contextmanager
    def engine_waits(self) -> Iterator[None]:
        """Context, within :meth:`engine_step`, of waiting for the GPU, which is most of a step; jobs run meanwhile.
        Otherwise, next to a busy engine, they would advance by one piece per :data:`PATIENCE_S`."""
        self._resume_jobs()
        try:
            yield
        finally:
            self._stepping = True

    def _resume_jobs(self) -> None:
        with self._stepped:
            self._stepping = False
            self._stepped.notify_all()

    def yield_to_engine(self) -> None:
        """Called between pieces of a job: wait for a running engine step to end, at most :data:`PATIENCE_S`. Both share
        the GIL and the cores, and windows have priority over memory writes."""
        if self._stepping:
            with self._stepped:
                self._stepped.wait_for(lambda: not self._stepping, PATIENCE_S)

    def is_waiting(self, stream: str) -> bool:
        with self._changed:
            self._start_thread()
            return stream in self._waiting or stream in self._busy

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job is queued or running; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Cancel queued jobs, accept no more, and wait for running ones; False after ``timeout_s``."""
        with self._changed:
            self._ended = True
            for done in self._waiting.values():
                done.cancel()
            self._waiting.clear()
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def _run(self) -> None:
        _use_one_core()
        while (job := self._next()) is not None:
            stream, done = job
            try:
                self._work(stream)
                done.set_result(None)
            except Exception as error:
                log.exception("the memory of camera %r could not be written", stream)
                done.set_exception(error)
            with self._changed:
                self._busy.remove(stream)
                self._changed.notify_all()

    def _next(self) -> tuple[str, Future[None]] | None:
        until = time.monotonic() + _IDLE_S
        with self._changed:
            while True:
                stream = next((each for each in self._waiting if each not in self._busy), None)
                if stream is not None:
                    self._busy.add(stream)
                    return stream, self._waiting.pop(stream)
                left = until - time.monotonic()
                if left <= 0:
                    self._threads -= 1
                    return None
                self._changed.wait(left)


@atexit.register
def _end_all() -> None:
    """End all writers at exit: a thread that the interpreter kills inside torch aborts the process."""
    for writer in list(_writers):
        writer.end(_EXIT_S)


def _use_one_core() -> None:
    """Limit torch to one thread in the calling thread. Otherwise each writer thread gets its own OpenMP pool over all
    cores, which spins after every call and slows engine steps by a third."""
    # One at a time: in between, another thread would take 1 for what is to be restored.
    with _limiting:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # The setting applies to this thread and to new ones; restore it for the latter.
        other = threading.Thread(target=torch.set_num_threads, args=(threads,))
        with suppress(RuntimeError):
            other.start()
            other.join()
