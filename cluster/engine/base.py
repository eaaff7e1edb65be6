"""The engine's interface, and what all engines share: streams, windows, export, and a step around a batch of windows.

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
    """A free question being answered: ``step`` returns the next text of the answer (perhaps empty), None at its end."""

    @property
    def result(self) -> AskResult:
        """Answer with statistics, once ``step`` has returned None."""

    def step(self) -> str | None: ...


class Engine(ABC):
    """Computes answers from frames of many streams. All calls from one thread (the replica's engine thread).

    Args:
        model: whose tower encodes the frames.
        max_new_tokens: longest explanation.
    """

    # Error message of memory calls.
    no_memory: ClassVar[str] = "this engine keeps no memory of camera {!r}"

    def __init__(self, model: VisionLanguageModel, max_new_tokens: int) -> None:
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.stats = StepStats()
        self._streams: dict[str, Stream] = {}
        # See ``Stream``.
        self._kv_sink: KVSink | None = None
        self._kv_lost: Callable[[str], None] | None = None
        # Text tokens around a frame's visual ones, of one grid.
        self._frame_text: Callable[[PatchGrid], int] = lru_cache(model.frame_text_tokens)

    @abstractmethod
    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        """Compute a batch of windows, one per stream; returns results and the seconds of tower, planning and language
        model."""

    def _encode_frames(self, frames: Sequence[StreamFrame]) -> Sequence[PatchBatch]:
        """Encode pending frames; what the tower was given of each."""
        return encode_pending(self.model, frames)

    def _stream_kv(self) -> StreamKV:
        """Create the KV of a stream."""
        return StreamKV(None)

    @property
    def remembers(self) -> bool:
        """Whether it keeps memories."""
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
        """Tokens of all windows that it can hold; infinite where it keeps no KV of its own."""
        return math.inf

    @property
    def waiting_bytes(self) -> float:
        """Bytes of memories' waiting frames that its device has room for; infinite where it keeps none."""
        return math.inf

    def prepare(self, spec: StreamSpec) -> None:  # noqa: B027
        """Load the state that another process saved of a stream before :meth:`admit`, which then need not wait. The
        only method callable from any thread. Raises ``ConfigError``: see :meth:`admit`."""

    def admit(self, spec: StreamSpec) -> None:
        """Add a stream, or change the questions and policies of an existing one (its window stays). Raises
        ``ConfigError``: an unknown policy, or a window the model cannot hold."""
        self._check(spec)
        self._admit(spec, None)

    def _admit(self, spec: StreamSpec, saved: bytes | None) -> bool:
        """Add a stream, from its ``saved`` window if usable; returns whether it starts anew."""
        held = self._streams.get(spec.stream)
        if held is not None:
            held.spec = spec
            # Its policies may be others; what is computed already is like an earlier window's.
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
        """Free a stream's local state; unknown streams are ignored. Its memory stays in the tiers. ``save``: write
        unsaved memory first, unless another process owns the stream already."""
        held = self._streams.pop(stream, None)
        if held is not None:
            held.kv.clear()

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """Buffer one frame; returns the windows it closed (usually none or one, several after a jump in pts).

        No model work. ``ValueError``: its stream is not admitted, its pts do not ascend, or it does not fit the model.
        A ``fresh`` frame resets the window; one after a ``gap`` only if its clock went back or its grid changed.
        Windows whose last stride has no video are skipped; their numbers are never answered.
        """
        stream = self._stream(sample.stream)
        check_sample(sample, self.geometry)
        return stream.push(sample, time.monotonic())

    def flush(self, stream: str) -> list[WindowRequest]:
        """Close the current, incomplete window at the end of the source."""
        return self._stream(stream).flush(time.monotonic())

    def memory_bytes(self, stream: str | None = None) -> int:
        """Bytes held for one stream, or for all, without shared state (weights, system prompt, questions, vLLM's KV
        cache)."""
        return sum(held.nbytes for name, held in self._streams.items() if stream in (None, name))

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise ValueError(f"stream {name!r} is not admitted; admit it before anything else")
        return self._streams[name]

    # -- moving ---------------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> str:
        """Fingerprint that another engine must share to import this engine's streams."""
        return self.model.fingerprint

    def hand_over(self, stream: str) -> Future[bool]:
        """Release a stream to another process and save window and memory where it finds them; False if the window
        cannot be continued."""
        # Without memory there are no tiers for the window.
        self.evict(stream)
        return completed_future(False)

    def export_stream(self, stream: str) -> bytes:
        """Serialise a stream's state (embeddings, KV, counters), to continue without recomputation."""
        return self._snapshot(stream).dump()

    def _snapshot(self, stream: str) -> export.Snapshot:
        return export.snapshot(self._stream(stream), self.fingerprint)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """Inverse of :meth:`export_stream`, on an engine with the same model; replaces a stream of that name. Raises
        ``CapacityError``: there is no room for its KV; ``ModelError``: the state belongs to another model or
        version."""
        self._check(spec)
        taken = export.load(state, spec, self._stream_kv(), self.fingerprint)
        taken.kv_sink, taken.kv_lost, taken.restored = self._kv_sink, self._kv_lost, True
        if len(taken.kv) != sum(len(encoded_tokens(frame)) for frame in taken.frames if frame.has_kv):
            # The state of an engine that keeps its KV elsewhere.
            taken.invalidate_kv()
        if spec.stream in self._streams:
            self._streams[spec.stream].kv.clear()
        taken.clock.change_lengths(*_lengths(spec))
        self._streams[spec.stream] = taken

    # -- windows --------------------------------------------------------------------------------------
    def prefill_ahead(self) -> bool:
        """Compute, in one pass of bounded size, what is known of windows that have not ended: their refreshed tokens,
        and the frames that came. Returns whether there was enough to do; call it while no window waits.

        Windows of cameras that are patient, or whose answer may still stand (static gate), are left for their step.
        """
        return False

    @torch.inference_mode()
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:  # noqa: ARG002
        """Answer these windows (at most one per stream, in window order) in one batch.

        A window that is never stepped is skipped; later windows then compute its tokens. Windows too old to be answered
        are counted in ``stats``; after an error the same windows may be stepped again. ``following``: windows of the
        next step, as far as known: a GPU gets their frames before the answers of this one are waited for. Raises
        ``DeviceError``: the GPU is lost to this process.
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
        """Create the answers of a computed window and record it as the stream's last one."""
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
            tower_flops=each.stream.tower_flops,
            llm_flops=self.model.llm_flops(round(done.rows), round(done.attended)) + done.reads.flops,
            decoded=done.decoded,
            reads=done.reads,
        )

    def _full(self, frames: Sequence[StreamFrame]) -> int:
        """Tokens of these frames without pruning."""
        # Those of a window have one grid.
        return len(frames) * (frames[0].grid.tokens + self._frame_text(frames[0].grid)) if frames else 0

    def _repeat(
        self, last: LastWindow, request: WindowRequest, frames: Sequence[StreamFrame], started: float
    ) -> list[Answer]:
        kept = sum(frame.size + self._frame_text(frame.grid) for frame in frames if frame.size)
        tokens = TokenCount(full=self._full(frames), kept=kept, reused=kept, refreshed=0, new=0, query=0, encoded=0)
        timing = _timing(request, started)
        return [
            replace(
                answer,
                window=request.window,
                start=request.start,
                end=request.end,
                gated=True,
                tokens=tokens,
                timing=timing,
            )
            for answer in last.answers
        ]

    # -- asking ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec) -> AskRun:
        """Start answering a free question over a stream's window and memory. Raises ``NotReadyError``: the stream has
        no memory, or has seen nothing yet."""
        raise NotReadyError(self.no_memory.format(ask.stream))

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        """Delete what a stream saw more than ``ago_s`` seconds before its newest frame, or everything: from its window
        and, in every tier, its memory. Nothing reads it from now on; the future is done when the tiers have deleted
        it. ``life``: of a removed camera; another one of its name keeps its own."""
        held = self._streams.get(stream)
        if held is None or life not in ("", held.spec.life):
            return completed_future(DeletedMemory(0, 0))
        frames, nbytes, newest = len(held.frames), held.nbytes, held.newest
        held.delete_frames_before(None if ago_s is None or newest is None else newest - round(ago_s * MICROSECONDS))
        return completed_future(DeletedMemory(frames - len(held.frames), nbytes - held.nbytes))

    def memory_status(self, stream: str) -> MemoryStatus:
        """Contents and health of a stream's memory, but for the bytes that its tiers hold. Raises ``NotReadyError``: it
        has no memory."""
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
