"""The trained model as a checkpoint folder that any engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ModelError
from cluster.lab.scenes import EVENT_KINDS, standing_question
from cluster.lab.training.config import Shape
from cluster.lab.training.examples import Example
from cluster.lab.training.loss import margins
from cluster.lab.training.pictures import picture_grid
from cluster.lab.training.trainee import Trainee
from cluster.models import load_model
from cluster.models.checkpoint import INSTRUCTION

# Half of the paper's seconds between anchors: of the demo's 114 answers 107 are right in full, 106 ours with an anchor
# every 4 s and 94 with one every 8 s, where a vehicle that stopped between two is soon forgotten.
WINDOW_S, STRIDE_S, ANCHOR_INTERVAL_S = 20.0, 4.0, 4.0
# What a smaller type of weights may change a score by.
_TOLERANCE = 1e-3


def export(model: Trainee, shape: Shape, folder: Path, examples: Sequence[Example]) -> str:
    """Write ``folder`` (config, weights, tokenizer, ``sightline.json``), replacing what is there; returns the weights'
    type: half as large where no score of ``examples`` changes by more than a thousandth.

    Raises:
        ModelError: the folder that was written does not load, or loads as something else.
    """
    kind = _type(model, shape, examples)
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    # A copy: what is cast there and back loses the rotary frequencies, which are no weights.
    deepcopy(model.model).to(kind).save_pretrained(fresh)
    model.tokenizer.save_pretrained(fresh)
    (fresh / "sightline.json").write_text(json.dumps(serving(shape), indent=2) + "\n", encoding="utf-8")
    _check(fresh, shape, {name: value.to(kind).float() for name, value in model.model.state_dict().items()})
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return str(kind).removeprefix("torch.")


def serving(shape: Shape) -> dict[str, Any]:
    """How the model wants to be asked; calibration and threshold are set when it has been evaluated."""
    return {
        "window_s": WINDOW_S,
        "stride_s": STRIDE_S,
        "fps": shape.fps,
        "anchor_interval_s": ANCHOR_INTERVAL_S,
        "max_pixels": shape.max_pixels,
        "score_temperature": 1.0,
        "score_bias": 0.0,
        "questions": {kind: standing_question(kind) for kind in EVENT_KINDS},
        # It was taught every question, those about the past as well, with the same words behind it.
        "open_instruction": INSTRUCTION,
    }


def _type(model: Trainee, shape: Shape, examples: Sequence[Example]) -> torch.dtype:
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


def _scores(model: Trainee, shape: Shape, examples: Sequence[Example]) -> Tensor:
    grid = picture_grid(shape)
    return torch.cat([margins(model, [example], grid).values for example in examples]).sigmoid()


def _check(folder: Path, shape: Shape, weights: dict[str, Tensor]) -> None:
    loaded: Any = load_model(str(folder), max_pixels=shape.max_pixels)
    state = loaded.model.state_dict()
    wrong = [name for name, value in weights.items() if name not in state or not torch.equal(state[name], value.cpu())]
    if wrong:
        raise ModelError(f"the checkpoint written to {folder} reads back with other weights: {wrong[0]} the first")
