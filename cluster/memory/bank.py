"""The memories of all streams of one process, over tiers they share."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cluster.errors import NotReadyError
from cluster.memory.chunk import KVChunk
from cluster.memory.repair import Repair
from cluster.memory.retrieve import retrievers
from cluster.memory.retrieve.base import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, Forgotten, MemorySpec, MemoryStatus

log = logging.getLogger(__name__)

RELEASED = 4096
"""Streams that were let go of and can still be asked about here."""

VISITED = 64
"""Those of them whose memory is kept at hand after a question; the next question about another one restores it."""

FLUSH_BLOCKS = 64
"""Blocks that :meth:`MemoryBank.flush` writes before it lets others write."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One stream's memory for a heartbeat; ``span_s``: from its oldest frame to its newest; ``state``: what is wrong
    with the tiers, empty where nothing is."""

    nbytes: int
    frames: int
    span_s: float
    state: str


class MemoryBank:
    """Keeps what the engine lets go of. All calls but :meth:`report` and :meth:`flush` come from the engine's thread.

    Args:
        tiers: where KV lies.
        window: state of a stream's window as bytes, saved with its memory, so that both come back together; None where
            that would be too much to write again and again.
        default: how streams are remembered that another process opened and that are asked about here.
    """

    def __init__(
        self,
        tiers: TierStack,
        *,
        window: Callable[[str], bytes | None] | None = None,
        default: MemorySpec | None = None,
    ) -> None:
        self.tiers = tiers
        self.window = window
        self._default = default
        self.repair = Repair(tiers)
        self._due: set[str] = set()
        self._memories: dict[str, StreamMemory] = {}
        self._retrievers: dict[str, Retriever] = {}
        # How streams remembered that this process let go of: their sources ended, and they may be asked about.
        self._released: OrderedDict[str, MemorySpec] = OrderedDict()
        # Restored for a question, and not open.
        self._visited: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._reports: dict[str, MemoryReport] = {}

    def open(self, stream: str, spec: MemorySpec | None) -> bytes | None:
        """A stream begins, goes on, or has another memory from now on (None: none, and what there was is forgotten).

        Returns the state of its window where the tiers remember the stream from another process, or from before. What a
        tier holds of it that cannot be gone on with, or cannot be asked now, is dropped there, at once or later.

        Raises:
            ConfigError: an unknown policy or option.
        """
        if stream in self._visited:
            # Another process may have written it since: what counts is in the tiers.
            self._leave(stream)
        held = self._memories.get(stream)
        if spec is None:
            if held is not None:
                self._drop(stream)
            self._released.pop(stream, None)
            self._clear(stream)
            return None
        retriever = retrievers.get(spec.retriever)(**spec.retriever_options)
        window = None
        if held is None:
            held = StreamMemory(stream, spec, self.tiers)
            window = _restored(held)
            if window is None:
                held = StreamMemory(stream, spec, self.tiers)
                self._clear(stream)
        elif (held.spec.organiser, held.spec.organiser_options) != (spec.organiser, spec.organiser_options):
            # Clusters of one kind cannot go on as those of another.
            held.forget()
            held = StreamMemory(stream, spec, self.tiers)
        else:
            held.change(spec)
        self._released.pop(stream, None)
        self._hold(held, retriever)
        return window

    def _hold(self, memory: StreamMemory, retriever: Retriever) -> None:
        self._memories[memory.stream], self._retrievers[memory.stream] = memory, retriever
        self.tiers.set_cap(memory.stream, memory.spec.cap_bytes)
        self._note(memory.stream)

    def _clear(self, stream: str) -> None:
        """Drop what the tiers hold; where there is nothing, they are spared the search for it."""
        if not all(state.up for state in self.tiers.states().values()) or any(self.tiers.usage(stream).values()):
            self.tiers.drop(stream)

    def take(self, chunk: KVChunk) -> None:
        """What an engine hands on (:data:`~cluster.memory.chunk.Leave`); streams without a memory have nothing kept.

        A memory that fails costs its own stream's past, never the window that is being computed.
        """
        memory = self._memories.get(chunk.stream)
        if memory is None:
            return
        try:
            settled = memory.counts.settled
            memory.add(chunk)
        except Exception:
            log.exception("the memory of camera %r failed and begins anew", chunk.stream)
            memory.forget()
            self._note(chunk.stream)
            return
        if memory.counts.settled > settled:
            self._due.add(chunk.stream)
        self._note(chunk.stream)

    def wants_queries(self, stream: str) -> bool:
        """Whether :meth:`observe` matters to what is kept of a stream."""
        memory = self._memories.get(stream)
        return memory is not None and memory.wants_queries

    def observe(self, stream: str, queries: Sequence[Tensor]) -> None:
        """See :meth:`StreamMemory.observe`; streams without a memory have nobody to tell."""
        memory = self._memories.get(stream)
        if memory is not None:
            memory.observe(queries)

    def save_due(self) -> None:
        """Save the streams whose blocks changed; called between two steps, when windows are what they seem."""
        while self._due:
            self.save(self._due.pop())

    def tend(self) -> None:
        """What is to be done regularly also while no frame comes."""
        self._due.update(self.repair.work(self._memories))
        # A question splits clusters that waited for being loaded.
        self._due.update(stream for stream, memory in self._memories.items() if memory.unsaved)
        self.save_due()

    def flush(self, budget_s: float = 0.5) -> int:
        """Write what the tiers could not take when it came, as far as they can now, for about ``budget_s``; from
        any thread, regularly, because the memories do it only when frames settle. Returns how many blocks were
        written."""
        until, written = time.monotonic() + budget_s, 0
        while True:
            now = self.tiers.flush(FLUSH_BLOCKS)
            written += now
            if now < FLUSH_BLOCKS or time.monotonic() >= until:
                return written

    def save(self, stream: str) -> None:
        """Write what it takes to go on elsewhere, window and memory of the same moment."""
        memory = self._memories.get(stream)
        if memory is not None:
            memory.settle()
            memory.save((self.window(stream) if self.window is not None else None) or b"")

    def get(self, stream: str) -> tuple[StreamMemory, Retriever]:
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
        if stream in self._visited:
            # A question may put clusters in order, and nothing else will come that saves them.
            self._due.add(stream)
        return memory, self._retrievers[stream]

    def _reopened(self, stream: str) -> StreamMemory | None:
        spec = self._released.get(stream, self._default)
        if spec is None:
            return None
        memory = StreamMemory(stream, spec, self.tiers)
        if _restored(memory) is None:
            return None
        self._hold(memory, retrievers.get(spec.retriever)(**spec.retriever_options))
        self._visited[stream] = None
        while len(self._visited) > VISITED:
            self._leave(next(iter(self._visited)))
        return memory

    def _leave(self, stream: str) -> None:
        """Let a memory go that was at hand for questions only."""
        if stream in self._due:
            self.save(stream)
        if stream in self._released:
            self._let_go(stream)
        else:
            self._drop(stream)

    def __contains__(self, stream: object) -> bool:
        return stream in self._memories

    def release(self, stream: str) -> None:
        """Another process takes over: put everything into the tiers and let go of the rest; nothing is forgotten."""
        memory = self._memories.get(stream)
        if memory is None:
            return
        memory.settle()
        if memory.recent:
            log.warning("camera %r: its last %d frames are not remembered", stream, len(memory.recent))
        if not memory.frames:
            # What was made to forget everything leaves nothing behind.
            self._drop(stream)
            return
        memory.save()
        self._part(memory)

    def _part(self, memory: StreamMemory) -> None:
        """Its owner is elsewhere from now on; it may still be asked about here."""
        self._released[memory.stream] = memory.spec
        self._let_go(memory.stream)
        if len(self._released) > RELEASED:
            oldest, _ = self._released.popitem(last=False)
            with self._lock:
                self._reports.pop(oldest, None)

    def hand_over(self, stream: str) -> bool:
        """Another process takes over window and memory of the same moment, and both are let go of here; False, and
        nothing done, where the window or the tiers do not allow it."""
        memory = self._memories.get(stream)
        window = self.window(stream) if memory is not None and self.window is not None else None
        if memory is None or not window:
            return False
        memory.settle()
        if memory.save(window) is not Outcome.HIT or not self.tiers.shared(stream):
            return False
        self._part(memory)
        return True

    def forget(self, stream: str, ago_s: float | None = None, *, newest: int | None = None) -> Forgotten:
        """Forget what is older than ``ago_s`` seconds before the newest frame, or everything, in every tier.

        ``newest``: time of that frame on the camera's clock (microseconds), where it has not left the window yet.
        """
        memory = self._memories.get(stream) or self._reopened(stream)
        if memory is None:
            self._released.pop(stream, None)
            self.tiers.drop(stream)
            with self._lock:
                self._reports.pop(stream, None)
            return Forgotten(0, 0)
        frames, held = memory.frames, memory.held_bytes + memory.waiting_bytes
        if ago_s is None or memory.newest is None:
            memory.forget()
            self._due.discard(stream)
        else:
            latest = memory.newest if newest is None else max(memory.newest, memory.time_of(newest))
            memory.forget(before_frame=memory.frames_since(latest - round(ago_s * MICROSECONDS)))
            self.save(stream)
        forgotten = Forgotten(frames - memory.frames, held - memory.held_bytes - memory.waiting_bytes)
        if not memory.frames and stream in self._visited:
            self._drop(stream)
            self._released.pop(stream, None)
        else:
            self._note(stream)
        return forgotten

    def describe(self, stream: str) -> MemoryStatus:
        """What a stream's memory holds and how it is.

        Raises:
            NotReadyError: it has none.
        """
        memory, _ = self.get(stream)
        return memory.status()

    def report(self) -> dict[str, MemoryReport]:
        """Every stream as of its last frame, the tiers as they are now; from any thread."""
        reasons = {name: state.trouble for name, state in self.tiers.states().items()}
        trouble = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        with self._lock:
            return {stream: replace(report, state=trouble) for stream, report in self._reports.items()}

    def _note(self, stream: str) -> None:
        memory = self._memories[stream]
        oldest, newest = memory.oldest, memory.newest
        span = 0.0 if oldest is None or newest is None else (newest - oldest) / MICROSECONDS
        report = MemoryReport(memory.held_bytes + memory.waiting_bytes, memory.frames, span, "")
        with self._lock:
            self._reports[stream] = report

    def _let_go(self, stream: str) -> None:
        """Its last report stays."""
        self._due.discard(stream)
        self._visited.pop(stream, None)
        del self._memories[stream], self._retrievers[stream]

    def _drop(self, stream: str) -> None:
        self._let_go(stream)
        with self._lock:
            self._reports.pop(stream, None)

    def streams(self) -> Sequence[str]:
        """Those that have a memory here."""
        return list(self._memories)


def _restored(memory: StreamMemory) -> bytes | None:
    """:meth:`StreamMemory.restore`; what cannot be read is as good as nothing, and costs its own stream's past only."""
    try:
        return memory.restore()
    except Exception:
        log.exception("what the tiers hold of camera %r cannot be gone on with", memory.stream)
        return None
