"""Correctness of every model family on tiny presets in float32.

``logit_diff``: growing unpruned windows, which reuse the KV of those before, against transformers' own forward pass.
``reuse_diff``: pruned sliding windows against the same windows computed from scratch by a fresh engine, with all tokens
refreshed, and with all KV reused by a single layer, in which it depends on its token alone. ``--speed`` also runs
``bench window`` on each family's bench preset.
"""

import argparse
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from cluster.lab.bench import window
from cluster.lab.bench.harness import BenchResult, against_goals, print_progress
from cluster.lab.bench.soak import SyntheticCamera
from cluster.lab.check.logits import LogitPair, against_fresh, against_library
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.registry import families
from cluster.types import Question, StreamSpec

QUESTION = Question("q", "Is anyone climbing the fence?")
WINDOW_S, STRIDE_S = 8.0, 2.0
FRAMES = 20
GOALS = {"logit_diff": ("<=", 2e-4), "reuse_diff": ("<=", 2e-4), "lines_per_family": ("<=", 260.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--families", nargs="+", metavar="NAME", help="families (default: all)")
    parser.add_argument("--speed", action="store_true", help="also measure speedups of the bench presets")
    window.add_arguments(parser)


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: maxima over the families, and with ``--speed`` ``speedup_<family>`` of its worst clip."""
    torch.set_num_threads(args.threads or 1)
    rows: list[dict[str, Any]] = []
    for name in args.families or families:
        preset = preset_of(name, "tiny")
        model = load_model(preset)
        row = {
            "family": name,
            "logit_diff": logit_diff(model),
            "reuse_diff": float(np.max([reuse_diff(model, "all"), reuse_diff(one_layer(preset), "none")])),
            "lines_per_family": len(inspect.getsource(inspect.getmodule(type(model)) or type(model)).splitlines()),
        }
        print_progress(f"{name}: logits {row['logit_diff']:.1e}, reuse {row['reuse_diff']:.1e}")
        rows.append(row)
    figures: dict[str, float] = {name: float(np.max([row[name] for row in rows])) for name in GOALS}
    goals = dict(GOALS)
    if args.speed:
        for row in rows:
            speed = f"speedup_{row['family']}"
            figures[speed] = row["speedup"] = _speedup(args, row["family"])
            goals[speed] = (">=", 8.0)
    return BenchResult(figures, rows, goals=against_goals(goals, "families", figures))


def preset_of(family: str, size: str) -> str:
    """Name of a family's preset of this size, ``tiny`` or ``bench``."""
    return next(name for name, preset in PRESETS.items() if preset.family == family and name.startswith(f"{size}-"))


def logit_diff(model: VisionLanguageModel) -> float:
    """Largest logit difference to transformers over growing windows with nothing pruned and nothing refreshed."""
    samples = [_camera(model, kept=1.0).sample(index) for index in range(round(WINDOW_S))]
    return _largest(against_library(model, _spec("none"), samples))


def one_layer(name: str) -> VisionLanguageModel:
    """A preset's model with a single decoder layer."""
    preset = PRESETS[name]
    with mock.patch.dict(PRESETS, {name: replace(preset, text={**preset.text, "num_hidden_layers": 1})}):
        return load_model(name)


def reuse_diff(model: VisionLanguageModel, refresh: str) -> float:
    """Largest logit difference of sliding windows under a refresh policy to windows computed from scratch."""
    samples = [_camera(model, kept=0.3).sample(index) for index in range(FRAMES)]
    return _largest(against_fresh(model, _spec(refresh), samples))


def _largest(pairs: Iterable[LogitPair]) -> float:
    """Largest difference; NaN if any is NaN, unlike with ``max``."""
    return float(np.max([pair.largest for pair in pairs]))


def _camera(model: VisionLanguageModel, kept: float) -> SyntheticCamera:
    """One frame per second, every fourth an anchor."""
    return SyntheticCamera(
        "camera", model.geometry, width=84, height=56, fps=model.geometry.temporal, kept=kept, anchor_every=4
    )


def _spec(refresh: str) -> StreamSpec:
    return StreamSpec("camera", (QUESTION,), WINDOW_S, STRIDE_S, refresh=refresh, static_gate=False)


def _speedup(args: argparse.Namespace, family: str) -> float:
    options = {**vars(args), "model": preset_of(family, "bench"), "policies": [window.NATURAL]}
    figures = window.run(argparse.Namespace(**options)).figures
    return min(value for name, value in figures.items() if name.startswith("speedup_"))
