"""Plan of one window: layout, refreshed tokens, and input of the pass."""

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
    question_tails,
)
from cluster.engine.window.refresh.context import choose_refreshed
from cluster.engine.window.stream import Stream, StreamFrame, encoded_tokens, frame_spans
from cluster.models.base import FrameTokens, VisionLanguageModel
from cluster.types import Question, WindowRequest


@torch.inference_mode()
def system_prompt(model: VisionLanguageModel, kernel: Kernel[Any]) -> SystemPrompt:
    """Compute a model's system prompt KV; requires the engine's attention."""
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


# Question rows recorded for compressors; SnapKV uses the last 32.
WATCHED_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class SystemPrompt:
    """System prompt before the first frame; ``k, v [L, Hkv, s, d]``, raw keys, computed once per model."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return int(self.k.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenised question; ``reserved`` slots for its explanation; ``embeds [tokens, D]``."""

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
    """Plan a window of encoded ``frames``; older frames leave the stream and its KV.

    ``watch``: record the raw queries of every question's last rows.
    """
    stream.drop_frames(stream.frames.index(frames[0]))
    tokens = [encoded_tokens(frame) for frame in frames]
    visual = sum(map(len, tokens))
    cached = sum(len(held) for held, frame in zip(tokens, frames, strict=True) if frame.has_kv)
    tails = question_tails(len(system) + visual, [len(p) for p in prompts], [p.reserved for p in prompts])
    slots = tails[-1].stop

    policy, selection = choose_refreshed(stream, request.window, frames, len(system), len(model.layers))
    computed = np.ones(visual, dtype=bool)
    computed[:cached] = selection.mask
    rows = np.flatnonzero(computed)

    stream.kv.reserve(len(system), slots - len(system))
    stream.kv.prepend(system.k, system.v)
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


def commit_plan(plan: WindowPlan, result: PassResult) -> None:
    """Record the KV and its context after the pass."""
    through = np.zeros(plan.visual, dtype=bool)
    through[result.slots - plan.system] = True
    plan.stream.record_computed(plan.request.window, plan.frames, through)


def watched_rows(lengths: Sequence[int]) -> IntArray:
    """The last rows of each question, at most ``WATCHED_ROWS`` together.

    With more questions than that, the last row of evenly spread ones.
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
    window = model.window_positions(system, frame_spans(frames))
    device = model.device
    parts = [torch.arange(system, device=device).expand(3, -1), *(part.to(device) for part in window.frames)]
    parts += [
        torch.arange(window.next, window.next + tail.stop - tail.start, device=device).expand(3, -1) for tail in tails
    ]
    return torch.cat(parts, dim=1), window.next
