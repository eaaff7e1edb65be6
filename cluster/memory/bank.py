"""The memories of all streams of one process, over tiers they share."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from torch import Tensor

from cluster.errors import NotReadyError
from cluster.memory.head_memory import KVChunk
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiered_heads import MemoryShape
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import MemoryWriter
from cluster.registry import retrievers
from cluster.types import MICROSECONDS, DeletedMemory, MemorySpec, MemoryStatus

log = logging.getLogger(__name__)

RELEASED = 4096
"""Streams that were let go of and can still be asked about here."""

VISITED = 64
"""Those of them whose memory is kept at hand after a question; the next question about another one restores it."""

Window = Callable[[], bytes]
"""State of a stream's window of one moment, as bytes when it is called."""


@dataclass(frozen=True, slots=True)
class _Order:
    """Settle a stream's frames up to ``upto``, and save ``window``, which they had left then."""

    upto: int
    window: Window | None


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A memory that is let go of once it is written, with ``window`` where there is one; ``saved``: whether both are
    where another process finds them."""

    memory: StreamMemory
    window: Window | None
    saved: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One stream's memory for a heartbeat; ``span_s``: from its oldest frame to its newest; ``state``: what is wrong
    with the tiers, empty where nothing is."""

    nbytes: int
    frames: int
    span_s: float
    state: str


class MemoryBank:
    """Keeps what the engine lets go of. All calls but :meth:`report` and :meth:`prepare` come from the engine's thread,
    which only hands frames over: threads of the bank's own put them into clusters, compress, and write
    (:class:`MemoryWriter`).

    Args:
        tiers: where KV lies.
        window: takes down the state of a stream's window as it is now, to be saved with its memory, so that both come
            back together; None where there is none, or it is larger than so many bytes.
        default: how streams are remembered that another process opened and that are asked about here.
        shape: of the model's KV.
    """

    def __init__(
        self,
        tiers: TierStack,
        *,
        window: Callable[[str, int], Window | None] | None = None,
        default: MemorySpec | None = None,
        shape: MemoryShape | None = None,
    ) -> None:
        self.tiers = tiers
        self.window = window
        self.shape = shape
        self.writer = MemoryWriter(self._write)
        self._default = default
        self._due: set[str] = set()
        self._orders: dict[str, _Order] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._forgettings = 0
        self._prepared: dict[str, tuple[StreamMemory, bytes | None]] = {}
        self._memories: dict[str, StreamMemory] = {}
        self._retrievers: dict[str, Retriever] = {}
        # How streams remembered that this process let go of: their sources ended, and they may be asked about.
        self._released: OrderedDict[str, MemorySpec] = OrderedDict()
        # Restored for a question, and not open: another process may be writing them.
        self._visited: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._reports: dict[str, MemoryReport] = {}

    def prepare_stream(self, stream: str, spec: MemorySpec | None) -> None:
        """Restore what the tiers hold of a stream that is about to be opened, from any thread, so that the engine's
        need not wait for them.

        Raises:
            ConfigError: an unknown policy or option.
        """
        if spec is None or stream in self._memories or stream in self._leaving:
            return
        forgettings = self._forgettings
        restored = self._restored(stream, spec)
        with self._lock:
            # What is forgotten meanwhile may be of this stream.
            if stream not in self._memories and forgettings == self._forgettings:
                self._prepared[stream] = restored

    def _restored(self, stream: str, spec: MemorySpec) -> tuple[StreamMemory, bytes | None]:
        """A memory with what the lowest tier has of it, and the state of its window."""
        memory = StreamMemory(stream, spec, self.tiers, self.shape, self.writer.yield_to_engine)
        self.tiers.set_cap(stream, spec.cap_bytes)
        return memory, memory.restored_window() if memory.restore() is Outcome.HIT else None

    def open_stream(self, stream: str, spec: MemorySpec | None) -> bytes | None:
        """A stream begins, goes on, or has another memory from now on (None: none, and what there was is forgotten).

        Returns the state of its window where the tiers remember the stream from another process, or from before; None
        where they do not, or cannot be asked now: what they have is taken up when they can.

        Raises:
            ConfigError: an unknown policy or option.
        """
        if stream in self._visited:
            # Another process may have written it since: what counts is in the tiers.
            self._leave(stream)
        self._finish_leaving(stream)
        held = self._memories.get(stream)
        prepared = self._prepared.pop(stream, None)
        if spec is None:
            if held is not None:
                self._drop(stream)
            self._released.pop(stream, None)
            self._clear(stream)
            return None
        retriever = retrievers.get(spec.retriever)(**spec.retriever_options)
        window = None
        if held is None:
            if prepared is None or prepared[0].spec != spec:
                prepared = self._restored(stream, spec)
            held, window = prepared
        elif (held.spec.organiser, held.spec.organiser_options) != (spec.organiser, spec.organiser_options):
            # Clusters of one kind cannot go on as those of another.
            with held.exclusive:
                held.delete_frames()
                self._let_go(stream)
            held = StreamMemory(stream, spec, self.tiers, self.shape, self.writer.yield_to_engine)
        else:
            held.change_spec(spec)
        self._released.pop(stream, None)
        self._hold(held, retriever)
        return window

    def _hold(self, memory: StreamMemory, retriever: Retriever) -> None:
        with self._lock:
            self._prepared.pop(memory.stream, None)
            self._memories[memory.stream], self._retrievers[memory.stream] = memory, retriever
        self.tiers.set_cap(memory.stream, memory.spec.cap_bytes)
        self._note(memory)

    def _clear(self, stream: str) -> None:
        """Delete what the tiers hold; where there is nothing, they are spared the search for it."""
        if not all(state.up for state in self.tiers.states().values()) or any(self.tiers.usage(stream).values()):
            self.tiers.drop(stream)

    def accept_chunk(self, chunk: KVChunk) -> None:
        """Accept a frame that left a window (a :data:`~cluster.memory.head_memory.KVSink`); ignored for streams without
        a memory. A frame that fails is counted and logged.
        """
        memory = self._memories.get(chunk.stream)
        if memory is None:
            return
        try:
            memory.accept_chunk(chunk)
        except Exception:
            log.exception("a frame of camera %r cannot be remembered", chunk.stream)
            memory.counts.frames_dropped += 1
        if memory.settle_due:
            self._due.add(chunk.stream)
        self._note(memory)

    def wants_queries(self, stream: str) -> bool:
        """Whether :meth:`observe` matters to what is kept of a stream."""
        memory = self._memories.get(stream)
        return memory is not None and memory.wants_queries

    def observe_queries(self, stream: str, queries: Sequence[Tensor]) -> None:
        """See :meth:`StreamMemory.observe`; streams without a memory have nobody to tell."""
        memory = self._memories.get(stream)
        if memory is not None:
            memory.observe_queries(queries)

    def schedule_saves(self) -> None:
        """Have streams settled and saved in which enough frames wait; called between two steps, when windows are what
        they seem."""
        for stream in list(self._due):
            memory = self._memories.get(stream)
            # One that the writer is still busy with has its turn later.
            if memory is not None and memory.recent and not self.writer.is_waiting(stream):
                window = self.window(stream, memory.max_window_bytes) if self.window is not None else None
                self._orders[stream] = _Order(memory.recent[-1].index, window or _no_window)
                self.writer.schedule(stream)
            if memory is None or not self.writer.is_waiting(stream) or stream in self._orders:
                self._due.discard(stream)

    def run_maintenance(self) -> None:
        """What is to be done regularly also while no frame comes; returns at once."""
        for stream, memory in self._memories.items():
            if stream in self._visited or self.writer.is_waiting(stream):
                continue
            if memory.settle_due:
                self._due.add(stream)
            else:
                self._orders[stream] = _Order(-1, None)
                self.writer.schedule(stream)
        self.schedule_saves()

    def _write(self, stream: str) -> None:
        """On a thread of the writer's."""
        self._finish_leaving(stream)
        memory, order = self._memories.get(stream), self._orders.pop(stream, None)
        if memory is None or order is None:
            return
        with memory.exclusive:
            # The stream may have left while this waited.
            if self._memories.get(stream) is not memory:
                return
            if memory.settle(order.upto):
                memory.save(None if order.window is None else order.window())
            self._note(memory)

    def save_stream(self, stream: str) -> None:
        """Write what it takes to go on elsewhere, window and memory of the same moment; waits for it."""
        memory = self._memories.get(stream)
        if memory is not None:
            window = self.window(stream, memory.max_window_bytes) if self.window is not None else None
            if memory.settle():
                memory.save((window or _no_window)())
            self._note(memory)

    def wait_written(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that was handed over is written, as far as tiers take it; False where that takes longer."""
        return self.writer.wait_idle(timeout_s)

    def get_memory(self, stream: str) -> tuple[StreamMemory, Retriever]:
        """A stream's memory and how it is read.

        Raises:
            NotReadyError: it has none.
        """
        memory = self._memories.get(stream) or self._reopened(stream)
        if memory is None:
            raise NotReadyError(
                f"camera {stream!r} remembers nothing; it has seen nothing since it was made to forget, or "
                "memory.enabled is off for it"
            )
        return memory, self._retrievers[stream]

    def _reopened(self, stream: str) -> StreamMemory | None:
        spec = self._released.get(stream, self._default)
        if spec is None:
            return None
        self._finish_leaving(stream)
        memory = StreamMemory(stream, spec, self.tiers, self.shape, self.writer.yield_to_engine)
        # Whoever has it open is still writing, perhaps: what no manifest names is theirs to delete.
        outcome = memory.restore(sweep=False)
        if outcome is Outcome.RETRY:
            raise NotReadyError(f"what camera {stream!r} remembers cannot be read now; ask again in a moment")
        if outcome is Outcome.MISS:
            return None
        self._hold(memory, retrievers.get(spec.retriever)(**spec.retriever_options))
        self._visited[stream] = None
        while len(self._visited) > VISITED:
            self._leave(next(iter(self._visited)))
        return memory

    def _leave(self, stream: str) -> None:
        """Let a memory go that was at hand for questions only."""
        if stream in self._released:
            self._let_go(stream)
        else:
            self._drop(stream)

    def __contains__(self, stream: object) -> bool:
        return stream in self._memories

    def release_stream(self, stream: str, *, save: bool = True) -> None:
        """Another process takes over, or none: have everything put into the tiers, and let go of the rest; nothing is
        forgotten. Without ``save`` another has taken over already, and nothing more is written here."""
        memory = self._memories.get(stream)
        if memory is not None and save:
            self._let_leave(memory, None)
        elif memory is not None:
            with memory.exclusive:
                self._part(memory)

    def hand_over(self, stream: str) -> Future[bool]:
        """Another process takes over window and memory of the same moment of an open stream; both are let go of here.
        Whether it finds them is known when they are written."""
        memory = self._memories[stream]
        window = self.window(stream, memory.max_window_bytes) if self.window is not None and self.tiers.shared else None
        return self._let_leave(memory, window)

    def _let_leave(self, memory: StreamMemory, window: Window | None) -> Future[bool]:
        if not memory.frames:
            # What was made to forget everything leaves nothing behind.
            self._drop(memory.stream)
        else:
            self._part(memory)
        leaving = self._leaving[memory.stream] = _Leaving(memory, window)
        self.writer.schedule(memory.stream)
        return leaving.saved

    def _finish_leaving(self, stream: str) -> None:
        """Write what leaves, where that is not done yet; waits for whoever does."""
        leaving = self._leaving.get(stream)
        if leaving is None:
            return
        memory, saved = leaving.memory, False
        with memory.exclusive:
            if leaving.saved.done():
                return
            try:
                self._settle_last(memory)
                if leaving.window is not None and not memory.recent:
                    saved = memory.save(leaving.window()) is Outcome.HIT
                if memory.recent:
                    log.warning("camera %r: its last %d frames are not remembered", stream, len(memory.recent))
                if not saved:
                    memory.save()
            except Exception:
                log.exception("the memory of camera %r could not be written", stream)
            finally:
                del self._leaving[stream]
                leaving.saved.set_result(saved)

    def _settle_last(self, memory: StreamMemory) -> None:
        try:
            memory.settle()
        except Exception:
            log.exception("the last frames of camera %r cannot be remembered", memory.stream)

    def _part(self, memory: StreamMemory) -> None:
        """Its owner is elsewhere from now on; it may still be asked about here."""
        self._released[memory.stream] = memory.spec
        self._let_go(memory.stream)
        if len(self._released) > RELEASED:
            oldest, _ = self._released.popitem(last=False)
            with self._lock:
                self._reports.pop(oldest, None)

    def delete_memory(self, stream: str, ago_s: float | None = None, *, newest: int | None = None) -> DeletedMemory:
        """Forget what is older than ``ago_s`` seconds before the newest frame, or everything, in every tier.

        ``newest``: time of that frame on the camera's clock (microseconds), where it has not left the window yet.
        """
        self._finish_leaving(stream)
        with self._lock:
            self._forgettings += 1
            self._prepared.pop(stream, None)
        try:
            memory = self._memories.get(stream) or self._reopened(stream)
        except NotReadyError:
            if ago_s is not None:
                raise
            memory = None
        if memory is None:
            self._released.pop(stream, None)
            self.tiers.drop(stream)
            with self._lock:
                self._reports.pop(stream, None)
            return DeletedMemory(0, 0)
        with memory.exclusive:
            frames, held = memory.frames, memory.held_bytes
            if ago_s is None or memory.newest is None:
                memory.delete_frames()
                self._due.discard(stream)
                self._orders.pop(stream, None)
            else:
                latest = memory.newest if newest is None else max(memory.newest, memory.memory_time(newest))
                memory.delete_frames(before_frame=memory.frames_since(latest - round(ago_s * MICROSECONDS)))
                self.save_stream(stream)
            forgotten = DeletedMemory(frames - memory.frames, max(0, held - memory.held_bytes))
        if not memory.frames and stream in self._visited:
            self._drop(stream)
            self._released.pop(stream, None)
        else:
            self._note(memory)
        return forgotten

    def memory_status(self, stream: str) -> MemoryStatus:
        """What a stream's memory holds and how it is.

        Raises:
            NotReadyError: it has none.
        """
        memory, _ = self.get_memory(stream)
        return memory.status()

    def memory_reports(self) -> dict[str, MemoryReport]:
        """Every stream as of its last frame, the tiers as they are now; from any thread."""
        reasons = {name: state.trouble for name, state in self.tiers.states().items()}
        trouble = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        with self._lock:
            return {stream: replace(report, state=trouble) for stream, report in self._reports.items()}

    def _note(self, memory: StreamMemory) -> None:
        oldest, newest = memory.oldest, memory.newest
        span = 0.0 if oldest is None or newest is None else (newest - oldest) / MICROSECONDS
        report = MemoryReport(memory.held_bytes, memory.frames, span, "")
        with self._lock:
            if self._memories.get(memory.stream) is memory:
                self._reports[memory.stream] = report

    def _let_go(self, stream: str) -> None:
        """Its last report stays."""
        self._due.discard(stream)
        self._orders.pop(stream, None)
        self._visited.pop(stream, None)
        del self._memories[stream], self._retrievers[stream]

    def _drop(self, stream: str) -> None:
        self._let_go(stream)
        with self._lock:
            self._reports.pop(stream, None)

    def streams(self) -> Sequence[str]:
        """Those that have a memory here."""
        return list(self._memories)


def _no_window() -> bytes:
    return b""
