"""``CalibratedEngine``: the engine protocol without a model, for load tests."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from cluster.engine.base import AskRun, WindowRequest, finished
from cluster.engine.calibrated import books
from cluster.engine.window import export
from cluster.engine.window.gate import standing
from cluster.engine.window.stream import HeldFrame, LastWindow, Stream
from cluster.engine.window.windowed import check_sample, check_spec
from cluster.engine.window.windows import WindowClock
from cluster.errors import ConfigError, NotReadyError
from cluster.models.base import VisionLanguageModel
from cluster.types import (
    MICROSECONDS,
    Answer,
    AskSpec,
    Forgotten,
    FrameSample,
    MemoryStatus,
    PatchGeometry,
    Question,
    StreamSpec,
    Timing,
    TokenCount,
)


@dataclass(frozen=True, slots=True)
class ScoreStatistics:
    """``windows[i]`` scores lay in ``[edges[i], edges[i + 1])``; ``source``: one sentence, where they come from."""

    edges: tuple[float, ...]
    windows: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) != len(self.windows) + 1 or not ascending or sum(self.windows) <= 0:
            raise ConfigError("a histogram of scores needs ascending edges, one more than bins, and at least one score")
        if min(self.edges) < 0 or max(self.edges) > 1 or min(self.windows) < 0:
            raise ConfigError("scores lie between 0 and 1, and a bin of them holds no fewer than 0")

    @classmethod
    def load(cls, path: str | Path) -> ScoreStatistics:
        """The calibration histogram in the JSON of `sightline eval accuracy`.

        Raises:
            ConfigError: no such file, or it holds no histogram.
        """
        how = "write one with `sightline eval accuracy --json FILE`"
        try:
            bins = json.loads(Path(path).read_text(encoding="utf-8"))["calibration"]["bins"]
            edges = (*(float(each["low"]) for each in bins), float(bins[-1]["high"]))
            windows = tuple(int(each["windows"]) for each in bins)
        except OSError as error:
            raise ConfigError(f"cannot read the scores in {path}: {error.strerror or error}; {how}") from None
        except (ValueError, KeyError, TypeError, IndexError):
            raise ConfigError(f"{path} holds no calibration histogram of scores; {how}") from None
        return cls(edges, windows, f"the calibration histogram in {path}")

    def draw(self, random: np.random.Generator) -> float:
        """One score: a bin by how many windows it had, evenly within it."""
        ends = np.cumsum(self.windows)
        number = int(np.searchsorted(ends, random.random() * ends[-1], side="right"))
        low, high = self.edges[number], self.edges[number + 1]
        return low + (high - low) * random.random()


DEMO_SCORES = ScoreStatistics(
    edges=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0),
    windows=(2021, 92, 31, 27, 26, 40, 29, 88, 180),
    source="2534 windows of 72 made scenes, full computation by the bundled demo model (`sightline eval accuracy`)",
)


MARK = "calibrated"
"""What the text of every answer begins with."""


class StepCosts(Protocol):
    """What a step takes. ``spread``: standard deviation of the log of a step's seconds over what is said here."""

    @property
    def spread(self) -> float: ...

    def seconds(self, windows: Sequence[TokenCount]) -> float:
        """Seconds of one step of these windows."""
        ...


class CalibratedEngine:
    """The :class:`~cluster.engine.base.Engine` that stands in for a model. One thread makes all calls.

    A step takes the seconds that ``costs`` say times ``exp(spread z - spread**2 / 2)`` with ``z`` normal, whose mean is
    1, and sleeps them. Windows that the static gate answers cost nothing. There is no memory.

    Args:
        shape: the model that it stands in for, without weights (see :func:`~cluster.engine.calibrated.shape_of`).
        costs: what a step takes.
        scores: what is answered.
        seed: of scores and spread; every engine of a cluster should have its own.
        sleep: for tests.
    """

    def __init__(
        self,
        shape: VisionLanguageModel,
        costs: StepCosts,
        *,
        scores: ScoreStatistics = DEMO_SCORES,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.shape = shape
        self._costs = costs
        self._scores = scores
        self._random = np.random.default_rng(seed)
        self._sleep = sleep
        self._streams: dict[str, Stream] = {}
        self._system = len(shape.system_ids())
        self._query = lru_cache(maxsize=1024)(lambda text: len(shape.question_ids(text)))
        self._fingerprint = f"{MARK}:{shape.family}:{shape.geometry}"

    # -- streams --------------------------------------------------------------------------------------
    @property
    def geometry(self) -> PatchGeometry:
        """See ``Engine.geometry``."""
        return self.shape.geometry

    def admit(self, spec: StreamSpec) -> None:
        """See ``Engine.admit``."""
        check_spec(spec, self.shape)
        window, stride = round(spec.window_s * MICROSECONDS), round(spec.stride_s * MICROSECONDS)
        held = self._streams.get(spec.stream)
        if held is None:
            self._streams[spec.stream] = Stream(spec, books.empty_slab(), WindowClock(window, stride))
        else:
            held.spec = spec
            held.clock.reshape(window, stride)

    def prepare(self, spec: StreamSpec) -> None:
        """See ``Engine.prepare``: without memory there is nothing to fetch."""

    def evict(self, stream: str, *, save: bool = True) -> None:  # noqa: ARG002
        """See ``Engine.evict``."""
        self._streams.pop(stream, None)

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        """See ``Engine.push``; what the frame shows is not kept."""
        stream = self._stream(sample.stream)
        check_sample(sample, self.geometry)
        closed = stream.push(sample, time.monotonic())
        stream.frames[-1].patches = None
        return closed

    def flush(self, stream: str) -> list[WindowRequest]:
        """See ``Engine.flush``."""
        return self._stream(stream).flush(time.monotonic())

    def memory_bytes(self, stream: str | None = None) -> int:
        """See ``Engine.memory_bytes``: of the books alone."""
        if stream is not None:
            held = self._streams.get(stream)
            return held.nbytes if held else 0
        return sum(held.nbytes for held in self._streams.values())

    def hand_over(self, stream: str) -> Future[bool]:
        """See ``Engine.hand_over``: without memory there are no tiers to put a window into."""
        self.evict(stream)
        return finished(False)

    def export_stream(self, stream: str) -> bytes:
        """See ``Engine.export_stream``."""
        return export.snapshot(self._stream(stream), self._fingerprint).dump()

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``; a stream of that name is replaced."""
        check_spec(spec, self.shape)
        taken = export.load(state, spec, books.empty_slab(), self._fingerprint)
        taken.clock.reshape(round(spec.window_s * MICROSECONDS), round(spec.stride_s * MICROSECONDS))
        self._streams[spec.stream] = taken

    # -- windows --------------------------------------------------------------------------------------
    def step(self, requests: Sequence[WindowRequest]) -> list[Answer]:
        """See ``Engine.step``."""
        started = time.monotonic()
        names = [request.stream for request in requests]
        if len(set(names)) < len(names):
            raise ValueError("a step takes at most one window per stream")
        gated: dict[str, list[Answer]] = {}
        work: list[tuple[Stream, WindowRequest, TokenCount]] = []
        for request in requests:
            stream = self._streams.get(request.stream)
            if stream is None or not stream.take(request):
                continue
            frames = stream.window_frames(request.start, request.end)
            last = standing(stream, request)
            if last is not None:
                stream.counters.gated += 1
                gated[request.stream] = _repeat(last, request, frames, started)
            elif frames:
                query = sum(self._query(question.text) for question in stream.spec.questions)
                layers = len(self.shape.layers)
                tokens = books.compute(stream, request, frames, system=self._system, query=query, layers=layers)
                work.append((stream, request, tokens))
        seconds = self._take_time([tokens for _, _, tokens in work], started)
        computed = {request.stream: self._answer(*each, started, seconds) for each in work for request in [each[1]]}
        for name in names:
            if name in self._streams:
                self._streams[name].trim()
        return [answer for name in names for answer in (gated.get(name) or computed.get(name, []))]

    def _take_time(self, windows: Sequence[TokenCount], started: float) -> float:
        if not windows:
            return 0.0
        spread = self._costs.spread
        seconds = self._costs.seconds(windows) * math.exp(spread * self._random.standard_normal() - spread**2 / 2)
        # Keeping the books is part of the step that they stand for.
        self._sleep(max(0.0, started + seconds - time.monotonic()))
        return seconds

    def _answer(
        self, stream: Stream, request: WindowRequest, tokens: TokenCount, started: float, seconds: float
    ) -> list[Answer]:
        timing = Timing(
            queue_s=max(0.0, started - request.arrived_s),
            llm_s=seconds,
            latency_s=max(0.0, time.monotonic() - request.arrived_s),
        )
        answers = [self._draw(request, question, tokens, timing) for question in stream.spec.questions]
        stream.last = LastWindow(request.window, request.end, stream.spec.questions, tuple(answers))
        stream.windows_since_fresh += 1
        stream.counters.computed += 1
        return answers

    def _draw(self, request: WindowRequest, question: Question, tokens: TokenCount, timing: Timing) -> Answer:
        score = self._scores.draw(self._random)
        positive = score >= question.threshold
        return Answer(
            stream=request.stream,
            window=request.window,
            start=request.start,
            end=request.end,
            question=question.id,
            score=score,
            positive=positive,
            text=f"{MARK}: {'yes' if positive else 'no'}, no model has looked",
            gated=False,
            tokens=tokens,
            timing=timing,
        )

    # -- memory ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec) -> AskRun:
        """Raises ``NotReadyError``: nothing was seen."""
        _nothing(ask.stream)

    def forget(self, stream: str, ago_s: float | None = None) -> Forgotten:
        """Forgets the window as asked, then raises ``NotReadyError`` like every engine without memory."""
        held = self._streams.get(stream)
        if held is not None:
            newest = held.newest
            held.forget_before(None if ago_s is None or newest is None else newest - round(ago_s * MICROSECONDS))
        _nothing(stream)

    def describe(self, stream: str) -> MemoryStatus:
        """Raises ``NotReadyError``: nothing is remembered."""
        _nothing(stream)

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise ValueError(f"stream {name!r} is not admitted; admit it before anything else")
        return self._streams[name]


def _nothing(stream: str) -> NoReturn:
    raise NotReadyError(
        f"the calibrated engine stands in for a model in load tests and saw nothing of camera {stream!r}; "
        "questions need engine: native"
    )


def _repeat(last: LastWindow, request: WindowRequest, frames: Sequence[HeldFrame], started: float) -> list[Answer]:
    kept = sum(frame.size for frame in frames)
    tokens = TokenCount(full=books.full(frames), kept=kept, reused=kept, refreshed=0, new=0, query=0, encoded=0)
    timing = Timing(
        queue_s=max(0.0, started - request.arrived_s), latency_s=max(0.0, time.monotonic() - request.arrived_s)
    )
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
