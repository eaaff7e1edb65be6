"""How a window's tokens are put into prompts: in time order, or in another that a KV connector can serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.vllm.connector.tier_writer import TierWriter
from cluster.engine.vllm.core import Ask, Reply
from cluster.engine.vllm.prompt_items import WindowItem, check_items, content_digest, window_prompt
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.stream import Stream, StreamFrame, tokens_of
from cluster.models.base import VisionLanguageModel, WindowPositions
from cluster.types import Question, WindowRequest


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One window to be answered, its frames encoded.

    * ``frames`` in time order; ``positions.frames[i]`` ``[3, t_i]`` are where the i-th frame's tokens stand
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
        return sum(len(tokens_of(frame)) for frame in self.frames)


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Visual tokens of one window by where their KV came from, and the ``rows`` that vLLM computed for all its
    questions, which ``attended`` to so many places together."""

    reused: int
    refreshed: int
    new: int
    rows: int
    attended: int

    @classmethod
    def of(cls, reused: int, refreshed: int, new: int, replies: Sequence[Reply]) -> WindowCounts:
        """With rows as the replies tell: all that were not cached, each seeing itself and what stands before it."""
        rows = sum(reply.prompt - reply.cached for reply in replies)
        pairs = sum(_triangle(reply.prompt) - _triangle(reply.cached) for reply in replies)
        return cls(reused, refreshed, new, rows, pairs)


class TimeOrderLayout:
    """Makes prompts of windows, ``[system | frames in time order | question]``: vLLM's prefix cache shares it among a
    window's questions. Called by the engine's thread only.

    ``writer`` brings what outlives this process to the tiers; None where nothing does.
    """

    def __init__(self, model: VisionLanguageModel, served: ServedModel, writer: TierWriter | None = None) -> None:
        self.model = model
        self.served = served
        self.writer = writer
        self.system_ids = model.system_ids()
        self.question_ids = lru_cache(maxsize=4096)(model.question_ids)

    def asks(self, window: Window) -> list[Ask]:
        """One per question, in the order of the questions.

        Raises:
            ValueError: embeddings and positions do not fit each other, or the model.
        """
        items = self._items(window)
        return [
            Ask(self.prompt(window, items, question), len(self.question_ids(question.text)), max_tokens)
            for question, max_tokens in zip(window.questions, window.max_tokens, strict=True)
        ]

    def again(self, window: Window) -> list[Ask]:
        """A question of the window ended without an answer: all of them once more, without what failed."""
        return self.asks(window)

    def done(self, window: Window, replies: Sequence[Reply]) -> WindowCounts:
        """All questions of the window were answered. What the first one found cached was there from an earlier one."""
        visual = window.visual
        found = min(reply.cached for reply in replies) - len(self.system_ids)
        reused = min(max(0, found), visual)
        return WindowCounts.of(reused, 0, visual - reused, replies)

    def forget(self, stream: str, *, everywhere: bool = False) -> None:
        """The stream is gone from here; ``everywhere``: from wherever something of it outlives this process too."""
        if self.writer is not None and everywhere:
            self.writer.forget(stream)
        elif self.writer is not None:
            self.writer.release(stream)

    def held(self, stream: str) -> Mapping[str, Any]:  # noqa: ARG002
        """What it takes to find again what was kept of a stream's KV, as JSON takes it; nothing where none is."""
        return {}

    def lost(self) -> None:
        """The engine core died, and with it all that it held."""

    def close(self) -> None:
        """The engine ends."""
        if self.writer is not None:
            self.writer.close()

    # -- prompts ----------------------------------------------------------------------------------
    def prompt(self, window: Window, items: Sequence[WindowItem], question: Question, **options: Any) -> Any:
        """``[system | items | question]``, checked; options as of :func:`window_prompt`."""
        ids = self.question_ids(question.text)
        if not items:
            # Nothing is seen at all: the question's first token is given by its embedding, so that it has its place.
            embeds, at = self.embeds(self.model.embed(torch.tensor(ids[:1]))), window.positions.next
            items = [WindowItem.of(embeds, torch.full((3, 1), at), content_digest(embeds), after=at + 1)]
            ids = ids[1:]
        check_items(items, self.served.hidden, self.model.dtype)
        return window_prompt(self.system_ids, items, ids, placeholder=0, **options)

    def embeds(self, embeds: Tensor) -> Tensor:
        """As vLLM takes them: on the CPU, and as wide as the model it serves."""
        more = self.served.hidden - embeds.shape[1]
        return F.pad(embeds.cpu(), (0, more)) if more else embeds.cpu()

    def _items(self, window: Window) -> list[WindowItem]:
        """One per frame that keeps anything, in time order; the last one says where the question stands."""
        shown = [
            (frame, positions)
            for frame, positions in zip(window.frames, window.positions.frames, strict=True)
            if positions.shape[1]
        ]
        items = []
        for number, (frame, positions) in enumerate(shown):
            embeds = self.embeds(tokens_of(frame).embeds)
            after = window.positions.next if number == len(shown) - 1 else None
            items.append(WindowItem.of(embeds, positions.cpu().contiguous(), content_of(frame), after=after))
        return items


def content_of(frame: StreamFrame) -> str:
    """Key of an encoded frame's embeddings, computed once."""
    if not frame.content:
        frame.content = content_digest(tokens_of(frame).embeds.cpu())
    return frame.content


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
