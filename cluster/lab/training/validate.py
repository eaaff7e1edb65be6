"""How good the model is on scenes of the validation split, while it is being trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cluster.lab.evaluation.metrics import CONSECUTIVE, video_score
from cluster.lab.scenes import EVENT_KINDS
from cluster.lab.training.batch import dense_labels, patch_batches
from cluster.lab.training.examples import Example
from cluster.lab.training.labels import LABELS
from cluster.lab.training.loss import DenseHeads, margins
from cluster.lab.training.trainee import Trainee
from cluster.types import PatchGrid

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def auc(scores: Floats, told: Bools) -> float:
    """Area under the ROC curve, ties counted half; NaN unless both answers occur."""
    positive, negative = int(told.sum()), int((~told).sum())
    if not positive or not negative:
        return float("nan")
    unique, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    del unique
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[told].sum() - positive * (positive + 1) / 2) / (positive * negative))


def best_f1(scores: Floats, told: Bools) -> tuple[float, float]:
    """The best F1 any threshold reaches, and that threshold (scores at or above it are positive)."""
    if not told.any():
        return float("nan"), float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(told[order])
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + told.sum())
    # A threshold cannot part equal scores.
    last = np.append(np.diff(scores[order]) != 0, True)
    best = int(np.argmax(np.where(last, f1, -1.0)))
    return float(f1[best]), float(scores[order][best])


def validate_windows(model: Trainee, examples: Sequence[Example], grid: PatchGrid) -> dict[str, float]:
    """Per event: AUC and best F1 over windows, best F1 over videos (two positive windows in a row); and their means."""
    scores: dict[str, list[float]] = defaultdict(list)
    told: dict[str, list[bool]] = defaultdict(list)
    videos: dict[str, list[float]] = defaultdict(list)
    shown: dict[str, list[bool]] = defaultdict(list)
    for example in examples:
        found = margins(model, [example], grid)
        values, right = found.values.cpu().numpy().astype(np.float64), found.told.cpu().numpy()
        kinds = np.array(found.kinds)
        for kind in EVENT_KINDS:
            here = kinds == kind
            if here.any():
                scores[kind] += values[here].tolist()
                told[kind] += right[here].tolist()
                videos[kind].append(video_score(values[here], min(CONSECUTIVE, int(here.sum()))))
                shown[kind].append(bool(right[here].any()))
    metrics: dict[str, float] = {}
    for kind in EVENT_KINDS:
        metrics[f"auc:{kind}"] = auc(np.array(scores[kind]), np.array(told[kind], bool))
        metrics[f"f1:{kind}"] = best_f1(np.array(scores[kind]), np.array(told[kind], bool))[0]
        metrics[f"video_f1:{kind}"] = best_f1(np.array(videos[kind]), np.array(shown[kind], bool))[0]
    for name in ("auc", "f1", "video_f1"):
        metrics[name] = _mean(metrics[f"{name}:{kind}"] for kind in EVENT_KINDS)
    return metrics


@torch.no_grad()
def validate_tower(model: Trainee, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid) -> dict[str, float]:
    """AUC of each dense label over tokens, where it occurs at all; and their mean."""
    scores, told = [], []
    for example in examples:
        seen = model.see(patch_batches(example, grid))
        scores.append(heads.tower.labels(heads.tower.norm(seen)).cpu().numpy())
        told.append(dense_labels([example], model.device).hot.cpu().numpy() > 0)
    all_scores, all_told = np.concatenate(scores).astype(np.float64), np.concatenate(told)
    metrics = {
        f"auc:{label}": auc(all_scores[:, column], all_told[:, column])
        for column, label in enumerate(LABELS)
        if all_told[:, column].any()
    }
    return {**metrics, "auc": _mean(metrics.values())}


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
