"""Base class of the engines: streams, windows, export, and a step around a batch of windows."""

import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch

from cluster.engine.base import AskRun, completed_future
from cluster.engine.window import export
from cluster.engine.window.checks import check_sample, check_spec
from cluster.engine.window.encode import encode_pending
from cluster.engine.window.kv import StreamKV
from cluster.engine.window.stream import LastWindow, Stream, StreamFrame, encoded_tokens
from cluster.engine.window.windows import FIRST_WINDOWS, WindowClock, WindowSpan
from cluster.errors import CapacityError, ConfigError, ModelError, NotReadyError
from cluster.memory.frame_retrieval import FrameReads, make_frame_retrieval
from cluster.memory.head_memory import KVSink
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.types import (
    MICROSECONDS,
    Answer,
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


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Work of one computed window. FLOPs as the model counts them (multiply-add = 2).

    ``computed``: rows through the language model, and ``attended``: pairs of a row and a slot it saw, both averaged
    over layers (a policy that narrows computes fewer in deeper ones). ``decoded``: tokens of explanations run after
    that, not in ``llm_flops``. ``reads``: what its frames read of the past; ``attended`` has it.
    """

    stream: str
    window: int
    tokens: TokenCount
    timing: Timing
    computed: float
    attended: float
    tower_flops: int
    llm_flops: int
    decoded: int
    reads: FrameReads


@dataclass(frozen=True, slots=True)
class StepStats:
    """One call of ``step``: computed windows, and the numbers of gated and expired ones."""

    windows: tuple[WindowStats, ...] = ()
    gated: int = 0
    expired: int = 0

    @property
    def tower_flops(self) -> int:
        return sum(window.tower_flops for window in self.windows)

    @property
    def llm_flops(self) -> int:
        return sum(window.llm_flops for window in self.windows)


@dataclass(slots=True, eq=False)
class WindowWork:
    """A window within a step."""

    stream: Stream
    request: WindowRequest
    frames: list[StreamFrame]


@dataclass(frozen=True, slots=True)
class ComputedWindow:
    """Result of one :class:`WindowWork`.

    * ``scores``, ``texts``: by question; a text is ``None`` where no explanation was asked for
    * ``rows``, ``attended``, ``decoded``, ``reads``: ``computed`` and the rest of :class:`WindowStats`
    """

    tokens: TokenCount
    scores: Sequence[float]
    texts: Sequence[str | None]
    rows: float
    attended: float
    decoded: int = 0
    reads: FrameReads = field(default_factory=FrameReads)


class WindowedEngine(ABC):
    """An :class:`~cluster.engine.base.Engine` except for the computation of windows. All calls from one thread.

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
        return self.model.geometry

    @property
    def window_tokens(self) -> float:
        return math.inf

    @property
    def index_bytes(self) -> float:
        return math.inf

    def prepare(self, spec: StreamSpec) -> None:  # noqa: B027
        """See ``Engine.prepare``: nothing to load without memory."""

    def admit(self, spec: StreamSpec) -> None:
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
        held = self._streams.pop(stream, None)
        if held is not None:
            held.kv.clear()

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """See ``Engine.push``.

        Raises:
            ValueError: the stream is not admitted, its pts do not ascend, or the frame does not fit the model.
        """
        stream = self._stream(sample.stream)
        check_sample(sample, self.geometry)
        return stream.push(sample, time.monotonic())

    def flush(self, stream: str) -> list[WindowRequest]:
        return self._stream(stream).flush(time.monotonic())

    def memory_bytes(self, stream: str | None = None) -> int:
        """See ``Engine.memory_bytes``; without shared state (weights, system prompt, questions, vLLM's KV cache)."""
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
        # Without memory there are no tiers for the window.
        self.evict(stream)
        return completed_future(False)

    def export_stream(self, stream: str) -> bytes:
        return self._snapshot(stream).dump()

    def _snapshot(self, stream: str) -> export.Snapshot:
        return export.snapshot(self._stream(stream), self.fingerprint)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``; replaces a stream of that name."""
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
        return False

    @torch.inference_mode()
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:  # noqa: ARG002
        """See ``Engine.step``. Windows too old to be answered are counted in ``stats``; after an error the same windows
        may be stepped again."""
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
        raise NotReadyError(self.no_memory.format(ask.stream))

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        """See ``Engine.delete_memory``: frames of the window."""
        held = self._streams.get(stream)
        if held is None or life not in ("", held.spec.life):
            return completed_future(DeletedMemory(0, 0))
        frames, nbytes, newest = len(held.frames), held.nbytes, held.newest
        held.delete_frames_before(None if ago_s is None or newest is None else newest - round(ago_s * MICROSECONDS))
        return completed_future(DeletedMemory(frames - len(held.frames), nbytes - held.nbytes))

    def memory_status(self, stream: str) -> MemoryStatus:
        raise NotReadyError(self.no_memory.format(stream))


def _lengths(spec: StreamSpec) -> tuple[int, int]:
    """Window and stride in microseconds."""
    return round(spec.window_s * MICROSECONDS), round(spec.stride_s * MICROSECONDS)


def last_valid_answers(stream: Stream, end: int) -> LastWindow | None:
    """Static gate: the last window if, by the frames so far, its answers are valid for a window until ``end``, else
    ``None``.

    They are valid while nothing changed in any frame since that window's end (anchors included), the questions are the
    same, and at most ``idle_s`` of camera time has passed.
    """
    spec, last = stream.spec, stream.last
    if not spec.static_gate or last is None or stream.windows_since_fresh < FIRST_WINDOWS:
        return None
    if last.questions != spec.questions or end - last.end > spec.idle_s * MICROSECONDS:
        return None
    if stream.last_motion_dropped is not None and stream.last_motion_dropped >= last.end:
        return None
    return None if any(frame.moving for frame in stream.frames if last.end <= frame.window_time < end) else last


def _timing(request: WindowRequest, started: float, vision: float = 0.0, plan: float = 0.0, llm: float = 0.0) -> Timing:
    latency = time.monotonic() - request.arrived_s
    return Timing(max(0.0, started - request.arrived_s), vision, plan, llm, max(0.0, latency))
