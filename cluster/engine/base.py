"""The ``Engine`` protocol: admit streams, push frames, step batches of windows, hand streams over.

One engine serves many streams and is called from one thread only (the replica's engine thread). Implementations:
``native`` (ours), ``vllm``, and ``simulated`` for load tests.
"""

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


class AskRun(Protocol):
    """A free question being answered: ``step`` returns the next text of the answer (perhaps empty), None at its end."""

    @property
    def result(self) -> AskResult:
        """Answer with statistics, once ``step`` has returned None."""

    def step(self) -> str | None: ...


T = TypeVar("T")


class Engine(Protocol):
    """Computes answers from frames."""

    @property
    def geometry(self) -> PatchGeometry:
        """Patch geometry that decoders must use for this engine's model."""

    @property
    def window_tokens(self) -> float:
        """Tokens of all windows that it can hold; infinite where it keeps no KV of its own."""

    @property
    def index_bytes(self) -> float:
        """Bytes of cameras' memories (index and waiting frames) that its device has room for; infinite where it keeps
        none."""

    def admit(self, spec: StreamSpec) -> None:
        """Add a stream, or change the questions and policies of an existing one (its window stays).

        Raises:
            ConfigError: an unknown policy, or a window the model cannot hold.
        """

    def prepare(self, spec: StreamSpec) -> None:
        """Load the state that another process saved of a stream before :meth:`admit`, which then need not wait. The
        only method callable from any thread.

        Raises:
            ConfigError: see :meth:`admit`.
        """

    def evict(self, stream: str, *, save: bool = True) -> None:
        """Free a stream's local state; unknown streams are ignored. Its memory stays in the tiers. ``save``: write
        unsaved memory first, unless another process owns the stream already."""

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """Buffer one frame; returns the windows it closed (usually none or one, several after a jump in pts).

        No model work. Frames must come in order of pts, else ``ValueError``. A ``fresh`` frame resets the stream's
        window; a frame after a ``gap`` does so only if its clock went back or its grid changed. Windows whose last
        stride has no video are skipped; their numbers are never answered.
        """

    def flush(self, stream: str) -> list[WindowRequest]:
        """Close the current, incomplete window at the end of the source."""

    def prefill_ahead(self) -> bool:
        """Compute, in one pass of bounded size, what is known of windows that have not ended: their refreshed tokens,
        and the frames that came. Returns whether there was enough to do; call it while no window waits.

        Windows of cameras that are patient, or whose answer may still stand (static gate), are left for their step.
        """

    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:
        """Answer these windows (at most one per stream, in window order) in one batch.

        A window that is never stepped is skipped; later windows then compute its tokens. ``following``: windows of the
        next step, as far as known: a GPU gets their frames before the answers of this one are waited for.

        Raises:
            DeviceError: the GPU is lost to this process.
        """

    def hand_over(self, stream: str) -> Future[bool]:
        """Release a stream to another process and save window and memory where it finds them; False if the window
        cannot be continued."""

    def export_stream(self, stream: str) -> bytes:
        """Serialise a stream's state (embeddings, KV, counters), to continue without recomputation."""

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """Inverse of ``export_stream``, on an engine with the same model.

        Raises:
            CapacityError: there is no room for its KV.
            ModelError: the state belongs to another model or version.
        """

    def ask(self, ask: AskSpec) -> AskRun:
        """Start answering a free question over a stream's window and memory.

        Raises:
            NotReadyError: the stream has no memory, or has seen nothing yet.
        """

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        """Delete what a stream saw more than ``ago_s`` seconds before its newest frame, or everything: from its window
        and, in every tier, its memory. Nothing reads it from now on; the future is done when the tiers have deleted
        it. ``life``: of a removed camera; another one of its name keeps its own."""

    def memory_status(self, stream: str) -> MemoryStatus:
        """Contents and health of a stream's memory, but for the bytes that its tiers hold.

        Raises:
            NotReadyError: it has no memory.
        """

    def memory_bytes(self, stream: str | None = None) -> int:
        """Bytes held for one stream, or for all."""


def completed_future(result: T) -> Future[T]:
    """A future that is already done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
