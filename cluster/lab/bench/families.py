"""Every model family against transformers and against itself, on tiny presets in float32.

``logit_diff``: windows with nothing pruned against transformers' own forward. ``reuse_diff``: pruned windows that
slide, all of whose tokens are refreshed, against the same windows computed at once by an engine that holds nothing.
``--speed`` runs ``bench window`` on each family's bench preset besides.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.encode import patch_batch
from cluster.engine.window.stream import StreamFrame
from cluster.lab.bench import window
from cluster.lab.bench.harness import BenchResult, against_goals, print_progress
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.models.presets import PRESETS
from cluster.registry import families
from cluster.types import FrameSample, Question, StreamSpec, WindowRequest

QUESTION = Question("q", "Is anyone climbing the fence?")
WINDOW_S, STRIDE_S = 8.0, 2.0
FRAMES = 20
GOALS = {"logit_diff": ("<=", 2e-4), "reuse_diff": ("<=", 2e-4), "lines_per_family": ("<=", 260.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the harness."""
    parser.add_argument("--families", nargs="+", metavar="NAME", help="families (default: all there are)")
    parser.add_argument("--speed", action="store_true", help="also measure speedups of the bench presets")
    window.add_arguments(parser)


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: the largest of all families, and with ``--speed`` ``speedup_<family>``, of its slowest clip."""
    torch.set_num_threads(args.threads or 1)
    rows: list[dict[str, Any]] = []
    for name in args.families or families:
        model = load_model(preset_of(name, "tiny"))
        row = {
            "family": name,
            "logit_diff": logit_diff(model),
            "reuse_diff": reuse_diff(model),
            "lines_per_family": len(inspect.getsource(inspect.getmodule(type(model)) or type(model)).splitlines()),
        }
        print_progress(f"{name}: logits {row['logit_diff']:.1e}, reuse {row['reuse_diff']:.1e}")
        rows.append(row)
    figures: dict[str, float] = {name: max(row[name] for row in rows) for name in GOALS}
    goals = dict(GOALS)
    if args.speed:
        for row in rows:
            speed = f"speedup_{row['family']}"
            figures[speed] = row["speedup"] = _speedup(args, row["family"])
            goals[speed] = (">=", 8.0)
    return BenchResult("families", figures, rows, goals=against_goals(goals, "families", figures))


def preset_of(family: str, size: str) -> str:
    """A family's preset of this size, ``tiny`` or ``bench``."""
    return next(name for name, preset in PRESETS.items() if preset.family == family and name.startswith(f"{size}-"))


def logit_diff(model: VisionLanguageModel) -> float:
    """Largest difference of a window's logits to transformers' own, nothing pruned, over windows that grow."""
    camera = _camera(model, kept=1.0)
    engine = _Recording(model)
    engine.admit(_spec())
    found = 0.0
    for index in range(round(WINDOW_S)):
        for request in engine.push(camera.sample(index)):
            (logits,) = engine.answer([request])
            batches = [patch_batch(StreamFrame.of(camera.sample(i))) for i in range(index + 1)]
            reference = model.reference_logits(batches, [float(i) for i in range(index + 1)], QUESTION.text)
            found = max(found, float((logits - reference).abs().max()))
    return found


def reuse_diff(model: VisionLanguageModel) -> float:
    """Largest difference of the logits of windows that slide, all refreshed, to those of windows computed at once."""
    samples = [_camera(model, kept=0.3).sample(index) for index in range(FRAMES)]
    engine = _Recording(model)
    engine.admit(_spec())
    found = 0.0
    for index, sample in enumerate(samples):
        for request in engine.push(sample):
            (logits,) = engine.answer([request])
            if request.start > 0:
                found = max(found, float((logits - _at_once(model, samples[: index + 1])).abs().max()))
    return found


def _at_once(model: VisionLanguageModel, samples: list[FrameSample]) -> Tensor:
    """Logits of the last window that these frames close, by an engine that answered none before."""
    engine = _Recording(model)
    engine.admit(_spec())
    last: list[WindowRequest] = []
    for sample in samples:
        last = engine.push(sample) or last
    return engine.answer(last[-1:])[0]


class _Recording(NativeEngine):
    """The engine, which also keeps the logits that it scores."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self._seen: list[Tensor] = []
        score = self._score

        def recording(logits: Tensor) -> Tensor:
            self._seen.append(logits.clone())
            return score(logits)

        self._score = recording  # type: ignore[assignment]

    def answer(self, requests: list[WindowRequest]) -> Tensor:
        """Logits ``[questions, vocab]`` of these windows."""
        self._seen.clear()
        self.step(requests)
        return torch.cat(self._seen)


def _camera(model: VisionLanguageModel, kept: float) -> SyntheticCamera:
    """One frame a second, an anchor every four."""
    return SyntheticCamera(
        "camera", model.geometry, width=84, height=56, fps=model.geometry.temporal, kept=kept, anchor_every=4
    )


def _spec() -> StreamSpec:
    return StreamSpec("camera", (QUESTION,), WINDOW_S, STRIDE_S, refresh="all", static_gate=False)


def _speedup(args: argparse.Namespace, family: str) -> float:
    options = {**vars(args), "model": preset_of(family, "bench"), "policies": [window.NATURAL]}
    figures = window.run(argparse.Namespace(**options)).figures
    return min(value for name, value in figures.items() if name.startswith("speedup_"))
