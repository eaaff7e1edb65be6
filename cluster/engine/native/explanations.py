"""Greedy decoding of explanations, batched over all questions of all streams."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.graphed_decode import DecodeStep, GraphedDecode
from cluster.engine.native.plan import WindowPlan
from cluster.engine.window.planner import IntArray, Run, Tail
from cluster.engine.window.score import answer_text
from cluster.models.base import VisionLanguageModel


@dataclass(slots=True)
class Explanation:
    """An explanation being decoded; its first token comes from the window's pass."""

    tail: Tail
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def add_token(self, token: int, ends: frozenset[int]) -> None:
        self.ended = token in ends
        if not self.ended:
            self.tokens.append(token)
        self.ended |= len(self.tokens) >= self.tail.reserved


def decode_explanations(
    model: VisionLanguageModel,
    decode: GraphedDecode,
    plans: Sequence[WindowPlan],
    firsts: Sequence[Sequence[int]],
    ends: frozenset[int],
) -> tuple[list[list[str | None]], list[int]]:
    """Decode an explanation for each question that wants one, from its first token.

    ``firsts[i][j]``: the first token of question ``j`` of plan ``i``. Returns the texts (``None`` where none was asked
    for) and the tokens computed per plan. An explanation's KV lies in the slots kept after its question, until
    the window is done.
    """
    wanted: list[list[Explanation | None]] = []
    for plan, tokens in zip(plans, firsts, strict=True):
        row: list[Explanation | None] = []
        for prompt, tail, token in zip(plan.prompts, plan.tails, tokens, strict=True):
            explanation = Explanation(tail) if prompt.question.explain else None
            if explanation is not None:
                explanation.add_token(token, ends)
            row.append(explanation)
        wanted.append(row)
    computed = [0] * len(plans)
    while True:
        active = [(i, [e for e in row if e is not None and not e.ended]) for i, row in enumerate(wanted)]
        active = [(i, going) for i, going in active if going]
        if not active:
            break
        chosen = decode(_next([(plans[i], going) for i, going in active])).tolist()
        for i, going in active:
            computed[i] += len(going)
            for explanation in going:
                explanation.add_token(chosen.pop(0), ends)
    texts = [[None if e is None else answer_text(model, e.tokens) for e in row] for row in wanted]
    return texts, computed


def _next(active: Sequence[tuple[WindowPlan, Sequence[Explanation]]]) -> DecodeStep:
    """One row per explanation: its newest token, which attends to the window, its question and its earlier tokens."""
    slots: list[IntArray] = []
    positions: list[Tensor] = []
    runs: list[list[Run]] = []
    row = 0
    for plan, going in active:
        starts = [e.tail.start for e in going]
        places = [e.tail.start + e.tail.tokens + len(e.tokens) - 1 for e in going]
        pairs = list(zip(starts, places, strict=True))
        slots.append(plan.work.table[places])
        positions.append(plan.places.text([plan.places.next + place - start for start, place in pairs]))
        runs.append([Run(i, 1, plan.slots, start, place + 1) for i, (start, place) in enumerate(pairs, row)])
        row += len(going)
    return DecodeStep(
        ids=torch.tensor([e.tokens[-1] for _, going in active for e in going]),
        positions=torch.cat(positions, 1),
        slots=np.concatenate(slots),
        tables=[plan.work.table for plan, _ in active],
        runs=runs,
    )
