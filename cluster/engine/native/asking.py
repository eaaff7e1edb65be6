"""A free question on its way through the model: its prompt over window and memory, then one token of answer a step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.engine.native.attention import rotate
from cluster.engine.native.plan import SystemPrompt
from cluster.engine.native.recall import Local, RecallAttention, Timeline
from cluster.engine.native.stream import HeldFrame, Stream
from cluster.memory.recollection import Recollection
from cluster.memory.retrieve.base import Retriever
from cluster.memory.stream import StreamMemory
from cluster.models.base import FrameSpan, FrameTokens, VisionLanguageModel
from cluster.types import MICROSECONDS, AskResult, AskSpec, Moment, PatchGrid

# Seconds that the memory takes up before the window at most; what is older is squeezed into them.
SPAN_S = 40.0
_MOMENTS = 5


class Asking:
    """One question. ``step`` is called until it returns None; one thread makes all calls.

    Args:
        model: loaded, with the engine's attention installed.
        system: its prompt.
        stream: window of the camera that is asked about; None where it has none (its source ended).
        memory: what the camera remembers.
        retriever: which clusters a query needs.
        ask: the question.
        ends: tokens that end an answer.
        prefetch: see :class:`Recollection`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        system: SystemPrompt,
        stream: Stream | None,
        memory: StreamMemory,
        retriever: Retriever,
        ask: AskSpec,
        ends: frozenset[int],
        *,
        prefetch: bool = True,
    ) -> None:
        self._model, self._system, self._ask, self._ends = model, system, ask, ends
        self._memory, self._retriever, self._prefetch = memory, retriever, prefetch
        self._began = time.perf_counter()
        self._first_token_s = 0.0
        self._tokens: list[int] = []
        self._text = ""
        self._result: AskResult | None = None
        self._stream = stream
        held = stream.frames if stream is not None else []
        self._frames = [frame for frame in held if frame.has_kv and frame.tokens is not None]
        self._attention: RecallAttention | None = None
        self._recollection: Recollection | None = None
        self._position = 0
        self._prompt_ids = _conversation(model, ask)

    @property
    def result(self) -> AskResult:
        """How the answer came about; there once ``step`` has returned None."""
        if self._result is None:
            raise RuntimeError("the question is not answered yet")
        return self._result

    @property
    def recollection(self) -> Recollection:
        """What was read of the memory; there after the first step."""
        assert self._recollection is not None
        return self._recollection

    @property
    def logits(self) -> Tensor:
        """``[vocab]`` where the answer's first token is predicted; there after the first step."""
        return self._logits

    @torch.inference_mode()
    def step(self) -> str | None:
        """The next piece of the answer (perhaps empty: half a character), or None when it is complete."""
        if self._result is not None:
            return None
        token = self._prompt() if self._attention is None else self._next()
        if token in self._ends:
            return self._finish()
        self._tokens.append(token)
        whole = str(self._model.tokenizer.decode(self._tokens, skip_special_tokens=True))
        if whole.endswith("\ufffd") and len(self._tokens) < self._ask.max_new_tokens:
            return ""
        piece, self._text = whole[len(self._text) :], whole
        if len(self._tokens) >= self._ask.max_new_tokens:
            self._finish()
        return piece

    # -- passes -----------------------------------------------------------------------------------
    def _prompt(self) -> int:
        since = self._oldest_wanted()
        self._frames = [frame for frame in self._frames if self._memory.time_of(frame.pts) >= since]
        timeline, grid = self._timeline(since)
        local, following = self._local(timeline, grid)
        first_frame = 0 if self._ask.since_s is None else self._memory.frames_since(since)
        with Recollection(
            self._memory,
            self._retriever,
            first_frame=first_frame,
            prefetch=self._prefetch,
            device=self._model.device,
            dtype=self._model.dtype,
        ) as recollection:
            self._recollection = recollection
            self._attention = RecallAttention(
                self._model, local, recollection, first=len(self._system), timeline=timeline, grid=grid
            )
            self._position = following
            logits = self._pass(self._prompt_ids)
        self._logits = logits
        self._first_token_s = time.perf_counter() - self._began
        return int(logits.argmax())

    def _next(self) -> int:
        return int(self._pass(self._tokens[-1:]).argmax())

    def _pass(self, ids: Sequence[int]) -> Tensor:
        """Run rows through all layers; logits ``[vocab]`` after the last of them."""
        assert self._attention is not None
        self._attention.stand(self._position, len(ids))
        self._position += len(ids)
        hidden = self._model.embed(torch.tensor(ids, dtype=torch.int64)).unsqueeze(0)
        identity = (hidden.new_ones(1, 1, 1), hidden.new_zeros(1, 1, 1))
        for layer in self._model.layers:
            output = layer(hidden, attention_mask=None, position_embeddings=identity, ragged=self._attention)
            hidden = output[0] if isinstance(output, tuple) else output
        return self._model.logits(hidden[0, -1:])[0]

    # -- what is seen -----------------------------------------------------------------------------
    def _newest(self) -> int:
        known = [self._memory.time_of(frame.pts) for frame in self._frames[-1:]]
        if self._memory.newest is not None:
            known.append(self._memory.newest)
        return max(known, default=0)

    def _oldest_wanted(self) -> int:
        if self._ask.since_s is None:
            return -(2**62)
        return self._newest() - round(self._ask.since_s * MICROSECONDS)

    def _timeline(self, since: int) -> tuple[Timeline, PatchGrid]:
        geometry, memory = self._model.geometry, self._memory
        if self._frames:
            opened, grid = memory.time_of(self._frames[0].pts), self._frames[0].grid
            if memory.newest is not None:
                # Before the first frame of a clock that was set back has left the window.
                opened = max(opened, memory.newest + 1)
            frame_s = self._frames[0].duration / MICROSECONDS
        else:
            frame_s = geometry.temporal / 2.0
            opened = self._newest() + round(frame_s * MICROSECONDS)
            merge = geometry.merge
            grid = PatchGrid(memory.rows * merge, memory.columns * merge, geometry.patch, merge, geometry.temporal)
        oldest = max(since, memory.oldest if memory.oldest is not None else opened)
        return Timeline(opened / MICROSECONDS, min(opened, oldest) / MICROSECONDS, SPAN_S, frame_s), grid

    def _local(self, timeline: Timeline, grid: PatchGrid) -> tuple[Local, int]:
        """System prompt and window, rotated to where they stand behind the memory; position of the question."""
        model, system = self._model, len(self._system)
        tokens = [_tokens(frame) for frame in self._frames]
        opened = self._frames[0].pts if self._frames else 0
        before = timeline.length_s
        spans = [
            FrameSpan(
                before + (frame.pts - opened) / MICROSECONDS,
                round((before + (frame.pts - opened) / MICROSECONDS) / timeline.frame_s),
                held.cells,
                frame.grid,
            )
            for frame, held in zip(self._frames, tokens, strict=True)
        ]
        # Without a window, the place of the last remembered frame: the question stands behind that.
        last = max(0.0, before - timeline.frame_s)
        empty = FrameSpan(last, round(last / timeline.frame_s), torch.zeros(0, 2, dtype=torch.int64), grid)
        window = model.window_positions(system, spans or [empty])
        device = model.device
        positions = torch.cat(
            [torch.arange(system, device=device).expand(3, -1), *(part.to(device) for part in window.frames)], dim=1
        )
        cos, sin = (part.to(model.dtype) for part in model.rotary(positions))
        held_k, held_v = self._held(tokens)
        key = torch.cat([self._system.k, held_k], dim=2)
        frame = [torch.full((len(held),), -2 - number, device=device) for number, held in enumerate(tokens)]
        return (
            Local(
                rotate(key, cos, sin, torch.empty_like(key)),
                torch.cat([self._system.v, held_v], dim=2),
                torch.cat([torch.full((system,), -1, device=device), *frame]),
            ),
            window.next,
        )

    def _held(self, tokens: Sequence[FrameTokens]) -> tuple[Tensor, Tensor]:
        """Raw KV ``[L, Hkv, s, d]`` of the window's frames that are wanted: its last ones."""
        count = sum(map(len, tokens))
        if self._stream is None:
            return self._system.k[:, :, :0], self._system.v[:, :, :0]
        key, value = self._stream.kv.stretch()
        return key[:, :, key.shape[2] - count :], value[:, :, value.shape[2] - count :]

    # -- the end ----------------------------------------------------------------------------------
    def _finish(self) -> None:
        assert self._attention is not None and self._recollection is not None
        stats = self._recollection.stats
        newest, oldest = self._newest(), self._memory.oldest
        self._result = AskResult(
            stream=self._ask.stream,
            text=self._text.strip(),
            moments=self._moments(),
            oldest=newest if oldest is None else oldest,
            newest=newest,
            tokens_held=stats.held,
            tokens_read=stats.attended,
            bytes_read=stats.bytes,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._began,
            degraded=stats.out_of_reach > 0 or stats.gone > 0,
        )
        # Context of all layers: not needed any more, and as large as what was read.
        self._attention = None

    def _moments(self) -> tuple[Moment, ...]:
        """The stretches of neighbouring frames that the answer gave most to."""
        assert self._attention is not None
        window = [self._memory.time_of(frame.pts) for frame in self._frames]
        at = sorted(
            (self._memory.pts_of(number) if number >= 0 else window[-2 - number], mass)
            for number, mass in self._attention.mass.items()
        )
        total = sum(mass for _, mass in at) or 1.0
        frame_us = round(MICROSECONDS * (self._model.geometry.temporal / 2.0))
        return merged(at, total, frame_us)


def merged(masses: Sequence[tuple[int, float]], total: float, frame_us: int) -> tuple[Moment, ...]:
    """(time, mass) in time order -> the heaviest stretches. A frame above the mean begins one or goes on with it."""
    if not masses:
        return ()
    mean = total / len(masses)
    found: list[Moment] = []
    for pts, mass in masses:
        if mass < mean:
            continue
        last = found[-1] if found else None
        if last is not None and pts - last.end <= 2 * frame_us:
            found[-1] = Moment(last.start, pts + frame_us, last.weight + mass / total)
        else:
            found.append(Moment(pts, pts + frame_us, mass / total))
    return tuple(sorted(found, key=lambda moment: -moment.weight)[:_MOMENTS])


def _conversation(model: VisionLanguageModel, ask: AskSpec) -> list[int]:
    """Tokens of all turns and the question, from the end of the last frame on."""
    ids: list[int] = []
    for number, (text, answer) in enumerate(ask.turns):
        ids += model.ask_ids(text, follow_up=number > 0)
        ids += model.tokenizer.encode(answer, add_special_tokens=False)
    return ids + model.ask_ids(ask.text, follow_up=bool(ask.turns))


def _tokens(frame: HeldFrame) -> FrameTokens:
    assert frame.tokens is not None
    return frame.tokens
