"""Examples (numpy) to model inputs (tensors)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.lab.training.examples import Example
from cluster.lab.training.sequence_layout import SequenceFrame, SequenceLayout, SequenceQuestion, lay_out_sequence
from cluster.lab.training.trainable_model import TrainableModel
from cluster.models.base import PatchBatch
from cluster.types import PatchGrid


@dataclass(frozen=True, slots=True, eq=False)
class DenseLabels:
    """Labels of visual tokens: ``hot [t, labels]``, ``velocity [t, 2]`` float32, ``covered [t]`` bool."""

    hot: Tensor
    velocity: Tensor
    covered: Tensor


def patch_batches(example: Example, grid: PatchGrid) -> list[PatchBatch]:
    """Frames of an example as the tower's input, including empty ones."""
    return [PatchBatch(torch.from_numpy(f.patches), torch.from_numpy(f.cells), grid) for f in example.frames]


def dense_labels(examples: Sequence[Example], device: torch.device) -> DenseLabels:
    """Labels of all visual tokens, in order of examples, frames and cells."""
    labels = [frame.labels for example in examples for frame in example.frames]
    return DenseLabels(
        hot=torch.cat([torch.from_numpy(each.hot) for each in labels]).float().to(device),
        velocity=torch.cat([torch.from_numpy(each.velocity) for each in labels]).to(device),
        covered=torch.cat([torch.from_numpy(each.covered) for each in labels]).to(device),
    )


def example_layout(model: TrainableModel, example: Example, grid: PatchGrid, *, with_answers: bool) -> SequenceLayout:
    """Layout of an example; ``with_answers``: includes the answers to memory questions, for teacher forcing."""
    end = model.tokenizer.eos_token_id
    asks = []
    for question in example.questions:
        answer = model.token_ids(question.answer) if with_answers and question.kind == "memory" else []
        asks.append(
            SequenceQuestion(
                question.opening, question.end, model.question_ids(question.text), [*answer, end] if answer else ()
            )
        )
    frames = [SequenceFrame(frame.time_s, frame.cells, grid) for frame in example.frames]
    return lay_out_sequence(model, frames, example.context, asks)
