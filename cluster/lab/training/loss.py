"""Losses of the training stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.examples import Example, ExampleQuestion
from cluster.lab.training.pruning import LABELS
from cluster.lab.training.sequence_layout import SequenceLayout, SequenceQuestion, lay_out_sequence
from cluster.lab.training.trainable_model import TrainableModel, patch_batches
from cluster.models.base import FrameSpan
from cluster.types import PatchGrid

# Weight of positive dense labels, which are rare.
_DENSE_POSITIVE = 4.0
# Weight of background tokens, the bulk of a complete frame.
_BACKGROUND = 0.25
# Weight of event labels, relative to some thirty auxiliary ones.
_EVENT = 2.5
_VELOCITY_SCALE = 0.1
_VELOCITY_WEIGHT = 0.6


@dataclass(frozen=True, slots=True, eq=False)
class DenseLabels:
    """Labels of visual tokens: ``hot [t, labels]``, ``velocity [t, 2]`` float32, ``covered [t]`` bool."""

    hot: Tensor
    velocity: Tensor
    covered: Tensor


def dense_labels(examples: Sequence[Example], device: torch.device) -> DenseLabels:
    """Labels of all visual tokens, in order of examples, frames and cells."""
    labels = [frame.labels for example in examples for frame in example.frames]
    return DenseLabels(
        hot=torch.cat([torch.from_numpy(each.hot) for each in labels]).float().to(device),
        velocity=torch.cat([torch.from_numpy(each.velocity) for each in labels]).to(device),
        covered=torch.cat([torch.from_numpy(each.covered) for each in labels]).to(device),
    )


@dataclass(frozen=True, slots=True)
class DenseLoss:
    """``total``: to minimise; ``found``: recall of positive labels at a threshold of 0.5, for the log."""

    total: Tensor
    found: Tensor


class DenseHead(nn.Module):
    """Linear probe that predicts labels and velocity from hidden states ``[t, D]`` of visual tokens."""

    emphasis: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.labels = nn.Linear(width, len(LABELS))
        self.velocity = nn.Linear(width, 2)
        nn.init.constant_(self.labels.bias, -3.0)
        emphasis = torch.tensor([_EVENT if label.startswith("event:") else 1.0 for label in LABELS])
        self.register_buffer("emphasis", emphasis, persistent=False)

    def forward(self, hidden: Tensor, dense: DenseLabels) -> DenseLoss:
        x = self.norm(hidden.float())
        logits = self.labels(x)
        weight = 1.0 + (_DENSE_POSITIVE - 1.0) * dense.hot
        weight = weight * torch.where(dense.covered, 1.0, _BACKGROUND)[:, None] * self.emphasis
        loss = (F.binary_cross_entropy_with_logits(logits, dense.hot, reduction="none") * weight).sum(1)
        # Normalised by covered tokens, so that empty frames do not dilute busy ones; scaled to the order of 1.
        total = loss.sum() / (_BACKGROUND * len(hidden) + dense.covered.sum()) / 4
        if bool(dense.covered.any()):
            wanted = dense.velocity[dense.covered] / _VELOCITY_SCALE
            total = total + _VELOCITY_WEIGHT * F.huber_loss(self.velocity(x[dense.covered]), wanted)
        hot = dense.hot > 0
        found = (logits[hot] > 0).float().mean() if bool(hot.any()) else logits.new_zeros(())
        return DenseLoss(total, found.detach())


class DenseHeads(nn.Module):
    """Dense heads on the tower's output and on the middle and last layers of the language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = DenseHead(width)
        self.middle = DenseHead(width)
        self.last = DenseHead(width)


# Weight of positive windows, which are a third as frequent as negative ones.
_POSITIVE = 2.5
_VOCABULARY_WEIGHT = 0.1
_MEMORY_WEIGHT = 0.4
_TOWER_WEIGHT = 0.2
_DENSE_WEIGHT = 0.25
# Dense losses are sums over dozens of labels and would outweigh the answers.
_ANSWER_WEIGHT = 3.0
_POINTING_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Loss:
    """``total``: differentiable loss; ``parts``: its components, for the log."""

    total: Tensor
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class PackedQuestions:
    """Standing questions of packed sequences. ``rows [n]``: row that predicts each answer; ``truth [n]`` bool: right
    answers; ``sequence``: index of each question's sequence."""

    rows: Tensor
    truth: Tensor
    questions: tuple[ExampleQuestion, ...]
    sequence: tuple[int, ...]


def example_layout(model: TrainableModel, example: Example, grid: PatchGrid, *, with_answers: bool) -> SequenceLayout:
    """Layout of an example; ``with_answers`` appends the answers to memory questions, for teacher forcing."""
    end = model.tokenizer.eos_token_id
    asks = []
    for question in example.questions:
        answer = model.token_ids(question.answer) if with_answers and question.kind == "memory" else []
        ids = model.question_ids(question.text)
        asks.append(SequenceQuestion(question.opening, question.end, ids, [*answer, end] if answer else ()))
    frames = [
        FrameSpan(frame.time_s, slot, torch.from_numpy(frame.cells), grid) for slot, frame in enumerate(example.frames)
    ]
    return lay_out_sequence(model, frames, example.context, asks)


@dataclass(frozen=True, slots=True, eq=False)
class PointingTargets:
    """Masks over ``n`` rows for ``a`` questions, ``[a, n]`` bool. ``window``: rows of the question's window; ``event``:
    those of them that show its event; ``system``: rows of the system prompt. ``truth`` ``[a]``: the answers."""

    window: Tensor
    event: Tensor
    system: Tensor
    truth: Tensor


def pointing_loss(probes: Sequence[tuple[Tensor, Tensor]], targets: PointingTargets, weight: Tensor) -> Tensor:
    """Attention supervision: weighted mean of ``-log`` of the attention mass on the target rows, which are the event's
    rows for a yes and the system prompt for a no. ``probes`` as in ``SequenceOutput``; ``weight [a]``.

    Only the query heads of the first key head are supervised. Questions whose event was pruned away are ignored.
    """
    right = torch.where(targets.truth[:, None], targets.event, targets.system)
    counted = weight * right.any(1)
    open_rows = targets.window | targets.system
    # The masks below are finite, so that questions without a target row yield no NaN.
    total = weight.new_zeros(())
    for query, key in probes:
        scores = query[: query.shape[0] // key.shape[0]] @ key[0, : right.shape[1]].mT
        among = scores.masked_fill(~open_rows, -1e4).logsumexp(-1)
        there = scores.masked_fill(~right, -1e4).logsumexp(-1)
        total = total + ((among - there).mean(0) * counted).sum() / counted.sum().clamp(min=1e-6)
    return total / max(1, len(probes))


def tower_loss(model: TrainableModel, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid) -> Loss:
    """Dense loss on the tower's output."""
    visual = model.encode_frames([frame for example in examples for frame in patch_batches(example, grid)])
    dense = heads.tower(visual, dense_labels(examples, model.device))
    return Loss(dense.total, {"loss": float(dense.total.detach()), "found": float(dense.found)})


def window_loss(
    model: TrainableModel, heads: DenseHeads, examples: Sequence[Example], grid: PatchGrid, *, train_tower: bool = True
) -> Loss:
    """Answers to all questions, attention supervision, and dense losses at up to three depths."""
    layouts = [example_layout(model, example, grid, with_answers=True) for example in examples]
    with torch.set_grad_enabled(train_tower):
        seen = _visual_tokens(model, examples, grid)
    asked = _packed(layouts, examples, model.device)
    output = model.forward_sequences(torch.split(seen, [layout.visual for layout in layouts]), layouts, asked.rows)
    dense = dense_labels(examples, model.device)
    rows = _visual_rows(layouts, output.starts, model.device)
    middle = heads.middle(output.middle[rows], dense)
    last = heads.last(output.last[rows], dense)
    answered, yes_no = _answer_loss(model, model.answer_logits(output.last[asked.rows]), asked.truth)
    pointed = asked.truth.new_zeros((), dtype=torch.float32)
    if asked.questions:
        targets = _pointing_targets(asked, layouts, output.starts, rows, dense.hot)
        pointed = pointing_loss(output.probes, targets, _weight(asked.truth))
    memory, recalled = _memory_loss(model, output.last, layouts, output.starts)
    total = (
        _ANSWER_WEIGHT * answered
        + _POINTING_WEIGHT * pointed
        + _MEMORY_WEIGHT * memory
        + _DENSE_WEIGHT * (middle.total + last.total)
    )
    if train_tower:
        total = total + _TOWER_WEIGHT * heads.tower(seen, dense).total
    parts = {
        "loss": float(total.detach()),
        "answers": float(yes_no),
        "pointed": float(pointed.detach()),
        "memory": float(memory.detach()),
        "recalled": recalled,
        "middle": float(middle.found),
        "last": float(last.found),
    }
    return Loss(total, parts)


@torch.no_grad()
def margins(model: TrainableModel, examples: Sequence[Example], grid: PatchGrid) -> tuple[Tensor, PackedQuestions]:
    """Yes-minus-no margins ``[n]`` of all standing questions, and the questions."""
    layouts = [example_layout(model, example, grid, with_answers=False) for example in examples]
    seen = _visual_tokens(model, examples, grid)
    output = model.forward_sequences(torch.split(seen, [layout.visual for layout in layouts]), layouts)
    asked = _packed(layouts, examples, model.device)
    return _margin(model, model.answer_logits(output.last[asked.rows])), asked


def _visual_tokens(model: TrainableModel, examples: Sequence[Example], grid: PatchGrid) -> Tensor:
    """Visual tokens of all examples; those without ``visual_tokens`` are encoded here."""
    ready = [example.visual_tokens for example in examples]
    if all(seen is None for seen in ready):
        return model.encode_frames([frame for example in examples for frame in patch_batches(example, grid)])
    parts = [
        model.encode_frames(patch_batches(example, grid))
        if seen is None
        else torch.from_numpy(seen).to(model.device).float()
        for example, seen in zip(examples, ready, strict=True)
    ]
    return torch.cat(parts)


def _visual_rows(layouts: Sequence[SequenceLayout], starts: Sequence[int], device: torch.device) -> Tensor:
    parts = [
        torch.arange(start + len(layout.system), start + len(layout.system) + layout.visual)
        for layout, start in zip(layouts, starts, strict=True)
    ]
    return torch.cat(parts).to(device)


def _packed(layouts: Sequence[SequenceLayout], examples: Sequence[Example], device: torch.device) -> PackedQuestions:
    rows, questions, sequence = [], [], []
    start = 0
    for number, (layout, example) in enumerate(zip(layouts, examples, strict=True)):
        for ask, row, index in zip(layout.asks, layout.starts, layout.order, strict=True):
            if example.questions[index].kind in EVENT_KINDS:
                rows.append(start + row + len(ask.question) - 1)
                questions.append(example.questions[index])
                sequence.append(number)
        start += len(layout)
    return PackedQuestions(
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        truth=torch.tensor([each.answer == "yes" for each in questions], dtype=torch.bool, device=device),
        questions=tuple(questions),
        sequence=tuple(sequence),
    )


def _pointing_targets(
    asked: PackedQuestions, layouts: Sequence[SequenceLayout], starts: Sequence[int], visual: Tensor, hot: Tensor
) -> PointingTargets:
    """``visual [t]``: rows of all visual tokens; ``hot [t, labels]``: their labels."""
    device = hot.device
    total = starts[-1] + len(layouts[-1])
    row = torch.arange(total, device=device)
    first, last, head = [], [], []
    for number, question in zip(asked.sequence, asked.questions, strict=True):
        layout, start = layouts[number], starts[number] + len(layouts[number].system)
        first.append(start + int(layout.offsets[question.opening]))
        last.append(start + int(layout.offsets[question.end]))
        head.append(starts[number])
    window = (row >= torch.tensor(first, device=device)[:, None]) & (row < torch.tensor(last, device=device)[:, None])
    begin = torch.tensor(head, device=device)[:, None]
    length = torch.tensor([len(layouts[number].system) for number in asked.sequence], device=device)[:, None]
    shows = torch.zeros(len(EVENT_KINDS), total, dtype=torch.bool, device=device)
    columns = [LABELS.index(f"event:{kind}") for kind in EVENT_KINDS]
    shows[:, visual] = hot[:, columns].T > 0
    kind = torch.tensor([EVENT_KINDS.index(each.kind) for each in asked.questions], device=device)
    return PointingTargets(window, window & shows[kind], (row >= begin) & (row < begin + length), asked.truth)


def _margin(model: TrainableModel, logits: Tensor) -> Tensor:
    yes, no = model.yes_no_ids()
    return logits[:, yes].logsumexp(1) - logits[:, no].logsumexp(1)


def _weight(truth: Tensor) -> Tensor:
    return 1.0 + (_POSITIVE - 1.0) * truth.float()


def _answer_loss(model: TrainableModel, logits: Tensor, truth: Tensor) -> tuple[Tensor, float]:
    """Weighted cross-entropy of yes against no plus that of the word over the vocabulary; the former alone, to log."""
    if not len(truth):
        return logits.sum() * 0, 0.0
    weight = _weight(truth)
    each = F.binary_cross_entropy_with_logits(_margin(model, logits), truth.float(), reduction="none")
    yes_no = (each * weight).sum() / weight.sum()
    words = torch.where(truth, model.token_ids("yes")[0], model.token_ids("no")[0])
    return yes_no + _VOCABULARY_WEIGHT * F.cross_entropy(logits, words), float(yes_no.detach())


def _memory_loss(
    model: TrainableModel,
    hidden: Tensor,
    layouts: Sequence[SequenceLayout],
    starts: Sequence[int],
) -> tuple[Tensor, float]:
    """Cross-entropy of the answer tokens of memory questions, and the share of correct first words."""
    rows: list[int] = []
    words: list[int] = []
    first: list[int] = []
    for layout, start in zip(layouts, starts, strict=True):
        for ask, row in zip(layout.asks, layout.starts, strict=True):
            if ask.answer:
                begin = start + row + len(ask.question) - 1
                first.append(len(rows))
                rows += range(begin, begin + len(ask.answer))
                words += ask.answer
    if not rows:
        return hidden.sum() * 0, 0.0
    logits = model.answer_logits(hidden[torch.tensor(rows, device=hidden.device)])
    wanted = torch.tensor(words, device=hidden.device)
    right = (logits.argmax(1) == wanted)[torch.tensor(first, device=hidden.device)].float().mean()
    return F.cross_entropy(logits, wanted), float(right)
