"""Fits a model's score and thresholds on validation videos, and writes them into its ``sightline.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError, ModelError
from cluster.lab.evaluation.logistic import logit, sigmoid
from cluster.lab.evaluation.metrics import Bools, Floats
from cluster.lab.evaluation.results import Results
from cluster.lab.evaluation.threshold import choose_threshold, choose_thresholds
from cluster.models.settings import FILE, ModelSettings

_STEPS = 60
# Videos that must show a kind of event before it gets a threshold of its own.
_FEWEST = 8
# Slopes outside of this are no calibration: the score is noise, or turned round.
_TEMPERATURES = (0.05, 50.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """What is written: see ``ModelSettings``. ``f1`` is full computation's on the videos it was fitted on, with the one
    threshold; ``thresholds`` has the kinds that enough of those videos show."""

    score_temperature: float
    score_bias: float
    threshold: float
    f1: float
    thresholds: Mapping[str, float] = field(default_factory=dict)


def fit(results: Results, settings: ModelSettings) -> Fit:
    """Temperature and bias by Platt scaling on all windows of full computation, then the threshold on videos.

    Args:
        settings: those the results were computed under; their scaling is undone first.

    Raises:
        ConfigError: no window of one of the two classes, or scores that do not rise with the truth.
    """
    scores, truth = results.window_scores(results.full)
    if truth.all() or not truth.any():
        raise ConfigError("a score cannot be fitted on windows that are all positive or all negative; give more scenes")
    old_temperature, old_bias = settings.score_temperature or 1.0, settings.score_bias or 0.0
    margins = (logit(scores) - old_bias) * old_temperature
    slope, bias = platt(margins, truth)
    if not _TEMPERATURES[0] <= 1 / max(slope, 1e-9) <= _TEMPERATURES[1]:
        raise ConfigError(f"the model's scores do not rise with the truth (slope {slope:.3g}); train it first")
    videos = results.scores(results.full)
    known = np.isfinite(videos)
    videos[known] = sigmoid((logit(videos[known]) - old_bias) * old_temperature * slope + bias)
    threshold, f1 = choose_threshold(videos, results.truth, results.judged)
    often = (results.truth & results.judged).sum(0) >= _FEWEST
    own = choose_thresholds(results.kinds, videos, results.truth, results.judged)
    kinds = {
        kind: halfway(threshold, own[kind][0]) for kind, enough in zip(results.kinds, often, strict=True) if enough
    }
    return Fit(1 / slope, bias, threshold, f1, kinds)


def halfway(common: float, own: float) -> float:
    """Between two thresholds, in logits: a kind's own, chosen on a dozen videos that show it, is half chance."""
    return float(sigmoid(logit(np.array([common, own])).mean()))


def platt(margins: Floats, truth: Bools) -> tuple[float, float]:
    """``(a, b)`` that make ``sigmoid(a * margin + b)`` most likely (Platt 1999, with his smoothed targets)."""
    positive, negative = int(truth.sum()), int((~truth).sum())
    targets = np.where(truth, (positive + 1) / (positive + 2), 1 / (negative + 2))
    design = np.stack([margins, np.ones_like(margins)], axis=1)
    weights = np.array([1.0, math.log((positive + 1) / (negative + 1))])
    for _ in range(_STEPS):
        told = sigmoid(design @ weights)
        gradient = design.T @ (told - targets)
        curvature = (design * (told * (1 - told))[:, None]).T @ design + 1e-9 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # A full Newton step overshoots where the curve is flat.
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        weights -= step
        if float(np.abs(step).max()) < 1e-9:
            break
    return float(weights[0]), float(weights[1])


def write_fit(folder: Path, found: Fit) -> None:
    """Set the fitted entries of the checkpoint's ``sightline.json``; the others stay.

    Raises:
        ModelError: the folder is no checkpoint with such a file.
    """
    path = folder / FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {FILE} to write the fit into")
    body = json.loads(path.read_text(encoding="utf-8"))
    body |= {
        "score_temperature": round(found.score_temperature, 5),
        "score_bias": round(found.score_bias, 5),
        "threshold": round(found.threshold, 4),
    }
    body["thresholds"] = {kind: round(value, 4) for kind, value in found.thresholds.items()}
    part = path.with_name(f".{FILE}.part")
    part.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
