"""One window of one stream, ready to be computed: frames, layout, what to refresh, and what goes into the pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.forward import PassResult, StreamPass, ragged_forward
from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.planner import (
    BoolArray,
    IntArray,
    Tail,
    prefix_order,
    question_runs,
    tails_of,
)
from cluster.engine.window.refresh.context import choose_refreshed
from cluster.engine.window.stream import Stream, StreamFrame, spans_of, tokens_of
from cluster.models.base import FrameTokens, VisionLanguageModel
from cluster.types import Question, WindowRequest


@torch.inference_mode()
def system_prompt(model: VisionLanguageModel, kernel: Kernel[Any]) -> SystemPrompt:
    """Run a model's system prompt; the engine's attention must be installed."""
    ids = torch.tensor(model.system_ids(), dtype=torch.int64)
    count = len(ids)
    kv = KVSlab.of(model)
    kv.reserve(0, count)
    cos, sin = model.rotary(torch.arange(count, device=model.device).expand(3, -1))
    work = StreamPass(
        kv=kv,
        base=0,
        slots=np.arange(count),
        tail_slots=np.zeros(0, np.int64),
        tail_runs=(),
        embeds=model.embed(ids),
        cos=cos.to(model.dtype),
        sin=sin.to(model.dtype),
    )
    ragged_forward(model, [work], kernel)
    return SystemPrompt(kv.k[:, :, :count].clone(), kv.v[:, :, :count].clone())


# Rows whose queries a memory is shown; SnapKV looks at the last 32.
WATCHED_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class SystemPrompt:
    """The prompt before the first frame; ``k, v [L, Hkv, s, d]``, raw keys, computed once per model."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return int(self.k.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One question as tokens; ``reserved`` slots for the tokens of its explanation; ``embeds [tokens, D]``."""

    question: Question
    embeds: Tensor
    reserved: int

    def __len__(self) -> int:
        return int(self.embeds.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """A window to compute.

    * ``visual``: visual tokens, of which the first ``cached`` have KV; ``computed [visual]``: those to compute
    * ``next``: position of a question's first token
    """

    stream: Stream
    request: WindowRequest
    frames: Sequence[StreamFrame]
    prompts: Sequence[Prompt]
    tails: Sequence[Tail]
    system: int
    visual: int
    cached: int
    computed: BoolArray
    next: int
    work: StreamPass

    @property
    def slots(self) -> int:
        """Slots of the system prompt and the frames."""
        return self.system + self.visual

    @property
    def new(self) -> int:
        return self.visual - self.cached

    @property
    def query(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def plan_window(
    model: VisionLanguageModel,
    system: SystemPrompt,
    stream: Stream,
    request: WindowRequest,
    frames: Sequence[StreamFrame],
    prompts: Sequence[Prompt],
    *,
    watch: bool = False,
) -> WindowPlan:
    """Lay out a window whose ``frames`` are all encoded; older frames leave the stream and its KV.

    ``watch``: the raw queries of the last rows of every question are wanted.
    """
    stream.drop(stream.frames.index(frames[0]))
    tokens = [tokens_of(frame) for frame in frames]
    visual = sum(map(len, tokens))
    cached = sum(len(held) for held, frame in zip(tokens, frames, strict=True) if frame.has_kv)
    tails = tails_of(len(system) + visual, [len(p) for p in prompts], [p.reserved for p in prompts])
    slots = tails[-1].stop

    policy, selection = choose_refreshed(stream, request.window, frames, len(system), len(model.layers))
    computed = np.ones(visual, dtype=bool)
    computed[:cached] = selection.mask
    rows = np.flatnonzero(computed)

    stream.kv.reserve(len(system), slots - len(system))
    stream.kv.put_front(system.k, system.v)
    positions, following = _positions(model, len(system), frames, tails)
    cos, sin = model.rotary(positions)
    work = StreamPass(
        kv=stream.kv,
        base=stream.kv.start - len(system),
        slots=rows + len(system),
        tail_slots=np.concatenate([np.arange(tail.start, tail.start + tail.tokens) for tail in tails]),
        tail_runs=tuple(question_runs(len(system) + visual, tails)),
        embeds=torch.cat([*_rows(tokens, computed), *(prompt.embeds for prompt in prompts)]),
        cos=cos.to(model.dtype),
        sin=sin.to(model.dtype),
        narrowing=selection.narrowing,
        narrowable=np.arange(int(np.count_nonzero(selection.mask))),
        watched=watched_rows([len(prompt) for prompt in prompts]) if watch else np.zeros(0, np.int64),
        # With nothing refreshed, the reused tokens are first as they lie.
        order=prefix_order(len(system), computed, slots) if policy.reused_first and selection.mask.any() else None,
    )
    return WindowPlan(stream, request, frames, prompts, tails, len(system), visual, cached, computed, following, work)


def commit(plan: WindowPlan, result: PassResult) -> None:
    """After the pass: the window's frames have KV, and each token knows under which context."""
    through = np.zeros(plan.visual, dtype=bool)
    through[result.slots - plan.system] = True
    plan.stream.commit(plan.request.window, plan.frames, through)


def watched_rows(lengths: Sequence[int]) -> IntArray:
    """Of questions of these lengths, one after the other, the last rows of each: ``WATCHED_ROWS`` at most together.

    Of more questions than that, the last row of some that are spread evenly.
    """
    share = max(1, WATCHED_ROWS // len(lengths))
    ends = np.cumsum(lengths)
    rows = np.concatenate([np.arange(end - min(share, n), end) for end, n in zip(ends, lengths, strict=True)])
    return rows if len(rows) <= WATCHED_ROWS else rows[np.arange(WATCHED_ROWS) * len(rows) // WATCHED_ROWS]


def _rows(tokens: Sequence[FrameTokens], computed: BoolArray) -> list[Tensor]:
    """Embeddings of the tokens to compute, frame by frame."""
    rows: list[Tensor] = []
    start = 0
    for held in tokens:
        wanted = computed[start : start + len(held)]
        start += len(held)
        if wanted.all():
            rows.append(held.embeds)
        elif wanted.any():
            rows.append(held.embeds[torch.from_numpy(np.flatnonzero(wanted)).to(held.embeds.device)])
    return rows


def _positions(
    model: VisionLanguageModel, system: int, frames: Sequence[StreamFrame], tails: Sequence[Tail]
) -> tuple[Tensor, int]:
    """Positions ``[3, slots]`` of all slots, and that of a question's first token."""
    window = model.window_positions(system, spans_of(frames))
    device = model.device
    parts = [torch.arange(system, device=device).expand(3, -1), *(part.to(device) for part in window.frames)]
    parts += [
        torch.arange(window.next, window.next + tail.stop - tail.start, device=device).expand(3, -1) for tail in tails
    ]
    return torch.cat(parts, dim=1), window.next
