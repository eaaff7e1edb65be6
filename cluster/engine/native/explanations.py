"""Greedy decoding of explanations, batched over all questions of all streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.forward import StreamPass, ragged_forward
from cluster.engine.native.kernels import Kernel
from cluster.engine.native.plan import WindowPlan
from cluster.engine.window.planner import Run, Tail
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
    kernel: Kernel[Any],
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
        results = ragged_forward(model, [_next(model, plans[i], going) for i, going in active], kernel)
        chosen = model.logits(torch.cat([result.hidden for result in results])).argmax(dim=1).tolist()
        for i, going in active:
            computed[i] += len(going)
            for explanation in going:
                explanation.add_token(chosen.pop(0), ends)
    texts = [[None if e is None else _text(model, e.tokens) for e in row] for row in wanted]
    return texts, computed


def _next(model: VisionLanguageModel, plan: WindowPlan, going: Sequence[Explanation]) -> StreamPass:
    """One row per explanation: its newest token, which attends to the window, its question and its earlier tokens."""
    slots = [e.tail.start + e.tail.tokens + len(e.tokens) - 1 for e in going]
    runs = [
        Run(row, 1, plan.slots, e.tail.start, slot + 1) for row, (e, slot) in enumerate(zip(going, slots, strict=True))
    ]
    embeds: Tensor = model.embed(torch.tensor([e.tokens[-1] for e in going]))
    at = [plan.places.next + slot - e.tail.start for e, slot in zip(going, slots, strict=True)]
    return StreamPass(
        pool=plan.work.pool,
        table=plan.work.table,
        slots=np.zeros(0, np.int64),
        tail_slots=np.array(slots, np.int64),
        tail_runs=tuple(runs),
        embeds=embeds,
        positions=plan.places.text(at),
    )


def _text(model: VisionLanguageModel, tokens: Sequence[int]) -> str:
    return str(model.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
