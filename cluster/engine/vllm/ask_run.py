"""Free questions about a camera's window: a few answer tokens per step."""

import time
from dataclasses import dataclass

import torch

from cluster.engine.vllm.core import PromptReply, VllmCore
from cluster.engine.vllm.prompt_layout import TimeOrderLayout
from cluster.engine.window.free_question import StreamedText, prompt_ids, wanted_times
from cluster.engine.window.score import YesNoScore, check_scores
from cluster.engine.window.stream import Stream, StreamFrame
from cluster.errors import ConfigError, NotReadyError
from cluster.types import AskResult, AskSpec, Moment

STEP_TOKENS = 8
"""Answer tokens per step. Windows run between steps; vLLM's prefix cache holds what the previous step computed."""


@dataclass(eq=False)
class VllmAskRun:
    """See :class:`~cluster.engine.base.AskRun`. The answer rests on the window's encoded frames alone.

    * ``window``: stream of the camera
    * ``watched``: token ids whose log-probabilities replies include, in the order that ``score`` knows
    * ``score``: decides a first token between yes and no
    """

    core: VllmCore
    layout: TimeOrderLayout
    window: Stream
    ask: AskSpec
    watched: list[int]
    score: YesNoScore

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._first_token_s = self._yes = 0.0
        self._ids = prompt_ids(self.layout.model, self.ask)
        self._answer = StreamedText(self.layout.model)
        self._frames: list[StreamFrame] = []
        self._result: AskResult | None = None

    @property
    def result(self) -> AskResult:
        if self._result is None:
            raise RuntimeError("the question has not been answered yet")
        return self._result

    def step(self) -> str | None:
        """Raises ``UnavailableError`` as :meth:`VllmCore.answer` does, ``NotReadyError``: no frame of the requested
        time is in the window, ``ConfigError``: window and conversation are too long for vLLM."""
        if self._result is not None:
            return None
        first = not self._frames
        if first:
            # Windows may have passed since the question arrived.
            self._frames = self._wanted_frames()
        room = self.ask.max_new_tokens - len(self._answer.tokens)
        wanted = 1 if first else min(STEP_TOKENS, room)
        (request,) = self.layout.make_prompts(self._frames, [[*self._ids, *self._answer.tokens]], wanted)
        total = len(request.prompt["prompt_token_ids"]) + room
        if total > self.core.max_tokens:
            raise ConfigError(
                f"window, conversation and answer may have {total} tokens, but vLLM takes at most "
                f"{self.core.max_tokens}; begin a new conversation, or ask about less with --since"
            )
        (reply,) = self.core.answer([request])
        tokens = self._first_token(reply) if first else reply.tokens
        if self.ask.standing:
            self._finish()
            return None
        last = len(reply.tokens) < wanted or len(tokens) == room
        piece = self._answer.add_tokens(tokens, last=last)
        if last:
            self._finish()
        return piece

    def _wanted_frames(self) -> list[StreamFrame]:
        frames = [frame for frame in self.window.frames if frame.tokens is not None]
        since, until = wanted_times(self.ask, max((frame.memory_time for frame in frames), default=0))
        frames = [frame for frame in frames if since <= frame.memory_time < until]
        if not frames:
            raise NotReadyError(f"the window of camera {self.ask.stream!r} holds nothing of that time")
        return frames

    def _first_token(self, reply: PromptReply) -> list[int]:
        logits = torch.tensor(reply.scores)
        self._yes = float(self.score(logits[None])[0])
        check_scores([self._yes], self.layout.model.dtype)
        self._first_token_s = time.perf_counter() - self._began
        if not reply.tokens or reply.tokens[0] not in self.watched:
            return reply.tokens
        # The likeliest of all tokens is a watched one.
        return [self.watched[self.score.decide(logits, self._yes)]]

    def _finish(self) -> None:
        oldest, newest = self._frames[0].memory_time, self._frames[-1].memory_time
        self._result = AskResult(
            stream=self.ask.stream,
            text=self._answer.text.strip(),
            moments=(Moment(oldest, newest + self._frames[-1].duration, 1.0),),
            oldest=oldest,
            newest=newest,
            tokens_held=0,
            tokens_read=0,
            bytes_read=0,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._began,
            prompt_tokens=len(self._ids),
            answer_tokens=len(self._answer.tokens),
            yes=self._yes,
        )
