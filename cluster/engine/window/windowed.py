"""What every engine over encoded frames does alike: streams, their windows, and a step around a batch of them."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.engine.window.gate import standing
from cluster.engine.window.score import standing_again
from cluster.engine.window.stream import HeldFrame, LastWindow, Stream
from cluster.engine.window.windows import WindowSpan
from cluster.errors import ConfigError, ModelError
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.registry import refresh_policies
from cluster.types import (
    MICROSECONDS,
    Answer,
    FrameSample,
    PatchGeometry,
    StreamSpec,
    Timing,
    TokenCount,
    WindowRequest,
)

# Frames a second a window is taken to have when its longest position is held against the model's limit.
NOMINAL_FPS = 2.0


def check_spec(spec: StreamSpec, model: VisionLanguageModel) -> None:
    """Refuse a stream that cannot be served.

    Raises:
        ConfigError: unknown policy, impossible lengths, no questions, or a window longer than the model's positions.
    """
    name = spec.stream
    refresh_policies.get(spec.refresh)
    if not 0 < spec.stride_s <= spec.window_s or not math.isfinite(spec.window_s):
        raise ConfigError(
            f"{name}: stride_s must be above 0 and at most window_s ({spec.window_s:g}), not {spec.stride_s:g}"
        )
    if spec.refresh_budget is not None and not 0 <= spec.refresh_budget <= 1:
        raise ConfigError(f"{name}: refresh_budget is a share of the overlap, 0 to 1, not {spec.refresh_budget:g}")
    ids = [question.id for question in spec.questions]
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"{name}: give at least one question, each with an id of its own, not {ids}")
    limit = getattr(model.text_config, "max_position_embeddings", math.inf)
    longest = _longest_position(spec, model)
    if longest > limit:
        raise ConfigError(
            f"{name}: a window of {spec.window_s:g} s reaches position {longest} and the model ends at {limit}; "
            "shorten window_s or take a model of fewer pixels"
        )


def _longest_position(spec: StreamSpec, model: VisionLanguageModel) -> int:
    """Of a window with its largest frames at the nominal rate: what is pruned leaves holes, so this bounds it."""
    geometry = model.geometry
    side = geometry.square or math.isqrt(geometry.max_pixels)
    grid = geometry.grid(side, side)
    frames = max(1, math.ceil(spec.window_s * NOMINAL_FPS / geometry.temporal))
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    last = FrameSpan((frames - 1) * geometry.temporal / NOMINAL_FPS, frames - 1, cells, grid)
    positions = model.window_positions(len(model.system_ids()), [last])
    questions = max(len(model.question_ids(question.text)) for question in spec.questions)
    return max(int(positions.frames[0].max()), positions.next) + questions


def check_sample(sample: FrameSample, geometry: PatchGeometry) -> None:
    """Refuse a frame that was not cut for this model.

    Raises:
        ValueError: its grid, mask or patches do not fit.
    """
    grid = sample.grid
    name = f"frame {sample.index} of {sample.stream}"
    cut = (grid.patch, grid.merge, grid.temporal)
    wanted = (geometry.patch, geometry.merge, geometry.temporal)
    if cut != wanted:
        raise ValueError(f"{name} is cut for another model: patch, merge, temporal are {cut}, not {wanted}")
    if sample.mask.shape != (grid.rows, grid.cols) or sample.duration <= 0:
        raise ValueError(
            f"{name} must have a mask of {grid.rows}x{grid.cols} and a positive duration, "
            f"not {sample.mask.shape} and {sample.duration}"
        )
    kept = int(sample.mask.sum())
    groups = int(sample.mask[:: grid.merge, :: grid.merge].sum())
    shape = (kept, grid.temporal, 3, grid.patch, grid.patch)
    if sample.patches.shape != shape or sample.patches.dtype != np.uint8 or kept != groups * grid.merge**2:
        raise ValueError(
            f"{name} must have whole merge groups and uint8 patches of shape {shape}, "
            f"not {sample.patches.dtype} of {sample.patches.shape}"
        )


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Work of one computed window. FLOPs as the model counts them (multiply-add = 2).

    ``computed``: rows through the language model, and ``attended``: pairs of a row and a slot it saw, both averaged
    over layers (a policy that narrows computes fewer in deeper ones). ``decoded``: tokens of explanations run after
    that, not in ``llm_flops``.
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


@dataclass(frozen=True, slots=True)
class StepStats:
    """One call of ``step``: the windows computed, and how many were gated or came too late to be answered."""

    windows: tuple[WindowStats, ...] = ()
    gated: int = 0
    expired: int = 0

    @property
    def tower_flops(self) -> int:
        return sum(window.tower_flops for window in self.windows)

    @property
    def llm_flops(self) -> int:
        return sum(window.llm_flops for window in self.windows)


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """A window on its way through a step."""

    stream: Stream
    request: WindowRequest
    frames: list[HeldFrame]
    encoded: int
    tower_flops: int = 0


class WindowedEngine(ABC):
    """Half of an :class:`~cluster.engine.base.Engine`: what is left to the engine is to compute windows.

    Args:
        model: whose tower encodes the frames.
        max_new_tokens: longest explanation.
    """

    def __init__(self, model: VisionLanguageModel, max_new_tokens: int) -> None:
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.stats = StepStats()
        self._streams: dict[str, Stream] = {}
        # Text tokens around a frame's visual ones; known once a frame was encoded.
        self._frame_text = 0

    @abstractmethod
    def _compute(self, work: Sequence[Work], started: float, answers: dict[str, list[Answer]]) -> list[WindowStats]:
        """Answer a batch, of one window per stream, into ``answers`` by stream; ``started``: monotonic clock."""

    @abstractmethod
    def _encode_frames(self, frames: Sequence[HeldFrame]) -> Mapping[int, int]:
        """Put the tower's tokens into frames that have none yet; FLOPs by the id of the frame."""

    @abstractmethod
    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``; a stream of that name is replaced."""

    # -- streams --------------------------------------------------------------------------------------
    @property
    def geometry(self) -> PatchGeometry:
        """See ``Engine.geometry``."""
        return self.model.geometry

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """See ``Engine.push``.

        Raises:
            ValueError: the stream is not admitted, its pts do not ascend, or the frame does not fit the model.
        """
        stream = self._stream(sample.stream)
        check_sample(sample, self.geometry)
        return stream.push(sample, time.monotonic())

    def flush(self, stream: str) -> list[WindowRequest]:
        """See ``Engine.flush``."""
        return self._stream(stream).flush(time.monotonic())

    def memory_bytes(self, stream: str | None = None) -> int:
        """See ``Engine.memory_bytes``; what streams share (weights, system prompt, questions, vLLM's own KV cache) is
        not counted."""
        if stream is not None:
            held = self._streams.get(stream)
            return held.nbytes if held else 0
        return sum(held.nbytes for held in self._streams.values())

    def _resume(self, spec: StreamSpec, state: bytes) -> bool:
        """Go on with a window that was saved; false where it cannot be used here."""
        try:
            self.import_stream(spec, state)
        except ModelError as error:
            log.warning("camera %s begins anew: %s", spec.stream, error)
            return False
        return True

    # -- windows --------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self, requests: Sequence[WindowRequest]) -> list[Answer]:
        """See ``Engine.step``. Windows too old to be answered give no answers and are counted in ``stats``; after an
        error the same windows may be stepped again."""
        started = time.monotonic()
        names = [request.stream for request in requests]
        if len(set(names)) < len(names):
            raise ValueError("a step takes at most one window per stream")
        answers: dict[str, list[Answer]] = {}
        work: list[Work] = []
        gated = expired = 0
        for request in requests:
            stream = self._streams.get(request.stream)
            if stream is None or not stream.take(request):
                expired += 1
                continue
            frames = stream.window_frames(request.start, request.end)
            last = standing(stream, request)
            if last is not None:
                gated += 1
                stream.counters.gated += 1
                answers[request.stream] = self._repeat(last, request, frames, started)
            elif frames:
                pending = sum(frame.size for frame in frames if frame.tokens is None)
                work.append(Work(stream, request, frames, pending))
        try:
            windows = self._compute(work, started, answers) if work else []
        except BaseException:
            for each in work:
                span = WindowSpan(each.request.window, each.request.start, each.request.end)
                each.stream.outstanding.insert(0, span)
            raise
        for each in work:
            each.stream.trim()
        self.stats = StepStats(tuple(windows), gated, expired)
        return [answer for request in requests for answer in answers.get(request.stream, [])]

    def _encode(self, work: Sequence[Work]) -> None:
        frames = [frame for each in work for frame in each.frames]
        flops = self._encode_frames(frames)
        for each in work:
            each.tower_flops = sum(flops.get(id(frame), 0) for frame in each.frames)
        text = [len(frame.tokens) - frame.size for frame in frames if frame.tokens is not None and frame.size]
        if text:
            self._frame_text = text[0]

    def _answered(self, each: Work, said: Sequence[Answer], answers: dict[str, list[Answer]]) -> None:
        """Take down what a window was answered."""
        stream = each.stream
        stream.last = LastWindow(each.request.window, each.request.end, stream.spec.questions, tuple(said))
        stream.windows_since_fresh += 1
        stream.counters.computed += 1
        answers[each.request.stream] = list(said)

    def _full(self, frames: Sequence[HeldFrame]) -> int:
        return sum(frame.grid.tokens + self._frame_text for frame in frames)

    def _repeat(
        self, last: LastWindow, request: WindowRequest, frames: Sequence[HeldFrame], started: float
    ) -> list[Answer]:
        kept = sum(frame.size + self._frame_text for frame in frames if frame.size)
        tokens = TokenCount(full=self._full(frames), kept=kept, reused=kept, refreshed=0, new=0, query=0, encoded=0)
        timing = Timing(
            queue_s=max(0.0, started - request.arrived_s), latency_s=max(0.0, time.monotonic() - request.arrived_s)
        )
        return [standing_again(answer, request, tokens, timing) for answer in last.answers]

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise ValueError(f"stream {name!r} is not admitted; admit it before anything else")
        return self._streams[name]


def shape_of(spec: StreamSpec) -> tuple[int, int]:
    """Window and stride in microseconds."""
    return round(spec.window_s * MICROSECONDS), round(spec.stride_s * MICROSECONDS)


def first_set(*values: float | None) -> float:
    """The first that is set; the last one is."""
    return next(value for value in values if value is not None)
