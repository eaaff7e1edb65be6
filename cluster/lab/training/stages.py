"""Training stages: examples, loss and validation of each."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cluster.errors import ConfigError
from cluster.lab.evaluation.metrics import CONSECUTIVE, Bools, Floats, video_score
from cluster.lab.scenes import EVENT_KINDS
from cluster.lab.training.config import Settings, StageSettings
from cluster.lab.training.example_loader import FrozenTowerExamples
from cluster.lab.training.examples import Example, TowerExamples, ValidationExamples, WindowExamples
from cluster.lab.training.labels import LABELS
from cluster.lab.training.loss import DenseHeads, Loss, dense_labels, margins, tower_loss, window_loss
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.trainable_model import TrainableModel, patch_batches
from cluster.types import PatchGrid


def auc(scores: Floats, truth: Bools) -> float:
    """Area under the ROC curve, ties counted half; NaN unless both classes occur."""
    positive, negative = int(truth.sum()), int((~truth).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))


def best_f1(scores: Floats, truth: Bools) -> tuple[float, float]:
    """Best F1 over all thresholds, and its threshold (scores at or above it are positive)."""
    if not truth.any():
        return float("nan"), float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(truth[order])
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + truth.sum())
    # A threshold cannot separate equal scores.
    last = np.append(np.diff(scores[order]) != 0, True)
    best = int(np.argmax(np.where(last, f1, -1.0)))
    return float(f1[best]), float(scores[order][best])


def validate_windows(model: TrainableModel, examples: Sequence[Example], grid: PatchGrid) -> dict[str, float]:
    """Per event: AUC and best F1 over windows, best F1 over videos (two positive windows in a row); and their means."""
    scores: dict[str, list[float]] = defaultdict(list)
    truth: dict[str, list[bool]] = defaultdict(list)
    videos: dict[str, list[float]] = defaultdict(list)
    shown: dict[str, list[bool]] = defaultdict(list)
    for example in examples:
        found, asked = margins(model, [example], grid)
        values, right = found.cpu().numpy().astype(np.float64), asked.truth.cpu().numpy()
        kinds = np.array(asked.kinds)
        for kind in EVENT_KINDS:
            here = kinds == kind
            if here.any():
                scores[kind] += values[here].tolist()
                truth[kind] += right[here].tolist()
                videos[kind].append(video_score(values[here], min(CONSECUTIVE, int(here.sum()))))
                shown[kind].append(bool(right[here].any()))
    metrics: dict[str, float] = {}
    for kind in EVENT_KINDS:
        metrics[f"auc:{kind}"] = auc(np.array(scores[kind]), np.array(truth[kind], bool))
        metrics[f"f1:{kind}"] = best_f1(np.array(scores[kind]), np.array(truth[kind], bool))[0]
        metrics[f"video_f1:{kind}"] = best_f1(np.array(videos[kind]), np.array(shown[kind], bool))[0]
    for name in ("auc", "f1", "video_f1"):
        metrics[name] = _mean(metrics[f"{name}:{kind}"] for kind in EVENT_KINDS)
    return metrics


@torch.no_grad()
def validate_tower(
    model: TrainableModel, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid
) -> dict[str, float]:
    """AUC of each occurring dense label over tokens, and their mean."""
    scores, truth = [], []
    for example in examples:
        seen = model.encode_frames(patch_batches(example, grid))
        scores.append(heads.tower.labels(heads.tower.norm(seen)).cpu().numpy())
        truth.append(dense_labels([example], model.device).hot.cpu().numpy() > 0)
    all_scores, all_truth = np.concatenate(scores).astype(np.float64), np.concatenate(truth)
    metrics = {
        f"auc:{label}": auc(all_scores[:, column], all_truth[:, column])
        for column, label in enumerate(LABELS)
        if all_truth[:, column].any()
    }
    return {**metrics, "auc": _mean(metrics.values())}


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


TRAINING_STAGES = ("tower", "language", "windows", "codec")
"""In execution order; ``export`` follows."""

FROZEN = "frozen-tower.pt"
"""File in the run's folder with the tower for the stage ``language``."""

CACHE = "recorded"
"""Subfolder of the run with pruned frames of encoded scenes."""


LossFunction = Callable[[TrainableModel, DenseHeads, Sequence[Example]], Loss]

Validator = Callable[[TrainableModel, DenseHeads, Sequence[Example]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Stage:
    """``make``: number -> training example, ``check``: number -> validation example; ``score``: metric that selects the
    better model."""

    settings: StageSettings
    make: Callable[[int], Example]
    check: Callable[[int], Example]
    loss: LossFunction
    judge: Validator
    score: str


def make_stage(settings: Settings, stage: StageSettings, encoded_scenes: Path | None, folder: Path = Path()) -> Stage:
    """A stage by name. ``encoded_scenes``: folder of encoded scenes for ``codec``; their pruned frames are cached in
    ``folder``.

    Raises:
        ConfigError: no such stage, or ``codec`` without scenes.
    """
    grid = picture_grid(settings.model)
    shape, seed = settings.shape, settings.seed
    check = ValidationExamples(shape)

    make: Callable[[int], Example]
    if stage.name == "tower":
        tower = partial(tower_loss, grid=grid), partial(validate_tower, grid=grid)
        return Stage(stage, TowerExamples(shape, seed), check, *tower, "auc")
    if stage.name == "language":
        make = FrozenTowerExamples(WindowExamples(shape, seed), str(folder / FROZEN), shape)
    elif stage.name == "windows":
        make = WindowExamples(shape, seed)
    elif stage.name == "codec":
        if encoded_scenes is None:
            raise ConfigError("the codec stage is trained on encoded scenes; name their folder with --codec-scenes DIR")
        from cluster.lab.training.encoded_examples import EncodedExamples, list_training_clips

        list_training_clips(encoded_scenes)
        make = EncodedExamples(str(encoded_scenes), str(folder / CACHE), shape, seed)
    else:
        raise ConfigError(f"unknown stage {stage.name!r}; there are: {', '.join(TRAINING_STAGES)}, export")
    loss = partial(window_loss, grid=grid, train_tower=stage.train_tower)
    return Stage(stage, make, check, loss, lambda model, _, examples: validate_windows(model, examples, grid), "f1")
