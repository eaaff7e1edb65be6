"""Prompt layout: a window's tokens in time order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.vllm.core import PromptReply, PromptRequest
from cluster.engine.vllm.prompt_items import WindowItem, check_items, content_digest, window_prompt
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.stream import Stream, StreamFrame, encoded_tokens
from cluster.models.base import VisionLanguageModel, WindowPositions
from cluster.types import Question, WindowRequest


@dataclass(frozen=True, slots=True, eq=False)
class PromptWindow:
    """A window to be answered, its frames encoded.

    * ``frames`` in time order; ``positions.frames[i]`` ``[3, t_i]``: of the i-th frame's tokens
    * ``max_tokens``: per question, of its answer
    """

    stream: Stream
    request: WindowRequest
    frames: Sequence[StreamFrame]
    positions: WindowPositions
    questions: Sequence[Question]
    max_tokens: Sequence[int]

    @property
    def visual(self) -> int:
        """Tokens of all frames."""
        return sum(len(encoded_tokens(frame)) for frame in self.frames)


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Visual tokens of one window by the origin of their KV; ``rows`` computed by vLLM for all questions, and the
    row-slot pairs they ``attended``."""

    reused: int
    refreshed: int
    new: int
    rows: int
    attended: int

    @classmethod
    def of(cls, reused: int, refreshed: int, new: int, replies: Sequence[PromptReply]) -> WindowCounts:
        """Derive rows and pairs from the replies: uncached tokens, each attending to itself and its predecessors."""
        rows = sum(reply.prompt - reply.cached for reply in replies)
        pairs = sum(_triangle(reply.prompt) - _triangle(reply.cached) for reply in replies)
        return cls(reused, refreshed, new, rows, pairs)


class TimeOrderLayout:
    """Prompts ``[system | frames in time order | question]``, shared among a window's questions by vLLM's prefix cache.
    Called by the engine's thread only."""

    def __init__(self, model: VisionLanguageModel, served: ServedModel) -> None:
        self.model = model
        self.served = served
        self.system_ids = model.system_ids()
        self.question_ids = lru_cache(maxsize=4096)(model.question_ids)

    def make_prompts(self, window: PromptWindow) -> list[PromptRequest]:
        """One request per question, in order.

        Raises:
            ValueError: embeddings and positions do not fit each other, or the model.
        """
        items = self._items(window)
        return [
            PromptRequest(self.prompt(window, items, question), len(self.question_ids(question.text)), max_tokens)
            for question, max_tokens in zip(window.questions, window.max_tokens, strict=True)
        ]

    def record_replies(self, window: PromptWindow, replies: Sequence[PromptReply]) -> WindowCounts:
        """Record the replies to all questions of a window. Tokens cached at the first one stem from an earlier
        window."""
        visual = window.visual
        found = min(reply.cached for reply in replies) - len(self.system_ids)
        reused = min(max(0, found), visual)
        return WindowCounts.of(reused, 0, visual - reused, replies)

    # -- prompts ----------------------------------------------------------------------------------
    def prompt(self, window: PromptWindow, items: Sequence[WindowItem], question: Question) -> Any:
        """Render ``[system | items | question]``, checked."""
        ids = self.question_ids(question.text)
        if not items:
            # Nothing is seen at all: the question's first token is given by its embedding, so that it has its place.
            embeds, at = self.pad_embeds(self.model.embed(torch.tensor(ids[:1]))), window.positions.next
            items = [WindowItem.of(embeds, torch.full((3, 1), at), content_digest(embeds), after=at + 1)]
            ids = ids[1:]
        check_items(items, self.served.hidden, self.model.dtype)
        return window_prompt(self.system_ids, items, ids, placeholder=0)

    def pad_embeds(self, embeds: Tensor) -> Tensor:
        """Embeddings on the CPU, padded to the served model's width."""
        more = self.served.hidden - embeds.shape[1]
        return F.pad(embeds.cpu(), (0, more)) if more else embeds.cpu()

    def _items(self, window: PromptWindow) -> list[WindowItem]:
        """One item per frame with kept tokens, in time order; the last one gives the question's position."""
        shown = [
            (frame, positions)
            for frame, positions in zip(window.frames, window.positions.frames, strict=True)
            if positions.shape[1]
        ]
        items = []
        for number, (frame, positions) in enumerate(shown):
            embeds = self.pad_embeds(encoded_tokens(frame).embeds)
            after = window.positions.next if number == len(shown) - 1 else None
            items.append(WindowItem.of(embeds, positions.cpu().contiguous(), embeds_digest(frame), after=after))
        return items


def embeds_digest(frame: StreamFrame) -> str:
    """Digest of an encoded frame's embeddings, cached in the frame."""
    if not frame.content:
        frame.content = content_digest(encoded_tokens(frame).embeds.cpu())
    return frame.content


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
