"""From logits to an answer: a calibrated score for yes or no, and standing answers given again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cluster.models.base import VisionLanguageModel
from cluster.types import Answer, Question, Timing, TokenCount, WindowRequest


def answer_of(
    request: WindowRequest, question: Question, score: float, text: str | None, tokens: TokenCount, timing: Timing
) -> Answer:
    """A computed answer; ``text``: its explanation, ``None`` where none was asked for."""
    positive = score >= question.threshold
    return Answer(
        stream=request.stream,
        window=request.window,
        start=request.start,
        end=request.end,
        question=question.id,
        score=score,
        positive=positive,
        text=("yes" if positive else "no") if text is None else text,
        gated=False,
        tokens=tokens,
        timing=timing,
    )


def standing_again(answer: Answer, request: WindowRequest, tokens: TokenCount, timing: Timing) -> Answer:
    """An answer of an earlier window that still stands for this one."""
    return replace(
        answer,
        window=request.window,
        start=request.start,
        end=request.end,
        gated=True,
        tokens=tokens,
        timing=timing,
    )


class YesNoScore:
    """``P(yes) = sigmoid((logsumexp(yes ids) - logsumexp(no ids)) / temperature + bias)``.

    At temperature 1 and bias 0 it is the model's own probability of *yes*, given that it answers yes or no. Temperature
    and bias are fitted on labelled windows (Platt scaling).
    """

    def __init__(
        self, yes: Sequence[int], no: Sequence[int], *, temperature: float, bias: float, device: torch.device
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"the score's temperature must be positive, not {temperature}")
        self.yes = torch.tensor(list(yes), device=device)
        self.no = torch.tensor(list(no), device=device)
        self.temperature = temperature
        self.bias = bias

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits ``[n, vocab]`` -> scores ``[n]`` float32."""
        logits = logits.float()
        margin = logits[:, self.yes].logsumexp(dim=1) - logits[:, self.no].logsumexp(dim=1)
        return torch.sigmoid(margin / self.temperature + self.bias)


def end_tokens(model: VisionLanguageModel) -> frozenset[int]:
    """Ids that end an answer, from the tokenizer and the checkpoint's generation settings."""
    settings = getattr(model.model, "generation_config", None)
    found: set[int] = set()
    for source in (model.tokenizer, settings):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found |= set(ids if isinstance(ids, list) else [ids])
    return frozenset(found)
