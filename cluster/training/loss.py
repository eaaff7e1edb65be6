"""What each stage minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.scenes import EVENT_KINDS
from cluster.training.batch import dense_labels, layout_of, patch_batches
from cluster.training.examples import Example
from cluster.training.heads import DenseHeads
from cluster.training.layout import Layout
from cluster.training.trainee import Trainee
from cluster.types import PatchGrid

# An event's window is a third as frequent as one without.
_POSITIVE = 2.5
_VOCABULARY_WEIGHT = 0.1
_MEMORY_WEIGHT = 0.4
_TOWER_WEIGHT = 0.2
_DENSE_WEIGHT = 0.25
# The dense losses are sums over dozens of labels: at equal weight they would drown the answers they are there for.
_ANSWER_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Loss:
    """``total`` with gradients, and its parts for the log."""

    total: Tensor
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Margins:
    """Yes-against-no margins ``[n]`` of the standing questions of some sequences, and what was right.

    * ``told`` ``[n]`` bool; ``kinds`` their events; ``sequence`` and ``end``: of which example, up to which frame
    """

    values: Tensor
    told: Tensor
    kinds: tuple[str, ...]
    sequence: tuple[int, ...]
    end: tuple[int, ...]


def tower_loss(model: Trainee, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid) -> Loss:
    """Dense labels on the tower's tokens."""
    visual = model.see([frame for example in examples for frame in patch_batches(example, grid)])
    dense = heads.tower(visual, dense_labels(examples, model.device))
    return Loss(dense.total, {"loss": float(dense.total.detach()), "found": float(dense.found)})


def window_loss(
    model: Trainee, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid, *, train_tower: bool = True
) -> Loss:
    """Answers to all questions, and dense labels on the way there."""
    layouts = [layout_of(model, example, grid, taught=True) for example in examples]
    with torch.set_grad_enabled(train_tower):
        seen = model.see([frame for example in examples for frame in patch_batches(example, grid)])
    reading = model.read(torch.split(seen, [layout.visual for layout in layouts]), layouts)
    dense = dense_labels(examples, model.device)
    rows = _visual_rows(layouts, reading.starts, model.device)
    middle = heads.middle(reading.middle[rows], dense)
    last = heads.last(reading.last[rows], dense)
    standing = _standing(model, reading.last, layouts, reading.starts, examples)
    answered, yes_no = _answer_loss(model, standing)
    memory, recalled = _memory_loss(model, reading.last, layouts, reading.starts, examples)
    total = _ANSWER_WEIGHT * answered + _MEMORY_WEIGHT * memory + _DENSE_WEIGHT * (middle.total + last.total)
    if train_tower:
        total = total + _TOWER_WEIGHT * heads.tower(seen, dense).total
    parts = {
        "loss": float(total.detach()),
        "answers": float(yes_no),
        "memory": float(memory.detach()),
        "recalled": recalled,
        "middle": float(middle.found),
        "last": float(last.found),
    }
    return Loss(total, parts)


@torch.no_grad()
def margins(model: Trainee, examples: Sequence[Example], grid: PatchGrid) -> Margins:
    """How sure the model is of each standing question."""
    layouts = [layout_of(model, example, grid, taught=False) for example in examples]
    seen = model.see([frame for example in examples for frame in patch_batches(example, grid)])
    reading = model.read(torch.split(seen, [layout.visual for layout in layouts]), layouts)
    standing = _standing(model, reading.last, layouts, reading.starts, examples)
    return Margins(_margin(model, standing.logits), standing.told, standing.kinds, standing.sequence, standing.end)


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """Logits ``[n, vocab]`` where each standing question's answer begins, and the right answers."""

    logits: Tensor
    told: Tensor
    kinds: tuple[str, ...]
    sequence: tuple[int, ...]
    end: tuple[int, ...]


def _visual_rows(layouts: Sequence[Layout], starts: Sequence[int], device: torch.device) -> Tensor:
    parts = [
        torch.arange(start + len(layout.system), start + len(layout.system) + layout.visual)
        for layout, start in zip(layouts, starts, strict=True)
    ]
    return torch.cat(parts).to(device)


def _standing(
    model: Trainee, hidden: Tensor, layouts: Sequence[Layout], starts: Sequence[int], examples: Sequence[Example]
) -> _Standing:
    found = []
    for number, (layout, start, example) in enumerate(zip(layouts, starts, examples, strict=True)):
        for ask, row, index in zip(layout.asks, layout.starts, layout.order, strict=True):
            posed = example.posed[index]
            if posed.kind in EVENT_KINDS:
                found.append((start + row + len(ask.question) - 1, posed, number))
    rows = torch.tensor([row for row, _, _ in found], dtype=torch.int64, device=hidden.device)
    return _Standing(
        logits=model.answers(hidden[rows]),
        told=torch.tensor([posed.answer == "yes" for _, posed, _ in found], device=hidden.device),
        kinds=tuple(posed.kind for _, posed, _ in found),
        sequence=tuple(number for _, _, number in found),
        end=tuple(posed.end for _, posed, _ in found),
    )


def _margin(model: Trainee, logits: Tensor) -> Tensor:
    yes, no = model.yes_no_ids()
    return logits[:, yes].logsumexp(1) - logits[:, no].logsumexp(1)


def _answer_loss(model: Trainee, standing: _Standing) -> tuple[Tensor, float]:
    """Weighted cross-entropy of yes against no, and of the word itself; and the former alone, for the log."""
    if not len(standing.kinds):
        zero = standing.logits.sum() * 0
        return zero, 0.0
    told = standing.told.float()
    weight = 1.0 + (_POSITIVE - 1.0) * told
    each = F.binary_cross_entropy_with_logits(_margin(model, standing.logits), told, reduction="none")
    yes_no = (each * weight).sum() / weight.sum()
    words = torch.where(standing.told, model.words("yes")[0], model.words("no")[0])
    return yes_no + _VOCABULARY_WEIGHT * F.cross_entropy(standing.logits, words), float(yes_no.detach())


def _memory_loss(
    model: Trainee, hidden: Tensor, layouts: Sequence[Layout], starts: Sequence[int], examples: Sequence[Example]
) -> tuple[Tensor, float]:
    """Cross-entropy of every token of the answers, and the share of first words that are right."""
    rows: list[int] = []
    words: list[int] = []
    first: list[int] = []
    for layout, start, _ in zip(layouts, starts, examples, strict=True):
        for ask, row in zip(layout.asks, layout.starts, strict=True):
            if ask.answer:
                begin = start + row + len(ask.question) - 1
                first.append(len(rows))
                rows += range(begin, begin + len(ask.answer))
                words += ask.answer
    if not rows:
        return hidden.sum() * 0, 0.0
    logits = model.answers(hidden[torch.tensor(rows, device=hidden.device)])
    wanted = torch.tensor(words, device=hidden.device)
    right = (logits.argmax(1) == wanted)[torch.tensor(first, device=hidden.device)].float().mean()
    return F.cross_entropy(logits, wanted), float(right)
