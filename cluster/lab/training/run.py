"""A training run: stage after stage, then the export."""

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ConfigError, ModelError
from cluster.lab.scenes import EVENT_KINDS, standing_question
from cluster.lab.training.config import Settings, Shape
from cluster.lab.training.example_loader import save_tower
from cluster.lab.training.examples import Example, ValidationExamples
from cluster.lab.training.loop import StageRun, TrainingListener, load_checkpoint
from cluster.lab.training.loss import DenseHeads, margins
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.stages import FROZEN, TRAINING_STAGES, make_stage
from cluster.lab.training.trainable_model import TrainableModel, initialise_for_training
from cluster.models import load_model
from cluster.models.checkpoint import INSTRUCTION

# Half of the paper's anchor interval: of the demo's 114 answers 107 are right in full, 106 ours with an anchor every
# 4 s and 94 with one every 8 s, where a vehicle that stopped between two is soon forgotten.
WINDOW_S, STRIDE_S, ANCHOR_INTERVAL_S = 20.0, 4.0, 4.0
# The longest window of training.
MEMORY_S = 40.0
# Tolerated change of a score by 16-bit weights.
_TOLERANCE = 1e-3


def export(model: TrainableModel, shape: Shape, folder: Path, examples: Sequence[Example]) -> str:
    """Write ``folder`` (config, weights, tokenizer, ``sightline.json``), replacing it; returns the weights' type: 16
    bits if no score of ``examples`` changes by more than a thousandth.

    Raises:
        ModelError: the written checkpoint does not load back identically.
    """
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
    """Entries of ``sightline.json``; calibration and threshold are set by evaluation."""
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
        # All training prompts end with it, also those about the past.
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
        raise ModelError(f"the checkpoint written to {folder} reads back with other weights: {wrong[0]} the first")


EXPORT = "export"
"""Name of the last step."""

MODEL = "model"
"""Subfolder of the exported checkpoint."""

# First number and count of the scenes for initialisation, far from those of the first steps.
_BEGINNING, _BEGINNING_SCENES = 50_000_000, 30

# Validation scenes to compare types of weights.
_EXPORT_SCENES = 6


def train(
    settings: Settings,
    folder: Path,
    listener: TrainingListener,
    *,
    encoded_scenes: Path | None = None,
    resume: bool = True,
    export_model: bool = True,
    initial_models: Sequence[Path] = (),
) -> None:
    """Run the stages of ``settings`` in order in ``folder``; then, if ``export_model``, write the model there.

    ``initial_models``: an exported model to start from, or several for the mean of their weights; the dense-label heads
    start anew. Stages that are not requested but have a checkpoint in ``folder`` are loaded: each stage starts from the
    weights of the previous one.

    Raises:
        ConfigError: an unknown stage, an unavailable device, or a checkpoint of another run.
    """
    if not torch.cuda.is_available() and settings.device.startswith("cuda"):
        raise ConfigError(f"device {settings.device!r} is not available here; use cpu")
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = TrainableModel.fresh(settings.model, settings.seed, settings.device)
    heads = DenseHeads(model.text_config.hidden_size).to(settings.device)
    wanted = {stage.name: make_stage(settings, stage, encoded_scenes, folder) for stage in settings.stages}
    if initial_models:
        load_mean_weights(initial_models, model)
    elif TRAINING_STAGES[0] in wanted and not (resume and (folder / f"{TRAINING_STAGES[0]}.pt").is_file()):
        make = wanted[TRAINING_STAGES[0]].make
        initialise_for_training(model, [make(_BEGINNING + number) for number in range(_BEGINNING_SCENES)])
    check = lru_cache(maxsize=None)(ValidationExamples(settings.shape))

    for name in TRAINING_STAGES:
        if name not in wanted:
            load_stage_weights(folder / f"{name}.pt", settings, model, heads)
            continue
        run = StageRun(settings, wanted[name], model, heads, folder)
        if resume:
            run.resume()
        if name == "language":
            save_tower(model, folder / FROZEN)
        if not run.done:
            listener.stage_started(name, run.step)
            run.run(listener, validation=lambda: _examples(check, settings.validation_scenes))
    if export_model:
        kind = export(model, settings.model, folder / MODEL, _examples(check, _EXPORT_SCENES))
        listener.exported(folder / MODEL, kind)


def _examples(check: Callable[[int], Example], count: int) -> list[Example]:
    return [check(number) for number in range(count)]


def load_mean_weights(folders: Sequence[Path], model: TrainableModel) -> None:
    """Load an exported model, or the mean of several (model soups, Wortsman et al. 2022).

    Raises:
        ConfigError: no model, or one of another shape.
    """
    mean: dict[str, torch.Tensor] = {}
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no exported model (config.json)")
        weights = load_model(str(folder)).model.state_dict()
        try:
            model.model.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"the model in {folder} has another shape: {str(error).splitlines()[-1].strip()}"
            ) from None
        for name, value in weights.items():
            mean[name] = mean.get(name, 0) + value.float() / len(folders)
    model.model.load_state_dict(mean)


def load_stage_weights(path: Path, settings: Settings, model: TrainableModel, heads: DenseHeads) -> None:
    """Load an earlier stage's weights, if any; its moving average if it is unfinished."""
    progress = load_checkpoint(path, {"shape": settings.shape})
    if progress is not None:
        model.model.load_state_dict(progress["model" if progress["done"] else "average"])
        heads.load_state_dict(progress["heads"])
