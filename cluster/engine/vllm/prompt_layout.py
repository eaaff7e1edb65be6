"""Prompt layout: a window's tokens in time order."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.vllm.core import PromptRequest
from cluster.engine.vllm.prompt_items import WindowItem, check_items, content_digest, window_prompt
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.stream import StreamFrame, encoded_tokens, frame_spans
from cluster.models.base import VisionLanguageModel


class TimeOrderLayout:
    """Builds prompts ``[system | frames in time order | question]``; vLLM's prefix cache shares all but the question
    among a window's prompts. Called only by the engine's thread."""

    def __init__(self, model: VisionLanguageModel, served: ServedModel) -> None:
        self.model = model
        self.served = served
        self.system_ids = model.system_ids()
        self.question_ids = lru_cache(maxsize=4096)(model.question_ids)
        self.embed_token = lru_cache(maxsize=64)(self._embed_token)

    def make_prompts(
        self, frames: Sequence[StreamFrame], asked: Sequence[Sequence[int]], max_tokens: int = 1
    ) -> list[PromptRequest]:
        """One request per list of token ids to put behind a window's encoded frames, which are in time order; each asks
        for at most ``max_tokens``. Raises ``ValueError``: embeddings do not match the positions or the model."""
        positions = self.model.window_positions(len(self.system_ids), frame_spans(frames))
        shown = [
            WindowItem.of(self.pad_embeds(encoded_tokens(frame).embeds), place.cpu().contiguous(), embeds_digest(frame))
            for frame, place in zip(frames, positions.frames, strict=True)
            if place.shape[1]
        ]
        at = positions.next
        requests = []
        for first, *rest in asked:
            # The first token is an item: it sets the question's position, and its embedding may belong to no token id.
            embeds, digest = self.embed_token(first)
            items = [*shown, WindowItem.of(embeds, torch.full((3, 1), at), digest, after=at + 1)]
            check_items(items, self.served.width, self.model.dtype)
            requests.append(PromptRequest(window_prompt(self.system_ids, items, rest), max_tokens))
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
