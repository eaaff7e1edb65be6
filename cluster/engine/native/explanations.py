"""Greedy decoding of explanations, batched over all questions of all streams."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.graphed_decode import LARGEST, DecodeStep, GraphedDecode
from cluster.engine.native.plan import WindowPlan
from cluster.engine.window.planner import IntArray, Run, Tail
from cluster.engine.window.score import answer_text
from cluster.models.base import VisionLanguageModel


@dataclass(slots=True)
class Explanation:
    """An explanation being decoded. ``given``: the model's answer and the turn that asks why; ``tokens``: decoded so
    far; the last ``due`` tokens of ``given`` and ``tokens`` have no KV yet."""

    tail: Tail
    given: Sequence[int]
    due: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def add_token(self, token: int, ends: frozenset[int]) -> None:
        self.due = 1
        self.ended = token in ends
        if not self.ended:
            self.tokens.append(token)
        self.ended |= len(self.given) + len(self.tokens) >= self.tail.reserved

    def next_rows(self) -> list[tuple[int, int]]:
        """Offset after the question, and id, of each token without KV."""
        return list(enumerate([*self.given, *self.tokens]))[-self.due :]


_PlanExplanation: TypeAlias = tuple[int, Explanation]


def decode_explanations(
    model: VisionLanguageModel,
    decode: GraphedDecode,
    plans: Sequence[WindowPlan],
    firsts: Sequence[Sequence[int]],
    why: Sequence[int],
    ends: frozenset[int],
) -> tuple[list[list[str | None]], list[int]]:
    """Decode an explanation for each question that asks for one, in a separate turn, so that no score is affected.

    ``firsts[i][j]``: first answer token to question ``j`` of plan ``i``; ``why``: the turn that asks why, up to where
    the explanation starts. Returns the texts (``None`` if none was requested) and the number of tokens computed per
    plan. An explanation's KV goes to the slots reserved after its question, until the window is done.
    """
    wanted: list[list[Explanation | None]] = []
    for plan, tokens in zip(plans, firsts, strict=True):
        given = [[*([] if token in ends else [token]), *why] for token in tokens]
        wanted.append(
            [
                Explanation(tail, turn, len(turn)) if prompt.question.explain else None
                for prompt, tail, turn in zip(plan.prompts, plan.tails, given, strict=True)
            ]
        )
    computed = [0] * len(plans)
    active = [(i, e) for i, row in enumerate(wanted) for e in row if e is not None]
    while active:
        for batch in _batches(active):
            chosen = iter(decode(_decode_step(plans, batch)).tolist())
            for i, explanation in batch:
                computed[i] += explanation.due
                explanation.add_token(list(islice(chosen, explanation.due))[-1], ends)
        active = [(i, e) for i, e in active if not e.ended]
    texts = [[None if e is None else answer_text(model, e.tokens) for e in row] for row in wanted]
    return texts, computed


def _batches(active: Sequence[_PlanExplanation]) -> Iterator[Sequence[_PlanExplanation]]:
    """Split into batches that fit the largest graph, which bounds the logits' memory."""
    batch: list[_PlanExplanation] = []
    rows = 0
    for each in active:
        if batch and rows + each[1].due > LARGEST:
            yield batch
            batch, rows = [], 0
        batch.append(each)
        rows += each[1].due
    if batch:
        yield batch


def _decode_step(plans: Sequence[WindowPlan], batch: Sequence[_PlanExplanation]) -> DecodeStep:
    """One row per token without KV, attending to the window, its question and the tokens in between."""
    ids: list[int] = []
    slots: list[IntArray] = []
    positions: list[Tensor] = []
    tables: list[IntArray] = []
    runs: list[list[Run]] = []
    for i, group in groupby(batch, key=itemgetter(0)):
        plan = plans[i]
        due = [(e.tail, *row) for _, e in group for row in e.next_rows()]
        starts = [tail.start for tail, _, _ in due]
        places = [tail.start + tail.tokens + offset for tail, offset, _ in due]
        pairs = list(zip(starts, places, strict=True))
        tables.append(plan.work.table)
        slots.append(plan.work.table[places])
        positions.append(plan.places.text([plan.places.next + place - start for start, place in pairs]))
        runs.append([Run(row, 1, plan.slots, start, place + 1) for row, (start, place) in enumerate(pairs, len(ids))])
        ids += [token for _, _, token in due]
    return DecodeStep(torch.tensor(ids), torch.cat(positions, 1), np.concatenate(slots), tables, runs)
