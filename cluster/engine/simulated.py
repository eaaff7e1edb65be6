"""``SimulatedEngine``: an engine for load tests, with recorded scores and a cost model instead of a GPU.

Hundreds of real streams, actors and sockets then fit on a few cores.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import torch

from cluster.engine.base import Engine
from cluster.engine.window.encode import frame_cells
from cluster.engine.window.refresh.base import choose_refreshed
from cluster.engine.window.step import ComputedWindow, WindowWork
from cluster.engine.window.stream import StreamFrame
from cluster.errors import ConfigError, NotReadyError
from cluster.models.base import FrameTokens, PatchBatch, VisionLanguageModel
from cluster.types import DeletedMemory, FrameSample, TokenCount, WindowRequest


@dataclass(frozen=True, slots=True)
class ScoreStatistics:
    """Score histogram: ``windows[i]`` scores lie in ``[edges[i], edges[i + 1])``; ``source``: where they are from."""

    edges: tuple[float, ...]
    windows: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) != len(self.windows) + 1 or not ascending or sum(self.windows) <= 0:
            raise ConfigError("a score histogram needs ascending edges, one more than bins, and at least one score")
        if min(self.edges) < 0 or max(self.edges) > 1 or min(self.windows) < 0:
            raise ConfigError("scores must lie between 0 and 1, and no bin may be negative")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the calibration histogram from the JSON of `sightline eval accuracy`. Raises ``ConfigError``: no file,
        or no histogram in it."""
        how = "write one with `sightline eval accuracy --json FILE`"
        try:
            bins = json.loads(Path(path).read_text(encoding="utf-8"))["calibration"]["bins"]
            edges = (*(float(each["low"]) for each in bins), float(bins[-1]["high"]))
            windows = tuple(int(each["windows"]) for each in bins)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} has no calibration histogram ({error!r}); {how}") from None
        return cls(edges, windows, f"the calibration histogram in {path}")

    def draw(self, random: np.random.Generator) -> float:
        """Draw one score from the histogram."""
        ends = np.cumsum(self.windows)
        number = int(np.searchsorted(ends, random.random() * ends[-1], side="right"))
        low, high = self.edges[number], self.edges[number + 1]
        return low + (high - low) * random.random()


DEMO_SCORES = ScoreStatistics(
    edges=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0),
    windows=(2021, 92, 31, 27, 26, 40, 29, 88, 180),
    source="2534 windows of 72 synthetic scenes, computed in full by the bundled model (`sightline eval accuracy`)",
)


MARK = "simulated"
"""Prefix of every answer's text."""


class SimulatedEngine(Engine):
    """An :class:`~cluster.engine.base.Engine` without a model. All calls from one thread.

    Frames, windows, static gate, refresh policies and token counts run on the native engine's code. A step sleeps for
    the time given by ``costs``, multiplied by ``exp(spread z - spread**2 / 2)`` (``z`` standard normal; the mean is 1).
    Windows answered by the static gate cost nothing. There is no memory.

    Args:
        shape: the simulated model, without weights (see :func:`~cluster.models.loading.load_shape`).
        costs: seconds for a step over these windows; default 0.
        spread: standard deviation of the log of a step's time.
        scores: distribution of the answers' scores.
        seed: of scores and spread; should differ between the engines of a cluster.
        sleep: replaced in tests.
    """

    no_memory = (
        "the simulated engine stands in for a model in load tests and saw nothing of camera {!r}; "
        "questions need engine: native"
    )

    def __init__(
        self,
        shape: VisionLanguageModel,
        costs: Callable[[Sequence[TokenCount]], float] = lambda _: 0.0,
        *,
        spread: float = 0.0,
        scores: ScoreStatistics = DEMO_SCORES,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(shape, max_new_tokens=0)
        self._costs, self._spread = costs, spread
        self._scores = scores
        self._random = np.random.default_rng(seed)
        self._sleep = sleep
        self._system = len(shape.system_ids())
        # Text around frames is not simulated.
        self._frame_text = lambda _: 0
        self._query = lru_cache(maxsize=1024)(lambda text: len(shape.question_ids(text)))

    @property
    def fingerprint(self) -> str:
        return f"{MARK}:{self.model.family}:{self.model.geometry}"

    def push(self, sample: FrameSample) -> list[WindowRequest]:
        closed = super().push(sample)
        # Pixels are not needed.
        self._streams[sample.stream].frames[-1].patches = None
        return closed

    def _encode_frames(self, frames: Sequence[StreamFrame]) -> list[PatchBatch]:
        """Mark pending frames as encoded."""
        for frame, cells in zip(frames, frame_cells(frames), strict=True):
            frame.tokens = FrameTokens(torch.zeros(len(cells), 0), cells, frame.grid)
        return []

    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        started = time.monotonic()
        self._encode(work)
        counts = [self._count(each) for each in work]
        spread = self._spread
        seconds = self._costs(counts) * math.exp(spread * self._random.standard_normal() - spread**2 / 2)
        # The time spent counting is part of the simulated step.
        self._sleep(max(0.0, started + seconds - time.monotonic()))
        return [self._draw(each, tokens) for each, tokens in zip(work, counts, strict=True)], (0.0, 0.0, seconds)

    def _count(self, each: WindowWork) -> TokenCount:
        """Mark a window as computed and count its tokens as the native engine's plan would; a policy that narrows
        between layers is counted at the first layer."""
        stream, frames, window = each.stream, each.frames, each.request.window
        stream.drop_frames(stream.frames.index(frames[0]))
        kept = sum(frame.size for frame in frames)
        cached = sum(frame.size for frame in frames if frame.has_kv)
        selection = choose_refreshed(stream, window, frames, self._system, self.model)
        computed = np.ones(kept, dtype=bool)
        computed[:cached] = selection.mask
        refreshed = int(selection.mask.sum())
        stream.record_computed(window, frames, computed)
        return TokenCount(
            full=self._full(frames),
            kept=kept,
            reused=cached - refreshed,
            refreshed=refreshed,
            new=kept - cached,
            query=sum(self._query(question.text) for question in stream.spec.questions),
            encoded=stream.encoded,
        )

    def _draw(self, each: WindowWork, tokens: TokenCount) -> ComputedWindow:
        questions = each.stream.spec.questions
        scores = [self._scores.draw(self._random) for _ in questions]
        texts = [
            f"{MARK}: {'yes' if score >= question.threshold else 'no'}, no model was run"
            for question, score in zip(questions, scores, strict=True)
        ]
        # Row-slot pairs are not simulated.
        return ComputedWindow(tokens, scores, texts, rows=tokens.computed, attended=0.0)

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        """Delete from the window, then raise ``NotReadyError``: there is no memory."""
        super().delete_memory(stream, ago_s, life)
        raise NotReadyError(self.no_memory.format(stream))
