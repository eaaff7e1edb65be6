"""The camera memories of one process, stored in shared tiers."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from torch import Tensor

from cluster.errors import NotReadyError
from cluster.memory.eviction import check_nothing_left, delete_before, expire, not_deleted, unreadable
from cluster.memory.head_memory import KVChunk, MemoryShape
from cluster.memory.manifest import LAYOUT, ReleasedMemory
from cluster.memory.memory_counts import MemoryReport
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import MAX_SNAPSHOTS, THREADS, LastWrite, MemoryWriter, PendingSave, SnapshotOf, Window
from cluster.registry import retrievers
from cluster.types import MICROSECONDS, DeletedMemory, MemorySpec

log = logging.getLogger(__name__)

MAX_REOPENED = 64
"""Maximum number of released streams whose memory is kept open after a question."""

MAX_RELEASED = 4096
"""Maximum number of released streams that can still be queried."""

PREPARED_S = 300.0
"""Seconds after which a prepared stream that was never opened is discarded: its client may have disconnected."""


class MemoryBank:
    """Accepts the KV that leaves the engine's windows and keeps one :class:`StreamMemory` per camera. All calls except
    :meth:`memory_reports`, :meth:`memory_time` and :meth:`prepare_stream` come from the engine's thread, which only
    enqueues frames; clustering, compression and writes run on the threads of :class:`MemoryWriter`.

    ``tiers``: storage shared by all memories. ``default``: settings for answering questions about streams that another
    process opened. The engine sets ``window``, which snapshots a stream's window so that it is saved and restored with
    the memory, and ``shape``, that of the model's KV.
    """

    def __init__(self, tiers: TierStack, *, default: MemorySpec | None = None) -> None:
        self.tiers = tiers
        self.window: SnapshotOf | None = None
        self.shape: MemoryShape | None = None
        self.writer = MemoryWriter(self._write)
        self._default = default
        self._due: dict[str, None] = {}
        self._pending_saves: dict[str, PendingSave] = {}
        self._last_writes: dict[str, LastWrite] = {}
        # Released memories reopened only to delete frames beyond their retention.
        self._expiring: dict[str, StreamMemory] = {}
        self._deletions = 0
        self._prepared: dict[str, tuple[StreamMemory, bytes | None]] = {}
        # Streams already deleted from the tiers, about to be opened without a memory.
        self._cleared: set[str] = set()
        self._memories: dict[str, StreamMemory] = {}
        self._retrievers: dict[str, Retriever] = {}
        # Streams whose source ended or moved; a question may reopen them.
        self._released: OrderedDict[str, ReleasedMemory] = OrderedDict()
        # Streams reopened for questions only: another process may be writing them.
        self._reopened: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def prepare_stream(self, stream: str, spec: MemorySpec | None) -> None:
        """Restore a stream from the tiers before it is opened; without ``spec``, delete it there. Callable from any
        thread, to spare the engine's thread the wait for the tiers. ``ConfigError`` for an unknown policy or option."""
        if stream in self._memories and stream not in self._reopened:
            return
        self._finish_last_write(stream)
        self._save_pending(stream)
        if spec is None:
            self.tiers.clear(stream)
            self._cleared.add(stream)
            return
        deletions = self._deletions
        restored = self._restore(stream, spec)
        with self._lock:
            # A concurrent deletion may concern this stream.
            if (stream not in self._memories or stream in self._reopened) and deletions == self._deletions:
                self._prepared[stream] = restored

    def _new_memory(self, stream: str, spec: MemorySpec) -> StreamMemory:
        return StreamMemory(stream, spec, self.tiers, self.shape, self.writer.yield_to_engine)

    def _restore(self, stream: str, spec: MemorySpec) -> tuple[StreamMemory, bytes | None]:
        """Create a memory, restore it from the lowest tier, and return it with its saved window state."""
        memory = self._new_memory(stream, spec)
        return memory, (memory.stored.load_bytes("window") or None) if memory.restore() is Outcome.HIT else None

    def open_stream(self, stream: str, spec: MemorySpec | None) -> bytes | None:
        """Open, continue or reconfigure a stream's memory; ``spec`` None deletes it. ``ConfigError`` for an unknown
        policy or option.

        Returns the window state saved with the memory; None if there is none or the tiers are unavailable (the memory
        is then restored once they recover).
        """
        if stream in self._reopened:
            # Another process may have written it since: restore from the tiers.
            self._close_reopened(stream)
        self._finish_last_write(stream)
        held = self._memories.get(stream)
        prepared, cleared = self._prepared.pop(stream, None), stream in self._cleared
        self._cleared.discard(stream)
        if spec is None:
            if held is not None:
                self._close_memory(stream)
            self._released.pop(stream, None)
            if held is not None or not cleared:
                self.tiers.clear(stream)
            return None
        retriever = retrievers.get(spec.retriever)(**spec.retriever_options)
        window = None
        if held is None:
            if prepared is None or prepared[0].spec != spec:
                prepared = self._restore(stream, spec)
            held, window = prepared
        elif any(getattr(held.spec, name) != getattr(spec, name) for name in LAYOUT):
            # Another organiser cannot use these clusters, nor another dtype these blocks.
            with held.exclusive:
                held.delete_frames()
                self._close_memory(stream)
            before, held = held, self._new_memory(stream, spec)
            held.log = before.log
        else:
            held.change_spec(spec)
        self._register(held, retriever)
        self._released.pop(stream, None)
        return window

    def _register(self, memory: StreamMemory, retriever: Retriever) -> None:
        if (released := self._released.get(memory.stream)) is not None and released.is_of(memory.manifest):
            memory.newest_s = released.newest_s
        with self._lock:
            self._prepared.pop(memory.stream, None)
            self._memories[memory.stream], self._retrievers[memory.stream] = memory, retriever
        memory.apply_cap()

    def accept_chunk(self, chunk: KVChunk) -> None:
        """Accept a frame that left a window (a :data:`~cluster.memory.head_memory.KVSink`); ignored for streams without
        a memory. A frame that cannot be stored is counted and logged."""
        if (memory := self._memories.get(chunk.stream)) is None:
            return
        try:
            memory.accept_chunk(chunk)
        except Exception:
            log.exception("cannot store a frame of camera %r in its memory", chunk.stream)
            memory.counts.drop_frames()
        if memory.settle_due:
            self._due[chunk.stream] = None

    def memory_time(self, stream: str, pts: int) -> int:
        """See :meth:`StreamMemory.memory_time`; callable from any thread."""
        return pts if (memory := self._memories.get(stream)) is None else memory.memory_time(pts)

    def count_lost_frame(self, stream: str) -> None:
        """Count a frame lost before :meth:`accept_chunk`; ignored for streams without a memory."""
        if (memory := self._memories.get(stream)) is not None:
            memory.counts.drop_frames()

    def wants_queries(self, stream: str) -> bool:
        return (memory := self._memories.get(stream)) is not None and memory.wants_queries

    def observe_queries(self, stream: str, queries: Sequence[Tensor]) -> None:
        """See :meth:`StreamMemory.observe_queries`; ignored for streams without a memory."""
        if (memory := self._memories.get(stream)) is not None:
            memory.observe_queries(queries)

    def schedule_saves(self) -> None:
        """Schedule settling and saving of streams with enough waiting frames, or leave them to the next call while too
        many are queued. Called between two steps, when windows are consistent."""
        if not self.tiers.lowest.state().up:
            # Nothing could be written, and each snapshot copies a window.
            return
        for stream in list(self._due):
            if sum(pending.upto >= 0 for pending in list(self._pending_saves.values())) >= MAX_SNAPSHOTS:
                return
            memory = self._memories.get(stream)
            # A stream whose last write is pending is scheduled later.
            if memory is not None and memory.recent and not self.writer.is_waiting(stream):
                self._schedule_save(memory)
            if memory is None or not self.writer.is_waiting(stream) or stream in self._pending_saves:
                self._due.pop(stream, None)

    def _schedule_save(self, memory: StreamMemory) -> Future[None]:
        """Schedule settling and saving, with a snapshot of the window taken now; the future is done with the job."""
        recent = memory.recent
        upto = recent[-1].index if recent else -1
        self._pending_saves[memory.stream] = PendingSave(upto, self._snapshot(memory) or bytes, memory.hidden)
        return self.writer.schedule(memory.stream)

    def run_maintenance(self) -> None:
        """Schedule periodic work (expiry, deletions, retries) of all streams; returns at once."""
        with self._lock:
            since = time.monotonic() - PREPARED_S
            self._prepared = {name: each for name, each in self._prepared.items() if each[0].newest_s >= since}
        for stream, memory in self._memories.items():
            if stream in self._reopened or self.writer.is_waiting(stream):
                continue
            if memory.settle_due:
                self._due[stream] = None
            else:
                self._pending_saves[stream] = PendingSave(-1, None, memory.hidden)
                self.writer.schedule(stream)
        self.schedule_saves()
        self._schedule_expiry()

    def _schedule_expiry(self) -> None:
        """Schedule the deletion of expired frames for a few released streams."""
        now_s = time.monotonic()
        due = [(stream, released) for stream, released in list(self._released.items()) if released.is_due(now_s)]
        for stream, released in due[:THREADS]:
            held = self._memories.get(stream)
            if self.writer.is_waiting(stream) or (held is not None and held.stored.readers):
                continue
            if held is not None:
                self._close_reopened(stream)
            self._released[stream] = replace(released, tried_s=now_s)
            self._expiring[stream] = self._new_memory(stream, released.spec)
            self.writer.schedule(stream)

    def _expire(self, stream: str) -> None:
        """Delete a released stream's expired frames, if that is scheduled."""
        if (memory := self._expiring.get(stream)) is None:
            return
        with memory.exclusive:
            if self._expiring.get(stream) is not memory:
                return
            try:
                released = self._released.get(stream)
                left = None if released is None else expire(memory, released)
                if left is None:
                    self._released.pop(stream, None)
                else:
                    self._released[stream] = left
            finally:
                del self._expiring[stream]
                self.tiers.lowest.leave(stream)

    def _write(self, stream: str) -> None:
        self._write_last(stream)
        self._expire(stream)
        self._save_pending(stream)

    def _save_pending(self, stream: str) -> None:
        """Execute a pending save; blocks while another thread does."""
        if (memory := self._memories.get(stream)) is None:
            return
        with memory.exclusive:
            # The stream may have been released meanwhile.
            if self._memories.get(stream) is not memory or (pending := self._pending_saves.pop(stream, None)) is None:
                return
            # Even without new frames or a writable tier: an open camera's memory is in use and must not expire.
            self.tiers.renew(stream)
            if memory.settle(pending.upto):
                memory.save(None if pending.window is None else pending.window(), pending.hidden)

    def save_stream(self, stream: str) -> None:
        """Write the memory and a window snapshot consistent with it; blocks until written."""
        if (memory := self._memories.get(stream)) is not None:
            self._schedule_save(memory).result()

    def wait_written(self, timeout_s: float = 60.0) -> bool:
        return self.writer.wait_idle(timeout_s)

    def get_memory(self, stream: str) -> tuple[StreamMemory, Retriever]:
        """A stream's memory and its retriever; ``NotReadyError`` if it has none."""
        memory = self._current(stream) or self._reopen(stream)
        if memory is None:
            raise NotReadyError(
                f"camera {stream!r} has no memory: nothing was recorded since its memory was deleted or lost, "
                "or memory.enabled is off for it"
            )
        return memory, self._retrievers[stream]

    def _current(self, stream: str) -> StreamMemory | None:
        """A stream's open memory; None, and closed, if it was reopened for questions and is outdated."""
        memory = self._memories.get(stream)
        if memory is not None and stream in self._reopened and memory.manifest.compare() in ("earlier", "later"):
            self._close_reopened(stream)
            return None
        return memory

    def _reopen(self, stream: str) -> StreamMemory | None:
        released = self._released.get(stream)
        spec = self._default if released is None else released.spec
        if spec is None:
            return None
        self._finish_last_write(stream)
        memory = self._new_memory(stream, spec)
        # Its owner may still be writing, so blocks that no manifest names must not be deleted here.
        outcome = memory.restore(sweep=False)
        if outcome is Outcome.RETRY:
            raise unreadable(stream)
        if outcome is Outcome.MISS:
            if self._released.pop(stream, None) is not None and released and released.manifest is not None:
                # It was written, but no tier has it any more, as after a Redis restart without data.
                log.warning("camera %r: its memory of %d frames is lost", stream, released.report.frames)
                memory.counts.drop_frames(released.report.frames)
            return None
        self._register(memory, retrievers.get(spec.retriever)(**spec.retriever_options))
        self._reopened[stream] = None
        while len(self._reopened) > MAX_REOPENED:
            self._close_reopened(next(iter(self._reopened)))
        return memory

    def _close_reopened(self, stream: str) -> None:
        # A deletion may be pending.
        self._save_pending(stream)
        if (released := self._released.get(stream)) is not None:
            self._released[stream] = replace(released, report=MemoryReport.of(self._memories[stream]))
        self._close_memory(stream)

    def __contains__(self, stream: object) -> bool:
        return stream in self._memories

    def release_stream(self, stream: str, *, save: bool = True) -> None:
        """Write a stream's memory and release it; nothing is deleted. Without ``save``, another process owns it already
        and nothing is written."""
        if (memory := self._memories.get(stream)) is not None and save:
            self._schedule_last_write(memory, None)
        elif memory is not None:
            with memory.exclusive:
                self._release(memory, owned=False)

    def drop_copies(self, stream: str) -> None:
        """Delete a released stream's copies above the lowest tier, after its last write, for which it may block."""
        self._finish_last_write(stream)
        self.tiers.drop_copies(stream)

    def hand_over(self, stream: str, empty_window: Callable[[], None]) -> Future[bool]:
        """Release a stream after writing its memory and a consistent window for another process. The result: whether
        both were written. If the window cannot be saved, ``empty_window`` moves its frames into the memory first."""
        memory = self._memories[stream]
        window = self._snapshot(memory) if self.tiers.shared else None
        if window is None:
            empty_window()
        elif len(self._last_writes) >= MAX_SNAPSHOTS:
            window = partial(bytes, window())  # serialised now, as many cameras may leave at once
        return self._schedule_last_write(memory, window)

    def _snapshot(self, memory: StreamMemory) -> Window | None:
        return None if self.window is None else self.window(memory.stream, memory.has_room_for_window)

    def _schedule_last_write(self, memory: StreamMemory, window: Window | None) -> Future[bool]:
        if not memory.frames:
            # Empty or deleted.
            self._close_memory(memory.stream)
        else:
            self._release(memory)
        last_write = self._last_writes[memory.stream] = LastWrite(memory, window)
        self.writer.schedule(memory.stream)
        return last_write.saved

    def _finish_last_write(self, stream: str) -> None:
        """Execute a pending last write and cancel a pending expiry; blocks while another thread executes either."""
        self._write_last(stream)
        if (memory := self._expiring.get(stream)) is not None:
            with memory.exclusive:
                self._expiring.pop(stream, None)

    def _write_last(self, stream: str) -> None:
        if (last_write := self._last_writes.get(stream)) is None:
            return
        with last_write.memory.exclusive:
            if not last_write.saved.done():
                saved = last_write.write()
                del self._last_writes[stream]
                self.tiers.lowest.leave(stream)
                last_write.saved.set_result(saved)

    def _release(self, memory: StreamMemory, *, owned: bool = True) -> None:
        """Release a memory: another process may own it from now on, or already does if not ``owned``. Questions may
        reopen it."""
        manifest = memory.manifest if owned else None
        released = ReleasedMemory(memory.spec, manifest, memory.newest_s, MemoryReport.of(memory))
        self._released[memory.stream] = released
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)
        self._close_memory(memory.stream)

    def delete_memory(
        self, stream: str, ago_s: float | None = None, *, newest: int | None = None, life: str = ""
    ) -> Future[DeletedMemory]:
        """Delete frames older than ``ago_s`` seconds before the newest one, or everything. They are hidden at once, and
        gone from every tier when the future is done. ``newest``: time of the newest frame on the camera's clock
        (microseconds) if it is still in the window; ``life``: see :meth:`TierStack.drop`."""
        self._finish_last_write(stream)
        with self._lock:
            self._deletions += 1
            self._prepared.pop(stream, None)
        memory = self._current(stream)
        if memory is None and ago_s is not None and (memory := self._reopen(stream)) is None:
            check_nothing_left(stream, self.tiers.manifest(stream)[0])
        if memory is not None and ago_s is not None:
            if newest is None and memory.newest is None and memory.restore() is Outcome.RETRY:
                raise unreadable(stream)
            times = [None if newest is None else memory.memory_time(newest), memory.newest]
            if known := [time for time in times if time is not None]:
                before = max(known) - round(ago_s * MICROSECONDS)
                return delete_before(memory, before, partial(self._schedule_save, memory))
        deleted, done = Future[DeletedMemory](), self._delete_all(stream, memory, life)
        left = stream in self.tiers.deleting
        deleted.set_exception(not_deleted(stream)) if left else deleted.set_result(done)
        return deleted

    def _delete_all(self, stream: str, memory: StreamMemory | None, life: str) -> DeletedMemory:
        if memory is None or life not in ("", memory.life):
            # An owned memory of a namesake has deleted what earlier cameras left, or does on its first write.
            if memory is None or not memory.owned:
                self.tiers.drop(stream, life)
            if memory is None:
                self.tiers.set_cap(stream, None)
            known = self._released.pop(stream, None) if memory is None else None
            return DeletedMemory(0, 0) if known is None else DeletedMemory(known.report.frames, known.report.nbytes)
        with memory.exclusive:
            deleted = DeletedMemory(memory.frames, memory.held_bytes)
            memory.delete_frames()
            self._due.pop(stream, None)
            self._pending_saves.pop(stream, None)
        if stream in self._reopened:
            self._close_memory(stream)
            self._released.pop(stream, None)
            self.tiers.set_cap(stream, None)
        return deleted

    def memory_reports(self) -> dict[str, MemoryReport]:
        """Reports of all streams, of released ones as of their release, with the tiers' current state. Callable from
        any thread."""
        trouble = self.tiers.trouble
        reports = {stream: released.report for stream, released in list(self._released.items())}
        reports |= {memory.stream: MemoryReport.of(memory) for memory in list(self._memories.values())}
        return {stream: replace(report, state=trouble) for stream, report in reports.items()}

    def _close_memory(self, stream: str) -> None:
        self._due.pop(stream, None)
        self._pending_saves.pop(stream, None)
        self._reopened.pop(stream, None)
        del self._memories[stream], self._retrievers[stream]
        self.tiers.lowest.leave(stream)

    def streams(self) -> Sequence[str]:
        return list(self._memories)
