"""A training run: stages in sequence, their validation, and the export."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ConfigError, ModelError
from cluster.lab.evaluation.metrics import CONSECUTIVE, Bools, Floats, video_score
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.config import Settings, Shape, StageSettings
from cluster.lab.training.example_loader import FrozenTowerExamples, save_tower
from cluster.lab.training.examples import Example, TowerExamples, ValidationExamples, WindowExamples
from cluster.lab.training.loop import Stage, StageRun, Tell, load_checkpoint
from cluster.lab.training.loss import DenseHeads, dense_labels, margins, tower_loss, window_loss
from cluster.lab.training.pruning import LABELS, picture_grid
from cluster.lab.training.trainable_model import TrainableModel, initialise_for_training, patch_batches
from cluster.models.checkpoint import INSTRUCTION
from cluster.models.loading import find_device, load_model
from cluster.types import PatchGrid

# Half of the paper's anchor interval: with anchors as the only frames that show static objects, the model soon forgot a
# vehicle that stopped between two of them (docs/benchmarks.md, accuracy).
WINDOW_S, STRIDE_S, ANCHOR_INTERVAL_S = 20.0, 4.0, 4.0
# Longest training sequence, in seconds.
MEMORY_S = 40.0
# Maximum score change accepted when weights are exported in 16 bits.
_TOLERANCE = 1e-3


TRAINING_STAGES = ("tower", "language", "windows")
"""Names of the stages in execution order; ``export`` follows."""

FROZEN = "frozen-tower.pt"
"""File in the run's folder with the frozen tower of the stage ``language``."""


def make_stage(settings: Settings, stage: StageSettings, folder: Path = Path()) -> Stage:
    """Build a stage of the run in ``folder``. Raises ``ConfigError``: unknown stage."""
    grid = picture_grid(settings.model)
    shape, seed = settings.shape, settings.seed
    make: Callable[[int], Example]
    if stage.name == "tower":
        tower = partial(tower_loss, grid=grid), partial(validate_tower, grid=grid)
        return Stage(stage, TowerExamples(shape, seed), *tower, "auc")
    if stage.name == "language":
        make = FrozenTowerExamples(WindowExamples(shape, seed), str(folder / FROZEN), shape)
    elif stage.name == "windows":
        make = WindowExamples(shape, seed)
    else:
        raise ConfigError(f"unknown stage {stage.name!r}; there are: {', '.join(TRAINING_STAGES)}, export")
    loss = partial(window_loss, grid=grid, train_tower=stage.train_tower)
    return Stage(stage, make, loss, lambda model, _, examples: validate_windows(model, examples, grid), "f1")


# -- validation ------------------------------------------------------------------------------------
def auc(scores: Floats, truth: Bools) -> float:
    """Area under the ROC curve, ties counting one half; NaN unless both classes occur."""
    positive, negative = int(truth.sum()), int((~truth).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))


def best_f1(scores: Floats, truth: Bools) -> float:
    """Best F1 over all thresholds (scores at or above it are positive); NaN without positives in ``truth``."""
    if not truth.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(truth[order])
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + truth.sum())
    # A threshold cannot separate equal scores.
    last = np.append(np.diff(scores[order]) != 0, True)
    return float(f1[last].max())


def validate_windows(model: TrainableModel, examples: Sequence[Example], grid: PatchGrid) -> dict[str, float]:
    """AUC and best F1 over windows and best F1 over videos (two consecutive positive windows), per event and mean."""
    found: dict[str, list[tuple[Floats, Bools]]] = {kind: [] for kind in EVENT_KINDS}
    for example in examples:
        values, asked = margins(model, [example], grid)
        scores, truth = values.cpu().numpy().astype(np.float64), asked.truth.cpu().numpy()
        kinds = np.array([question.kind for question in asked.questions])
        for kind in np.unique(kinds).tolist():
            found[kind].append((scores[kinds == kind], truth[kinds == kind]))
    metrics: dict[str, float] = {}
    for kind, videos in found.items():
        scores = np.concatenate([np.empty(0), *(each for each, _ in videos)])
        truth = np.concatenate([np.empty(0, bool), *(each for _, each in videos)])
        whole = np.array([video_score(each, min(CONSECUTIVE, len(each))) for each, _ in videos])
        metrics[f"auc:{kind}"] = auc(scores, truth)
        metrics[f"f1:{kind}"] = best_f1(scores, truth)
        metrics[f"video_f1:{kind}"] = best_f1(whole, np.array([each.any() for _, each in videos], bool))
    for name in ("auc", "f1", "video_f1"):
        metrics[name] = _mean(metrics[f"{name}:{kind}"] for kind in EVENT_KINDS)
    return metrics


@torch.no_grad()
def validate_tower(
    model: TrainableModel, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid
) -> dict[str, float]:
    """AUC over tokens of each dense label that occurs, and their mean."""
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


# -- export ----------------------------------------------------------------------------------------
def export(model: TrainableModel, shape: Shape, folder: Path, examples: Sequence[Example]) -> str:
    """Write ``folder`` (config, weights, tokenizer, ``sightline.json``), replacing it; returns the weights' dtype: 16
    bits if no score of ``examples`` changes by more than 0.001, else 32. Raises ``ModelError``: the written checkpoint
    does not read back identically."""
    kind = _export_dtype(model, shape, examples)
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    # A copy: casting back and forth would lose the rotary frequencies, which are buffers.
    deepcopy(model.model).to(kind).save_pretrained(fresh)
    model.tokenizer.save_pretrained(fresh)
    (fresh / "sightline.json").write_text(json.dumps(serving_settings(shape), indent=2) + "\n", encoding="utf-8")
    _check(fresh, shape, {name: value.to(kind).float() for name, value in model.model.state_dict().items()})
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return str(kind).removeprefix("torch.")


def serving_settings(shape: Shape) -> dict[str, Any]:
    """Entries of ``sightline.json``; evaluation later fits calibration and thresholds."""
    return {
        "window_s": WINDOW_S,
        "stride_s": STRIDE_S,
        "fps": shape.fps,
        "anchor_interval_s": ANCHOR_INTERVAL_S,
        "memory_s": MEMORY_S,
        "max_pixels": shape.max_pixels,
        "score_temperature": 1.0,
        "score_bias": 0.0,
        "questions": {kind: standing_question(kind) for kind in EVENT_KINDS},
        # All training prompts end with it, including those about the past.
        "open_instruction": INSTRUCTION,
    }


def _export_dtype(model: TrainableModel, shape: Shape, examples: Sequence[Example]) -> torch.dtype:
    if not examples:
        return torch.float32
    compute, model.compute = model.compute, torch.float32
    exact = {name: value.detach().clone() for name, value in model.model.state_dict().items()}
    try:
        wanted = _scores(model, shape, examples)
        for kind in (torch.float16, torch.bfloat16):
            model.model.load_state_dict({name: value.to(kind).float() for name, value in exact.items()})
            if float((_scores(model, shape, examples) - wanted).abs().max()) <= _TOLERANCE:
                return kind
    finally:
        model.model.load_state_dict(exact)
        model.compute = compute
    return torch.float32


def _scores(model: TrainableModel, shape: Shape, examples: Sequence[Example]) -> Tensor:
    grid = picture_grid(shape)
    return torch.cat([margins(model, [example], grid)[0] for example in examples]).sigmoid()


def _check(folder: Path, shape: Shape, weights: dict[str, Tensor]) -> None:
    loaded: Any = load_model(str(folder), max_pixels=shape.max_pixels)
    state = loaded.model.state_dict()
    wrong = [name for name, value in weights.items() if name not in state or not torch.equal(state[name], value.cpu())]
    if wrong:
        raise ModelError(f"the checkpoint written to {folder} reads back with different weights, first {wrong[0]}")


# -- the run --------------------------------------------------------------------------------------
EXPORT = "export"
"""Name of the last step."""

MODEL = "model"
"""Subfolder of the exported checkpoint."""

# First number and count of the examples for initialisation, far from those of the first steps.
_INIT_FIRST, _INIT_EXAMPLES = 50_000_000, 30

# Validation scenes on which the weights' dtypes are compared.
_EXPORT_SCENES = 6


def train(
    settings: Settings,
    folder: Path,
    tell: Tell,
    *,
    resume: bool = True,
    export_model: bool = True,
    initial_models: Sequence[Path] = (),
) -> None:
    """Run the stages of ``settings`` in order in ``folder``, then, if ``export_model``, export the model there.

    Each stage starts from the weights of the previous one: stages that are not requested but come before the last
    requested one (all, if none is requested) are loaded from their checkpoints in ``folder``, if any.
    ``initial_models`` start from exported models instead, from the mean of their weights if there are several, with
    fresh dense-label heads. Raises ``ConfigError``: unknown stage, unavailable device, or a checkpoint of another run.
    """
    find_device(settings.device)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = TrainableModel.fresh(settings.model, settings.seed, settings.device)
    heads = DenseHeads(model.text_config.hidden_size).to(settings.device)
    wanted = {stage.name: make_stage(settings, stage, folder) for stage in settings.stages}
    if initial_models:
        load_mean_weights(initial_models, model)
    elif TRAINING_STAGES[0] in wanted and not (resume and (folder / f"{TRAINING_STAGES[0]}.pt").is_file()):
        make = wanted[TRAINING_STAGES[0]].make
        initialise_for_training(model, [make(_INIT_FIRST + number) for number in range(_INIT_EXAMPLES)])
    check = lru_cache(maxsize=None)(ValidationExamples(settings.shape))

    last = max(map(TRAINING_STAGES.index, wanted), default=len(TRAINING_STAGES))
    for name in TRAINING_STAGES[: last + 1]:
        if name not in wanted:
            if not initial_models:
                load_stage_weights(folder / f"{name}.pt", settings, model, heads)
            continue
        run = StageRun(settings, wanted[name], model, heads, folder)
        if resume:
            run.resume()
        if name == "language":
            save_tower(model, folder / FROZEN)
        if not run.done:
            tell(f"{name}: " + (f"resumes at step {run.step}" if run.step else "starts"), None)
            run.run(tell, validation=lambda: _examples(check, settings.validation_scenes))
    if export_model:
        kind = export(model, settings.model, folder / MODEL, _examples(check, _EXPORT_SCENES))
        tell(f"model: {folder / MODEL} ({kind} weights)", None)


def _examples(check: Callable[[int], Example], count: int) -> list[Example]:
    return [check(number) for number in range(count)]


def load_mean_weights(folders: Sequence[Path], model: TrainableModel) -> None:
    """Load an exported model, or the mean of several (model soups, Wortsman et al. 2022). Raises ``ConfigError``: a
    folder holds no model, or one of another architecture."""
    mean: dict[str, torch.Tensor] = {}
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no exported model (config.json)")
        weights = load_model(str(folder)).model.state_dict()
        try:
            model.model.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"the model in {folder} has another architecture: {str(error).splitlines()[-1].strip()}"
            ) from None
        for name, value in weights.items():
            mean[name] = mean.get(name, 0) + value.float() / len(folders)
    model.model.load_state_dict(mean)


def load_stage_weights(path: Path, settings: Settings, model: TrainableModel, heads: DenseHeads) -> None:
    """Load an earlier stage's weights, if any; the averaged weights of an unfinished one."""
    progress = load_checkpoint(path, {"shape": settings.shape})
    if progress is not None:
        model.model.load_state_dict(progress["model" if progress["done"] else "average"])
        heads.load_state_dict(progress["heads"])
