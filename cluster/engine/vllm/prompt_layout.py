"""Prompt layout: a window's tokens in time order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

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
    def of(cls, reused: int, refreshed: int, new: int, replies: Sequence[PromptReply]) -> Self:
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
        self.embed_token = lru_cache(maxsize=64)(self._embed_token)

    def make_prompts(self, window: PromptWindow) -> list[PromptRequest]:
        """One request per question, in order.

        Raises:
            ValueError: embeddings and positions do not fit each other, or the model.
        """
        frames = self._frame_items(window)
        requests = []
        for question, max_tokens in zip(window.questions, window.max_tokens, strict=True):
            ids = self.question_ids(question.text)
            # Its first token says where the question stands, and may have an embedding that no token id has.
            embeds, digest = self.embed_token(ids[0])
            at = window.positions.next
            items = [*frames, WindowItem.of(embeds, torch.full((3, 1), at), digest, after=at + 1)]
            check_items(items, self.served.width, self.model.dtype)
            prompt = window_prompt(self.system_ids, items, ids[1:], placeholder=0)
            requests.append(PromptRequest(prompt, len(ids), max_tokens))
        return requests

    def record_replies(self, window: PromptWindow, replies: Sequence[PromptReply]) -> WindowCounts:
        """Record the replies to all questions of a window. Tokens cached at the first one stem from an earlier
        window."""
        visual = window.visual
        found = min(reply.cached for reply in replies) - len(self.system_ids)
        reused = min(max(0, found), visual)
        return WindowCounts.of(reused, 0, visual - reused, replies)

    # -- prompts ----------------------------------------------------------------------------------
    def pad_embeds(self, embeds: Tensor) -> Tensor:
        """Embeddings ``[n, W]`` on the CPU, each of their parts padded to the served model's hidden size."""
        parts = 1 + self.model.deepstack
        more = (self.served.width - embeds.shape[1]) // parts
        embeds = embeds.cpu()
        return F.pad(embeds.reshape(len(embeds), parts, -1), (0, more)).flatten(1) if more else embeds

    def _embed_token(self, token: int) -> tuple[Tensor, str]:
        embeds = self.pad_embeds(self.model.embed(torch.tensor([token])))
        return embeds, content_digest(embeds)

    def _frame_items(self, window: PromptWindow) -> list[WindowItem]:
        """One item per frame with kept tokens, in time order."""
        return [
            WindowItem.of(
                self.pad_embeds(encoded_tokens(frame).embeds), positions.cpu().contiguous(), embeds_digest(frame)
            )
            for frame, positions in zip(window.frames, window.positions.frames, strict=True)
            if positions.shape[1]
        ]


def embeds_digest(frame: StreamFrame) -> str:
    """Digest of an encoded frame's embeddings, cached in the frame."""
    if not frame.content:
        frame.content = content_digest(encoded_tokens(frame).embeds.cpu())
    return frame.content


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
