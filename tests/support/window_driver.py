"""An engine driven over windows of a synthetic camera, remembering what it computed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.engine.native import NativeEngine
from cluster.engine.native.plan import WindowPlan
from cluster.engine.window.step import WindowStats
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.models.presets import PRESETS
from cluster.types import Answer, FrameSample, Question, StreamSpec, WindowRequest

QUESTION = Question("q", "Is anyone climbing the fence?")
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
FAMILIES = [name for name in PRESETS if name.startswith("tiny-")]
# Share of groups kept, share of frames that keep nothing.
PRUNINGS = {"whole": (1.0, 0.0), "pruned": (0.3, 0.0), "sparse": (0.2, 0.5)}

T = TypeVar("T")


def covering_cases(options: Sequence[T], turns: Sequence[Any] = tuple(PRUNINGS)) -> list[tuple[str, Any, T]]:
    """Family, one of ``turns``, option: every two of them meet in a case, which is a third of the product of as many
    as there are prunings.

    A family has its attention and positions, a pruning its frames and their tokens, a policy its choice among them: no
    code is of all three, and what is of two is reached by every pair.
    """
    return [
        (family, turns[(row + column) % len(turns)], option)
        for row, family in enumerate(FAMILIES)
        for column, option in enumerate(options)
    ]


@dataclass
class Recorded:
    """One window: what the engine computed and said."""

    request: WindowRequest
    answers: list[Answer]
    logits: Tensor
    plan: WindowPlan | None
    stats: WindowStats


@dataclass
class Driver:
    """An engine that remembers the logits and plans of its steps."""

    engine: NativeEngine
    _logits: list[Tensor] = field(default_factory=list)
    _plans: list[WindowPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        score, plan = self.engine._score, self.engine._plan

        def recording_score(logits: Tensor) -> Tensor:
            self._logits.append(logits.clone())
            return score(logits)

        def recording_plan(work: Any) -> WindowPlan:
            self._plans.append(plan(work))
            return self._plans[-1]

        self.engine._score = recording_score  # type: ignore[assignment,method-assign]
        self.engine._plan = recording_plan  # type: ignore[method-assign]

    def step(self, requests: Sequence[WindowRequest]) -> list[Recorded]:
        """Step them together; one record per request that was answered."""
        self._logits.clear()
        self._plans.clear()
        answers = self.engine.step(requests)
        if not self._logits:
            return []
        rows = torch.cat(self._logits)
        records = []
        for plan in self._plans:
            given = [a for a in answers if a.stream == plan.request.stream]
            [stats] = [each for each in self.engine.stats.windows if each.stream == plan.request.stream]
            records.append(Recorded(plan.request, given, rows[: len(given)], plan, stats))
            rows = rows[len(given) :]
        return records

    def run(self, samples: Iterable[FrameSample], skip: Sequence[int] = (), *, ahead: bool = False) -> list[Recorded]:
        """Push all, stepping each window as it closes but those in ``skip``; ``ahead``: what is known of a window is
        computed frame by frame before it closes."""
        if ahead:
            self.engine.ahead_rows = 1, 1
        records = []
        for sample in samples:
            for request in self.engine.push(sample):
                if request.window not in skip:
                    records += self.step([request])
            while ahead and self.engine.prefill_ahead():
                pass
        return records


def camera_of(model: VisionLanguageModel, **options: Any) -> SyntheticCamera:
    standard: dict[str, Any] = {"stream": "cam", "width": 84, "height": 56, "anchor_every": 4}
    return SyntheticCamera(geometry=model.geometry, fps=model.geometry.temporal, **standard | options)


def spec_of(stream: str = "cam", **options: Any) -> StreamSpec:
    """Windows of 8 s every 2 s: four windows grow, the fifth is the first that slides."""
    spec = StreamSpec(stream, (QUESTION,), window_s=8.0, stride_s=2.0, static_gate=False)
    return replace(spec, **options)


def take(camera: SyntheticCamera, count: int) -> list[FrameSample]:
    return [camera.sample(index) for index in range(count)]
