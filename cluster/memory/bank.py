"""The memories of all streams of one process, over tiers they share."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cluster.errors import NotReadyError
from cluster.memory.chunk import KVChunk
from cluster.memory.retrieve import retrievers
from cluster.memory.retrieve.base import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.stack import TierStack
from cluster.types import MICROSECONDS, Forgotten, MemorySpec, MemoryStatus

log = logging.getLogger(__name__)

RELEASED = 4096
"""Streams that were let go of and can still be asked about here."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One stream's memory for a heartbeat; ``span_s``: from its oldest frame to its newest."""

    nbytes: int
    frames: int
    span_s: float
    state: str


class MemoryBank:
    """Keeps what the engine lets go of. All calls but :meth:`report` come from the engine's thread.

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
        self._due: set[str] = set()
        self._memories: dict[str, StreamMemory] = {}
        self._retrievers: dict[str, Retriever] = {}
        # How streams remembered that this process let go of: their sources ended, and they may be asked about.
        self._released: OrderedDict[str, MemorySpec] = OrderedDict()
        self._lock = threading.Lock()
        self._reports: dict[str, MemoryReport] = {}

    def open(self, stream: str, spec: MemorySpec | None) -> bytes | None:
        """A stream begins, goes on, or has another memory from now on (None: none, and what there was is forgotten).

        Returns the state of its window where the tiers remember the stream from another process, or from before.

        Raises:
            ConfigError: an unknown policy or option.
        """
        held = self._memories.get(stream)
        if spec is None:
            if held is not None:
                self.forget(stream)
                self._drop(stream)
            return None
        retriever = retrievers.get(spec.retriever)(**spec.retriever_options)
        window = None
        if held is None:
            held = StreamMemory(stream, spec, self.tiers)
            window = held.restore()
        elif (held.spec.organiser, held.spec.organiser_options) != (spec.organiser, spec.organiser_options):
            # Clusters of one kind cannot go on as those of another.
            held.forget()
            held = StreamMemory(stream, spec, self.tiers)
        else:
            held.change(spec)
        self._released.pop(stream, None)
        self._memories[stream] = held
        self._retrievers[stream] = retriever
        self.tiers.set_cap(stream, spec.cap_bytes)
        self._note(stream)
        return window

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
            raise NotReadyError(f"camera {stream!r} has no memory; set memory.enabled for it")
        return memory, self._retrievers[stream]

    def _reopened(self, stream: str) -> StreamMemory | None:
        spec = self._released.get(stream, self._default)
        if spec is None or StreamMemory(stream, spec, self.tiers).restore() is None:
            return None
        self.open(stream, spec)
        return self._memories[stream]

    def __contains__(self, stream: object) -> bool:
        return stream in self._memories

    def release(self, stream: str) -> None:
        """Another process takes over: put everything into the tiers and let go of the rest; nothing is forgotten."""
        memory = self._memories.get(stream)
        if memory is None:
            return
        memory.settle()
        memory.save()
        self._drop(stream)
        self._released[stream] = memory.spec
        if len(self._released) > RELEASED:
            self._released.popitem(last=False)

    def forget(self, stream: str, ago_s: float | None = None) -> Forgotten:
        """Forget what is older than ``ago_s`` seconds before the newest frame, or everything, in every tier."""
        memory = self._memories.get(stream) or self._reopened(stream)
        if memory is None:
            self._released.pop(stream, None)
            self.tiers.drop(stream)
            return Forgotten(0, 0)
        frames, held = memory.frames, memory.held_bytes + memory.waiting_bytes
        if ago_s is None or memory.newest is None:
            memory.forget()
        else:
            memory.forget(before_frame=memory.frames_since(memory.newest - round(ago_s * MICROSECONDS)))
            self.save(stream)
        self._note(stream)
        return Forgotten(frames - memory.frames, held - memory.held_bytes - memory.waiting_bytes)

    def describe(self, stream: str) -> MemoryStatus:
        """What a stream's memory holds and how it is.

        Raises:
            NotReadyError: it has none.
        """
        memory, _ = self.get(stream)
        return memory.status()

    def report(self) -> dict[str, MemoryReport]:
        """Every stream, as of its last frame; from any thread."""
        with self._lock:
            return dict(self._reports)

    def _note(self, stream: str) -> None:
        memory = self._memories[stream]
        oldest, newest = memory.oldest, memory.newest
        span = 0.0 if oldest is None or newest is None else (newest - oldest) / MICROSECONDS
        down = [f"{name}: {state.reason}" for name, state in self.tiers.states().items() if not state.up]
        report = MemoryReport(memory.held_bytes + memory.waiting_bytes, memory.frames, span, "; ".join(down))
        with self._lock:
            self._reports[stream] = report

    def _drop(self, stream: str) -> None:
        self._due.discard(stream)
        del self._memories[stream], self._retrievers[stream]
        with self._lock:
            self._reports.pop(stream, None)

    def streams(self) -> Sequence[str]:
        """Those that have a memory here."""
        return list(self._memories)
