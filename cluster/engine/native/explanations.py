"""Greedy decoding of explanations, all questions of all streams side by side."""

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
    """One question's answer in the making: its tokens so far, the first from the window's own pass."""

    tail: Tail
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def add(self, token: int, ends: frozenset[int]) -> None:
        self.ended = token in ends
        if not self.ended:
            self.tokens.append(token)
        self.ended |= len(self.tokens) >= self.tail.reserved


def explain(
    model: VisionLanguageModel,
    kernel: Kernel[Any],
    plans: Sequence[WindowPlan],
    firsts: Sequence[Sequence[int]],
    ends: frozenset[int],
) -> tuple[list[list[str | None]], list[int]]:
    """Continue each question that wants an explanation from its first token.

    ``firsts[i][j]``: the first token of question ``j`` of plan ``i``. Returns the texts (``None`` where none was asked
    for) and the tokens computed per plan. An explanation's KV lies in the slots kept after its question, which the next
    window overwrites.
    """
    wanted: list[list[Explanation | None]] = []
    for plan, tokens in zip(plans, firsts, strict=True):
        row: list[Explanation | None] = []
        for prompt, tail, token in zip(plan.prompts, plan.tails, tokens, strict=True):
            explanation = Explanation(tail) if prompt.question.explain else None
            if explanation is not None:
                explanation.add(token, ends)
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
                explanation.add(chosen.pop(0), ends)
    texts = [[None if e is None else _text(model, e.tokens) for e in row] for row in wanted]
    return texts, computed


def _next(model: VisionLanguageModel, plan: WindowPlan, going: Sequence[Explanation]) -> StreamPass:
    """One row per explanation: its newest token, which sees the window, its question and the tokens before it."""
    slots = [e.tail.start + e.tail.tokens + len(e.tokens) - 1 for e in going]
    runs = [
        Run(row, 1, plan.slots, e.tail.start, slot + 1) for row, (e, slot) in enumerate(zip(going, slots, strict=True))
    ]
    embeds: Tensor = model.embed(torch.tensor([e.tokens[-1] for e in going]))
    work = plan.work
    return StreamPass(
        kv=work.kv,
        base=work.base,
        slots=np.zeros(0, np.int64),
        tail_slots=np.array(slots, np.int64),
        tail_runs=tuple(runs),
        embeds=embeds,
        cos=work.cos,
        sin=work.sin,
    )


def _text(model: VisionLanguageModel, tokens: Sequence[int]) -> str:
    return str(model.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
