"""The ``Engine`` protocol: admit streams, take their frames, step a batch of windows, hand a stream over.

One engine serves many streams; a call is never made from two threads at once (the replica's engine thread is
the only caller). Two implementations: ``native`` (ours) and ``vllm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from cluster.types import (
    Answer,
    AskResult,
    AskSpec,
    DeletedMemory,
    FrameSample,
    MemoryStatus,
    PatchGeometry,
    StreamSpec,
    WindowRequest,
)

__all__ = ["AskRun", "Engine", "WindowRequest"]


class AskRun(Protocol):
    """A question being answered: ``step`` gives the next piece of the answer (perhaps empty), None at its end."""

    @property
    def result(self) -> AskResult:
        """How the answer came about, once ``step`` has returned None."""
        ...

    def step(self) -> str | None: ...


T = TypeVar("T")


class Engine(Protocol):
    """Turns frames into answers."""

    @property
    def geometry(self) -> PatchGeometry:
        """How decoders must cut frames for this engine's model."""
        ...

    def admit(self, spec: StreamSpec) -> None:
        """Take a stream in, or change the questions and policies of one that is there (its window survives).

        Raises:
            ConfigError: an unknown policy, or a window the model cannot hold.
        """
        ...

    def prepare(self, spec: StreamSpec) -> None:
        """Fetch what another process left of a stream that is about to be admitted, so that :meth:`admit` need not wait
        for it. The only call that may come from any thread.

        Raises:
            ConfigError: see :meth:`admit`.
        """
        ...

    def evict(self, stream: str, *, save: bool = True) -> None:
        """Free what a stream holds here; unknown streams are ignored. What it remembers stays in the tiers; ``save``:
        with what was not written yet, unless another process has the stream and writes it."""
        ...

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """Buffer one frame; returns the windows it closed (usually none or one, several after a jump in pts).

        Costs no model work. Frames must come in order of pts; one that does not is refused with ``ValueError``. A
        ``fresh`` frame forgets the stream's window first; one after a ``gap`` does not, unless its clock went back or
        its grid is another. Windows whose last stride has no video are passed over: their numbers are never answered.
        """
        ...

    def flush(self, stream: str) -> list[WindowRequest]:
        """Close the current, incomplete window because the source ended."""
        ...

    def step(self, requests: Sequence[WindowRequest]) -> list[Answer]:
        """Answer these windows (at most one per stream, in window order) in one batch.

        A window may be skipped by never stepping it: later windows then compute what it would have.
        """
        ...

    def hand_over(self, stream: str) -> Future[bool]:
        """Let go of a stream that goes on in another process, and have its window and memory put where that process
        finds them when it admits it; False where it cannot be gone on with."""
        ...

    def export_stream(self, stream: str) -> bytes:
        """Everything needed to go on elsewhere without recomputing: frames' embeddings, position-free KV, counters."""
        ...

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """The inverse of ``export_stream`` on an engine with the same model.

        Raises:
            ModelError: the state belongs to another model or version.
        """
        ...

    def ask(self, ask: AskSpec) -> AskRun:
        """Begin to answer a free question over a stream's window and memory.

        Raises:
            NotReadyError: the stream has no memory, or has seen nothing yet.
        """
        ...

    def delete_memory(self, stream: str, ago_s: float | None = None) -> DeletedMemory:
        """Forget what a stream saw more than ``ago_s`` seconds before its newest frame, or everything: its window and,
        in every tier, its memory."""
        ...

    def memory_status(self, stream: str) -> MemoryStatus:
        """What a stream remembers.

        Raises:
            NotReadyError: it has no memory.
        """
        ...

    def memory_bytes(self, stream: str | None = None) -> int:
        """Bytes held for one stream, or for all."""
        ...


def completed_future(result: T) -> Future[T]:
    """What is known already, for who expects to wait."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
