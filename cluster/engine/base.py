"""The ``Engine`` interface and the code all engines share: streams, windows, export, the step over a batch of windows.

Implementations: ``native`` (ours), ``vllm``, and ``simulated`` for load tests.
"""

import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Protocol, TypeVar

import torch

from cluster.engine.window import export
from cluster.engine.window.checks import check_sample, check_spec
from cluster.engine.window.encode import encode_pending
from cluster.engine.window.kv import StreamKV
from cluster.engine.window.step import ComputedWindow, StepStats, WindowStats, WindowWork, last_valid_answers
from cluster.engine.window.stream import LastWindow, Stream, StreamFrame, encoded_tokens
from cluster.engine.window.windows import WindowClock, WindowSpan
from cluster.errors import CapacityError, ConfigError, ModelError, NotReadyError
from cluster.memory.frame_retrieval import make_frame_retrieval
from cluster.memory.head_memory import KVSink
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.types import (
    MICROSECONDS,
    Answer,
    AskResult,
    AskSpec,
    DeletedMemory,
    FrameSample,
    MemoryStatus,
    PatchGeometry,
    PatchGrid,
    StreamSpec,
    Timing,
    TokenCount,
    WindowRequest,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class AskRun(Protocol):
    """A free question in progress: ``step`` returns the next piece of the answer (may be empty), None at its end."""

    @property
    def result(self) -> AskResult:
        """The answer and its statistics, available once ``step`` has returned None."""

    def step(self) -> str | None: ...


class Engine(ABC):
    """Answers questions on the windows of many streams. All calls from one thread (the replica's engine thread).

    Args:
        model: its vision tower encodes the frames.
        max_new_tokens: maximum length of an explanation.
    """

    # Error message of calls that need a memory.
    no_memory: ClassVar[str] = "this engine keeps no memory of camera {!r}"

    def __init__(self, model: VisionLanguageModel, max_new_tokens: int) -> None:
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.stats = StepStats()
        self._streams: dict[str, Stream] = {}
        # See ``Stream``.
        self._kv_sink: KVSink | None = None
        self._kv_lost: Callable[[str], None] | None = None
        # Text tokens around a frame's visual tokens, by its grid.
        self._frame_text: Callable[[PatchGrid], int] = lru_cache(model.frame_text_tokens)

    @abstractmethod
    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        """Compute a batch of windows, one per stream; returns their results and the seconds spent in the tower, in
        planning and in the language model."""

    def _encode_frames(self, frames: Sequence[StreamFrame]) -> Sequence[PatchBatch]:
        """Encode pending frames; returns the tower's input for each."""
        return encode_pending(self.model, frames)

    def _stream_kv(self) -> StreamKV:
        """Create the KV of a stream."""
        return StreamKV(None)

    @property
    def remembers(self) -> bool:
        """Whether this engine keeps memories."""
        return False

    def _check(self, spec: StreamSpec) -> None:
        check_spec(spec, self.model)
        if make_frame_retrieval(spec.memory) is not None and not self.remembers:
            raise ConfigError(f"{spec.stream}: frame_retrieval reads a memory, and this engine keeps none")

    # -- streams --------------------------------------------------------------------------------------
    @property
    def geometry(self) -> PatchGeometry:
        """Patch geometry that decoders must use for this engine's model."""
        return self.model.geometry

    @property
    def window_tokens(self) -> float:
        """Maximum tokens of all windows together; infinite if the engine holds no KV itself."""
        return math.inf

    @property
    def waiting_bytes(self) -> float:
        """Device memory for frames waiting to enter their camera's memory, in bytes; infinite without memories."""
        return math.inf

    def prepare(self, spec: StreamSpec) -> None:  # noqa: B027
        """Prefetch the state that another process saved for a stream, so that :meth:`admit` need not wait for it. The
        only method callable from any thread. Raises ``ConfigError`` as :meth:`admit` does."""

    def admit(self, spec: StreamSpec) -> None:
        """Add a stream, or change the questions and policies of an admitted one, which keeps its window. Raises
        ``ConfigError``: an unknown policy, or a window longer than the model allows."""
        self._check(spec)
        self._admit(spec, None)

    def _admit(self, spec: StreamSpec, saved: bytes | None) -> bool:
        """Add a stream, restoring its ``saved`` window if usable; returns whether it starts empty."""
        held = self._streams.get(spec.stream)
        if held is not None:
            held.spec = spec
            # The policies may have changed; tokens computed ahead then count as an earlier window's.
            held.progress = None
            held.clock.change_lengths(*_lengths(spec))
            return False
        if saved is not None:
            try:
                self.import_stream(spec, saved)
                return False
            except (ModelError, CapacityError) as error:
                log.warning("camera %s starts with an empty window: %s", spec.stream, error)
        clock = WindowClock(*_lengths(spec))
        self._streams[spec.stream] = Stream(
            spec, self._stream_kv(), clock, kv_sink=self._kv_sink, kv_lost=self._kv_lost
        )
        return True

    def evict(self, stream: str, *, save: bool = True) -> None:  # noqa: ARG002
        """Free a stream's local state; its memory stays in the tiers. Unknown streams are ignored. ``save``: write
        unsaved memory first; False if another process already owns the stream."""
        held = self._streams.pop(stream, None)
        if held is not None:
            held.kv.clear()

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """Buffer one frame; returns the windows it closed (usually none or one, several after a jump in pts).

        Does no model work. A ``fresh`` frame resets the window; a frame after a ``gap`` only if the clock went back or
        the grid changed. Windows without video in their last stride are skipped, numbers included. Raises
        ``ValueError``: the stream is not admitted, pts do not ascend, or the frame does not fit the model.
        """
        stream = self._stream(sample.stream)
        check_sample(sample, self.geometry)
        return stream.push(sample, time.monotonic())

    def flush(self, stream: str) -> list[WindowRequest]:
        """Close the current, incomplete window at the end of the source."""
        return self._stream(stream).flush(time.monotonic())

    def memory_bytes(self, stream: str | None = None) -> int:
        """Bytes held for one stream, or for all; excludes shared state (weights, system prompt, questions, vLLM's KV
        cache)."""
        return sum(held.nbytes for name, held in self._streams.items() if stream in (None, name))

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise ValueError(f"stream {name!r} is not admitted; call admit first")
        return self._streams[name]

    # -- migration ------------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> str:
        """Only an engine with the same fingerprint can import this engine's streams."""
        return self.model.fingerprint

    def hand_over(self, stream: str) -> Future[bool]:
        """Release a stream to another process, saving window and memory where that process finds them; resolves to
        False if the window cannot be continued."""
        # Without a memory there are no tiers to save the window in.
        self.evict(stream)
        return completed_future(False)

    def export_stream(self, stream: str) -> bytes:
        """Serialise a stream's state (embeddings, KV, counters); it then continues without recomputation."""
        return self._snapshot(stream).dump()

    def _snapshot(self, stream: str) -> export.Snapshot:
        return export.snapshot(self._stream(stream), self.fingerprint)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """Inverse of :meth:`export_stream`, on an engine with the same fingerprint; replaces a stream of that name.
        Raises ``CapacityError``: no room for its KV; ``ModelError``: the state is of another model or version."""
        self._check(spec)
        taken = export.load(state, spec, self._stream_kv(), self.fingerprint)
        taken.kv_sink, taken.kv_lost, taken.restored = self._kv_sink, self._kv_lost, True
        if len(taken.kv) != sum(len(encoded_tokens(frame)) for frame in taken.frames if frame.has_kv):
            # Exported by an engine that holds its KV elsewhere.
            taken.invalidate_kv()
        if spec.stream in self._streams:
            self._streams[spec.stream].kv.clear()
        taken.clock.change_lengths(*_lengths(spec))
        self._streams[spec.stream] = taken

    # -- windows --------------------------------------------------------------------------------------
    def prefill_ahead(self) -> bool:
        """Compute refreshed tokens and frames received so far of windows that have not ended, in one pass of bounded
        size. Returns whether there was enough work for a pass. Call only while no window is waiting.

        Windows of patient cameras, and those that the static gate may still answer, are left to their step.
        """
        return False

    @torch.inference_mode()
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:  # noqa: ARG002
        """Answer these windows (at most one per stream, in window order) in one batch.

        Windows may be skipped: a later window then computes their tokens. Expired windows are only counted in
        ``stats``; after an error the same windows may be stepped again. ``following``: known windows of the next step;
        on a GPU, encoding of their frames is launched before this step returns. Raises ``DeviceError``: this process
        has lost its GPU.
        """
        started = time.monotonic()
        names = [request.stream for request in requests]
        if len(set(names)) < len(names):
            raise ValueError("a step takes at most one window per stream")
        answers: dict[str, list[Answer]] = {}
        work: list[WindowWork] = []
        claimed: list[tuple[Stream, WindowRequest]] = []
        gated = expired = 0
        for request in requests:
            stream = self._streams.get(request.stream)
            if stream is None or not stream.claim_window(request):
                expired += 1
                continue
            claimed.append((stream, request))
            frames = stream.window_frames(request.start, request.end)
            last = last_valid_answers(stream, request.end)
            if last is not None and any(last.end <= frame.window_time for frame in frames):
                gated += 1
                answers[request.stream] = self._repeat(last, request, frames, started)
            elif frames:
                work.append(WindowWork(stream, request, frames))
        try:
            computed, seconds = self._compute(work) if work else ([], (0.0, 0.0, 0.0))
        except BaseException:
            for stream, request in claimed:
                stream.outstanding.insert(0, WindowSpan(request.window, request.start, request.end))
            raise
        windows = []
        for each, done in zip(work, computed, strict=True):
            timing = _timing(each.request, started, *seconds)
            answers[each.request.stream] = self._answer(each, done, timing)
            windows.append(self._window_stats(each, done, timing))
            each.stream.encoded = each.stream.tower_flops = 0
            each.stream.drop_expired_frames()
        self.stats = StepStats(tuple(windows), gated, expired)
        return [answer for request in requests for answer in answers.get(request.stream, [])]

    def _encode(self, work: Sequence[WindowWork]) -> None:
        pending = [[frame for frame in each.frames if frame.tokens is None] for each in work]
        batches = iter(self._encode_frames([frame for frames in pending for frame in frames]))
        for each, frames in zip(work, pending, strict=True):
            each.stream.tower_flops += self.model.tower_flops(list(itertools.islice(batches, len(frames))))
            each.stream.encoded += sum(frame.size for frame in frames)

    def _answer(self, each: WindowWork, done: ComputedWindow, timing: Timing) -> list[Answer]:
        """Build the answers of a computed window and record it as the stream's last one."""
        stream, request, newest = each.stream, each.request, each.frames[-1]
        given = []
        for question, score, text in zip(stream.spec.questions, done.scores, done.texts, strict=True):
            positive = score >= question.threshold
            answer = Answer(
                stream=request.stream,
                window=request.window,
                start=request.start,
                end=request.end,
                question=question.id,
                score=score,
                positive=positive,
                text=("yes" if positive else "no") if text is None else text,
                gated=False,
                tokens=done.tokens,
                timing=timing,
                memory_shift=newest.memory_time - newest.pts,
            )
            given.append(answer)
        stream.last = LastWindow(request.window, request.end, stream.spec.questions, tuple(given))
        stream.windows_since_fresh += 1
        return given

    def _window_stats(self, each: WindowWork, done: ComputedWindow, timing: Timing) -> WindowStats:
        return WindowStats(
            stream=each.request.stream,
            window=each.request.window,
            tokens=done.tokens,
            timing=timing,
            computed=done.rows,
            attended=done.attended,
            omitted=done.omitted,
            tower_flops=each.stream.tower_flops,
            llm_flops=self.model.llm_flops(done.rows, done.attended, done.omitted) + done.reads.flops,
            decoded=done.decoded,
            reads=done.reads,
        )

    def _full(self, frames: Sequence[StreamFrame]) -> int:
        """Tokens of these frames without pruning."""
        # All frames of a window have the same grid.
        return len(frames) * (frames[0].grid.tokens + self._frame_text(frames[0].grid)) if frames else 0

    def _repeat(
        self, last: LastWindow, request: WindowRequest, frames: Sequence[StreamFrame], started: float
    ) -> list[Answer]:
        kept = sum(frame.size + self._frame_text(frame.grid) for frame in frames if frame.size)
        tokens = TokenCount(full=self._full(frames), kept=kept, reused=kept, refreshed=0, new=0, query=0, encoded=0)
        timing = _timing(request, started)
        window, start, end = request.window, request.start, request.end
        return [
            replace(answer, window=window, start=start, end=end, gated=True, tokens=tokens, timing=timing)
            for answer in last.answers
        ]

    # -- asking ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec) -> AskRun:
        """Start answering a free question over a stream's window and memory. Raises ``NotReadyError``: the stream has
        no memory, or has seen nothing yet."""
        raise NotReadyError(self.no_memory.format(ask.stream))

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        """Delete what a stream saw more than ``ago_s`` seconds before its newest frame (None: everything), from its
        window and from its memory in every tier. Takes effect for readers at once; the future resolves once the tiers
        have deleted it. ``life``: of a removed camera; a new camera of the same name keeps its data."""
        held = self._streams.get(stream)
        if held is None or life not in ("", held.spec.life):
            return completed_future(DeletedMemory(0, 0))
        frames, nbytes, newest = len(held.frames), held.nbytes, held.newest
        held.delete_frames_before(None if ago_s is None or newest is None else newest - round(ago_s * MICROSECONDS))
        return completed_future(DeletedMemory(frames - len(held.frames), nbytes - held.nbytes))

    def memory_status(self, stream: str) -> MemoryStatus:
        """Contents and health of a stream's memory, without the bytes held in tiers. Raises ``NotReadyError``: the
        stream has no memory."""
        raise NotReadyError(self.no_memory.format(stream))


def _lengths(spec: StreamSpec) -> tuple[int, int]:
    """Window and stride in microseconds."""
    return round(spec.window_s * MICROSECONDS), round(spec.stride_s * MICROSECONDS)


def _timing(request: WindowRequest, started: float, vision: float = 0.0, plan: float = 0.0, llm: float = 0.0) -> Timing:
    latency = time.monotonic() - request.arrived_s
    return Timing(max(0.0, started - request.arrived_s), vision, plan, llm, max(0.0, latency))


def completed_future(result: T) -> Future[T]:
    """A future that is already done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
