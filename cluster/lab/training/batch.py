"""From examples, which are numpy and know no model, to what a forward takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.lab.training.examples import Example
from cluster.lab.training.layout import Ask, Frame, Layout, lay_out
from cluster.lab.training.trainee import Trainee
from cluster.models.base import PatchBatch
from cluster.types import PatchGrid


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Labels of visual tokens: ``hot [t, labels]``, ``velocity [t, 2]`` float32, ``covered [t]`` bool."""

    hot: Tensor
    velocity: Tensor
    covered: Tensor


def patch_batches(example: Example, grid: PatchGrid) -> list[PatchBatch]:
    """An example's frames as the tower takes them; those of which nothing is left too."""
    return [PatchBatch(torch.from_numpy(f.patches), torch.from_numpy(f.cells), grid) for f in example.frames]


def dense_labels(examples: Sequence[Example], device: torch.device) -> Dense:
    """Labels of all visual tokens, in order of examples, frames and cells."""
    labels = [frame.labels for example in examples for frame in example.frames]
    return Dense(
        hot=torch.cat([torch.from_numpy(each.hot) for each in labels]).float().to(device),
        velocity=torch.cat([torch.from_numpy(each.velocity) for each in labels]).to(device),
        covered=torch.cat([torch.from_numpy(each.covered) for each in labels]).to(device),
    )


def layout_of(model: Trainee, example: Example, grid: PatchGrid, *, taught: bool) -> Layout:
    """An example's rows; ``taught``: memory answers are part of them, so that every word of them is learnt."""
    end = model.tokenizer.eos_token_id
    asks = []
    for posed in example.posed:
        answer = model.words(posed.answer) if taught and posed.kind == "memory" else []
        asks.append(Ask(posed.opening, posed.end, model.question_ids(posed.text), [*answer, end] if answer else ()))
    frames = [Frame(frame.time_s, frame.cells, grid) for frame in example.frames]
    return lay_out(model, frames, example.context, asks)
