"""Free questions: prefill over window and memory, then one answer token per step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.device import lost_device
from cluster.engine.native.memory_attention import MemoryAttention
from cluster.engine.native.plan import SystemPrompt
from cluster.engine.window.free_question import StreamedText, prompt_ids, wanted_times
from cluster.engine.window.score import YesNoScore, check_scores
from cluster.engine.window.stream import Stream, StreamFrame, encoded_tokens
from cluster.errors import NotReadyError
from cluster.memory.retrieval_session import RetrievalSession
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, AskResult, AskSpec, Moment

_MOMENTS = 5


@dataclass(eq=False)
class NativeAskRun:
    """One free question. Call ``step`` until it returns None; all calls from one thread.

    * ``model``: loaded, with the engine's attention installed; ``system``: its system prompt
    * ``window``: stream of the camera; ``None`` if it has none (its source ended)
    * ``memory``: the camera's memory; ``retriever``: selects the clusters a query reads
    * ``ends``: tokens that end an answer
    * ``prefetch``: see :class:`RetrievalSession`
    * ``score``: decides a first token between yes and no; ``None``: greedy, and ``yes`` is 0
    * ``answer``: tokens and text so far
    * ``logits`` ``[vocab]``: of the answer's first token; ``retrieval``: its session; both set by the first step
    """

    model: VisionLanguageModel
    system: SystemPrompt
    window: Stream | None
    memory: StreamMemory
    retriever: Retriever
    ask: AskSpec
    ends: frozenset[int]
    prefetch: bool | None = None
    score: YesNoScore | None = None

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._first_token_s = self._yes = 0.0
        self.answer = StreamedText(self.model)
        self._result: AskResult | None = None
        self._frames: list[StreamFrame] = []
        self._attention: MemoryAttention | None = None
        # Without a window to take it from: two samples a second.
        self._frame_us = round(MICROSECONDS * self.model.geometry.temporal / 2.0)
        self._moments_found: tuple[Moment, ...] = ()
        self._span = (0, 0)
        self._prompt_ids = prompt_ids(self.model, self.ask)

    @property
    def result(self) -> AskResult:
        """The answer and its statistics, available once ``step`` has returned None."""
        if self._result is None:
            raise RuntimeError("the question has not been answered yet")
        return self._result

    @lost_device()
    @torch.inference_mode()
    def step(self) -> str | None:
        """The next piece of the answer (empty while a character is incomplete), or None at its end."""
        if self._result is not None:
            return None
        token = self._prompt() if self._attention is None else int(self._pass(self.answer.tokens[-1:]).argmax())
        if self.ask.standing or token in self.ends:
            self._finish()
            return None
        last = len(self.answer.tokens) + 1 >= self.ask.max_new_tokens
        piece = self.answer.add_tokens([token], last=last)
        if last:
            self._finish()
        return piece

    # -- passes -----------------------------------------------------------------------------------
    def _prompt(self) -> int:
        # Current frames: windows may have passed since the question arrived.
        current = self.window.frames if self.window is not None else []
        self._frames = [frame for frame in current if frame.has_kv and frame.tokens is not None]
        since, until = wanted_times(self.ask, self._newest())
        if current:
            self._frame_us = current[0].duration
        newer = [frame for frame in self._frames if frame.memory_time >= until]
        self._frames = [frame for frame in self._frames if since <= frame.memory_time < until]
        kv = self.window.kv if self.window is not None else None
        everything = self.ask.since_s is None and self.ask.span is None
        self.retrieval = RetrievalSession(
            self.memory,
            self.retriever,
            first_frame=0 if everything else self.memory.frames_since(since),
            last_frame=None if self.ask.span is None else self.memory.frames_since(until) - 1,
            prefetch=self.prefetch,
            device=self.model.device,
            dtype=self.model.dtype,
        )
        with self.retrieval as retrieval:
            held = retrieval.view.log.copy()
            held.delete_before(retrieval.first_frame)
            if retrieval.last_frame is not None:
                held.delete_after(retrieval.last_frame)
            if self.ask.span is not None and not self._frames and not held.numbers:
                raise NotReadyError(f"camera {self.ask.stream!r} remembers nothing of that time")
            self._attention = MemoryAttention(
                self.model,
                self.system,
                retrieval,
                self._frames,
                kv,
                held=held,
                text=len(self._prompt_ids) + self.ask.max_new_tokens,
                frame_us=self._frame_us,
                newer=sum(len(encoded_tokens(frame)) for frame in newer),
            )
            logits = self._pass(self._prompt_ids)
            # Now, because the memory changes while the answer is decoded.
            self._moments_found = self._moments()
            newest, oldest = self._newest(), self.memory.oldest
            first = self._frames[0].memory_time if self._frames else newest
            self._span = first if oldest is None else oldest, newest
        self.logits = logits
        if self.score is None:
            token = int(logits.argmax())
        else:
            self._yes = float(self.score(logits[None])[0])
            check_scores([self._yes], logits.dtype)
            token = self.score.decide(logits, self._yes)
        self._first_token_s = time.perf_counter() - self._began
        return token

    def _pass(self, ids: Sequence[int]) -> Tensor:
        """Run tokens through all layers; returns the logits ``[vocab]`` after the last token."""
        assert self._attention is not None
        hidden = self._attention.run(self.model.embed(torch.tensor(ids, dtype=torch.int64)))
        return self.model.logits(hidden[-1:])[0]

    # -- time range -------------------------------------------------------------------------------
    def _newest(self) -> int:
        known = [frame.memory_time for frame in self._frames[-1:]]
        if self.memory.newest is not None:
            known.append(self.memory.newest)
        return max(known, default=0)

    # -- result -----------------------------------------------------------------------------------
    def _finish(self) -> None:
        stats = self.retrieval.stats
        oldest, newest = self._span
        self._result = AskResult(
            stream=self.ask.stream,
            text=self.answer.text.strip(),
            moments=self._moments_found,
            oldest=oldest,
            newest=newest,
            tokens_held=stats.held_tokens,
            tokens_read=stats.fetched_tokens,
            bytes_read=stats.bytes,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._began,
            degraded=stats.unavailable > 0 or stats.lost > 0,
            prompt_tokens=len(self._prompt_ids),
            answer_tokens=len(self.answer.tokens),
            yes=self._yes,
        )
        # Frees the context of all layers.
        self._attention = None

    def _moments(self) -> tuple[Moment, ...]:
        """Time spans with the largest share of attention."""
        assert self._attention is not None
        number, mass = self._attention.attention_mass()
        remembered = number >= 0
        time = torch.empty_like(number)
        if bool(remembered.any()):
            time[remembered] = self.retrieval.view.log.frame_times(number[remembered])
        window = torch.tensor([frame.memory_time for frame in self._frames], dtype=torch.int64)
        time[~remembered] = window[-2 - number[~remembered]]
        return merge_moments(time, mass, self._frame_us)


def merge_moments(time: Tensor, mass: Tensor, frame_us: int) -> tuple[Moment, ...]:
    """Merge frames at ``time [n]`` int64 with attention ``mass [n]`` into the heaviest time spans. Only frames with at
    least the mean mass start or extend a span."""
    total = float(mass.sum()) or 1.0
    heavy = mass * len(mass) >= total
    if not bool(heavy.any()):
        return ()
    order = time[heavy].argsort(stable=True)
    pts, share = time[heavy][order], (mass[heavy][order] / total).double()
    # A span starts where the previous frame ended more than two frame lengths before.
    begins = F.pad(pts.diff() > 3 * frame_us, (1, 0), value=True)
    weight = share.new_zeros(int(begins.sum())).index_add_(0, begins.cumsum(0) - 1, share)
    starts, ends = pts[begins], pts[F.pad(begins[1:], (0, 1), value=True)] + frame_us
    first = weight.argsort(descending=True, stable=True)[:_MOMENTS]
    return tuple(map(Moment, *(part[first].tolist() for part in (starts, ends, weight))))
