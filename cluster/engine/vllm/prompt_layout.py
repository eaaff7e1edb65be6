"""Prompt layout: a window's tokens in time order."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.vllm.core import PromptRequest
from cluster.engine.vllm.prompt_items import WindowItem, check_items, content_digest, window_prompt
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.score import why_ids
from cluster.engine.window.stream import StreamFrame, encoded_tokens, frame_spans
from cluster.models.base import VisionLanguageModel
from cluster.types import Question


class TimeOrderLayout:
    """Builds prompts ``[system | frames in time order | question]``; vLLM's prefix cache shares all but the question
    among a window's prompts. Called only by the engine's thread."""

    def __init__(self, model: VisionLanguageModel, served: ServedModel, max_new_tokens: int) -> None:
        self.model = model
        self.served = served
        self.max_new_tokens = max_new_tokens
        self.system_ids = model.system_ids()
        self.why = why_ids(model)
        self.question_ids = lru_cache(maxsize=4096)(model.question_ids)
        self.embed_token = lru_cache(maxsize=64)(self._embed_token)

    def make_prompts(
        self, frames: Sequence[StreamFrame], questions: Sequence[Question], answers: Sequence[Sequence[int]] = ()
    ) -> list[PromptRequest]:
        """One request per question, in order, over a window's encoded frames in time order; with ``answers``, requests
        for their explanations. Raises ``ValueError``: embeddings do not match the positions or the model."""
        positions = self.model.window_positions(len(self.system_ids), frame_spans(frames))
        shown = [
            WindowItem.of(self.pad_embeds(encoded_tokens(frame).embeds), place.cpu().contiguous(), embeds_digest(frame))
            for frame, place in zip(frames, positions.frames, strict=True)
            if place.shape[1]
        ]
        requests = []
        for question, answer in zip_longest(questions, answers):
            ids = [*self.question_ids(question.text), *([] if answer is None else [*answer, *self.why])]
            # The first token is an item: it sets the question's position, and its embedding may belong to no token id.
            embeds, digest = self.embed_token(ids[0])
            at = positions.next
            items = [*shown, WindowItem.of(embeds, torch.full((3, 1), at), digest, after=at + 1)]
            check_items(items, self.served.width, self.model.dtype)
            prompt = window_prompt(self.system_ids, items, ids[1:])
            requests.append(PromptRequest(prompt, 1 if answer is None else self.max_new_tokens))
        return requests

    def pad_embeds(self, embeds: Tensor) -> Tensor:
        """Embeddings ``[n, W]`` on the CPU, with each part (base, DeepStack) padded to the served hidden size."""
        parts = 1 + self.model.deepstack
        more = (self.served.width - embeds.shape[1]) // parts
        return F.pad(embeds.reshape(len(embeds), parts, -1), (0, more)).flatten(1) if more else embeds

    def _embed_token(self, token: int) -> tuple[Tensor, str]:
        embeds = self.pad_embeds(self.model.embed(torch.tensor([token])).cpu())
        return embeds, content_digest(embeds)


def embeds_digest(frame: StreamFrame) -> str:
    """Digest of an encoded frame's embeddings, cached in the frame."""
    if not frame.content:
        frame.content = content_digest(encoded_tokens(frame).embeds)
    return frame.content
