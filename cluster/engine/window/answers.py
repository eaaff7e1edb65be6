"""Answers out of scores, and standing answers given again: the same in every engine."""

from __future__ import annotations

from dataclasses import replace

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
