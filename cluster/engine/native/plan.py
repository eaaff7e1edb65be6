"""Plan of one window: layout, tokens to refresh, and the input of its pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.forward import PassResult, StreamPass, ragged_forward
from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool, StreamKV, rotate_wide
from cluster.engine.window.planner import BoolArray, IntArray, Tail, question_runs, question_tails
from cluster.engine.window.refresh.base import Selection, choose_refreshed
from cluster.engine.window.stream import (
    INVALID,
    Stream,
    StreamFrame,
    WindowProgress,
    embeddings,
    encoded_tokens,
    per_frame,
    token_counts,
)
from cluster.models.base import VisionLanguageModel
from cluster.models.upload import to_device
from cluster.types import Question, WindowRequest

_NONE = np.zeros(0, np.int64)
# Maximum question rows whose queries are recorded for compressors; SnapKV uses the last 32.
WATCHED_ROWS = 64


@torch.inference_mode()
def system_prompt(model: VisionLanguageModel, pool: KVPool, kernel: Kernel[Any]) -> SystemPrompt:
    """Compute the KV of a model's system prompt."""
    ids = torch.tensor(model.system_ids(), dtype=torch.int64)
    kv = StreamKV(pool)
    kv.resize(len(ids))
    positions = torch.arange(len(ids)).expand(3, -1)
    work = StreamPass(pool, kv.slots, np.arange(len(ids)), _NONE, (), model.embed(ids), positions)
    ragged_forward(model, [work], kernel)
    k, v = kv.raw(positions)
    kv.clear()
    return SystemPrompt(k, v)


@dataclass(frozen=True, slots=True, eq=False)
class SystemPrompt:
    """KV of the system prompt, computed once per model: ``k, v [L, Hkv, s, d]``, keys before rotary."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return int(self.k.shape[2])

    def store(self, pool: KVPool, plans: Sequence[WindowPlan]) -> None:
        """Write it to the pool for each of these windows: unlike frames, its tokens move when a window slides."""
        cos, sin = pool.rotary(torch.cat([plan.places.text(range(len(self))) for plan in plans], dim=1))
        # The first scratch slots are the system prompt's.
        index = pool.index(np.concatenate([plan.stream.kv.scratch[: len(self)] for plan in plans]))
        k, v = (part.repeat(1, 1, len(plans), 1) for part in (self.k, self.v))
        pool.k.index_copy_(1, index, rotate_wide(k, cos, sin).transpose(1, 2))
        pool.v.index_copy_(1, index, v.transpose(1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenised question: ``embeds [tokens, W]``, and ``reserved`` slots for its explanation."""

    question: Question
    embeds: Tensor
    reserved: int

    def __len__(self) -> int:
        return int(self.embeds.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """A window to compute.

    * ``progress``: of the window, before this plan
    * ``visual``: visual tokens, the first ``cached`` of which have KV; ``computed [visual]``: mask of those to compute
    * ``places``: see :class:`WindowPlaces`
    """

    stream: Stream
    request: WindowRequest
    frames: Sequence[StreamFrame]
    progress: WindowProgress
    prompts: Sequence[Prompt]
    tails: Sequence[Tail]
    system: int
    visual: int
    cached: int
    computed: BoolArray
    places: WindowPlaces
    work: StreamPass

    @property
    def slots(self) -> int:
        """Slots of the system prompt and the frames."""
        return self.system + self.visual

    @property
    def query(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def plan_window(
    model: VisionLanguageModel,
    pool: KVPool,
    system: SystemPrompt,
    stream: Stream,
    request: WindowRequest,
    frames: Sequence[StreamFrame],
    prompts: Sequence[Prompt],
    *,
    watch: bool = False,
) -> WindowPlan:
    """Plan a window of encoded ``frames``; older frames leave the stream and its KV.

    Only a window's first plan refreshes tokens. ``prompts``: empty before the window's end. ``watch``: record the
    unrotated queries of every question's last rows. Raises ``CapacityError``: the pool is full.
    """
    stream.drop_frames(stream.frames.index(frames[0]))
    for later in stream.frames[len(frames) :]:
        # Computed ahead, but the stride has become shorter since; its slots are freed below.
        if later.computed is not None:
            stream.next_token, later.computed = min(stream.next_token, later.first), None
    visual = sum(token_counts(frames))
    cached = sum(token_counts([frame for frame in frames if frame.computed is not None]))
    tails = question_tails(len(system) + visual, [len(p) for p in prompts], [p.reserved for p in prompts])
    slots = tails[-1].stop if tails else len(system) + visual

    selection = Selection(np.zeros(cached, dtype=bool))
    progress = stream.progress_of(request.window, frames[0].pts)
    if progress is None:
        progress = WindowProgress(request.window, frames[0].pts, overlap=cached)
        selection = choose_refreshed(stream, request.window, frames, len(system), model)
    invalid = stream.invalid_tokens(frames)
    computed = np.ones(visual, dtype=bool)
    computed[:cached] = selection.mask | invalid
    rows = np.flatnonzero(computed)

    stream.kv.resize(visual)
    scratch = stream.kv.take_scratch(slots - visual)
    reserved = np.concatenate([_NONE, *(np.arange(tail.start + tail.tokens, tail.stop) for tail in tails)])
    if len(reserved):
        pool.clear(scratch[reserved - visual])
    around = window_places(model, len(system), frames)
    asked = [around.next + i for tail in tails for i in range(tail.tokens)]
    wanted = list(per_frame(frames, computed))
    work = StreamPass(
        pool=pool,
        table=np.concatenate((scratch[: len(system)], stream.kv.slots, scratch[len(system) :])),
        slots=rows + len(system),
        tail_slots=np.concatenate([_NONE, *(np.arange(tail.start, tail.start + tail.tokens) for tail in tails)]),
        tail_runs=tuple(question_runs(len(system) + visual, tails)),
        embeds=torch.cat(
            [*_rows(encoded_tokens(frames[0]).embeds[:0], wanted, pool), *(prompt.embeds for prompt in prompts)]
        ),
        positions=torch.cat([*_positions(wanted), around.text(asked)], dim=1),
        # A narrowing policy would compare new KV with invalid KV.
        narrowing=None if invalid.any() else selection.narrowing,
        narrowable=np.arange(int(np.count_nonzero(computed[:cached]))),
        watched=watched_rows([len(prompt) for prompt in prompts]) if watch else _NONE,
    )
    return WindowPlan(
        stream, request, frames, progress, prompts, tails, len(system), visual, cached, computed, around, work
    )


def commit_plan(plan: WindowPlan, result: PassResult) -> WindowProgress:
    """After the pass, record which tokens have KV and under which context; returns the window's progress."""
    through = np.zeros(plan.visual, dtype=bool)
    through[result.slots - plan.system] = True
    stream, stats, progress = plan.stream, result.stats, plan.progress
    stream.kv.release_scratch()
    stream.record_computed(plan.request.window, plan.frames, through)
    progress.refreshed += stats.mean(stats.narrowable_rows)
    progress.rows += stats.mean(stats.rows)
    progress.attended += stats.mean(stats.attended)
    progress.omitted = progress.omitted[0] + stats.omitted[0], progress.omitted[1] + stats.omitted[1]
    if plan.work.past is not None:
        progress.attended += stats.mean(plan.work.past.attended)
        progress.reads.add(plan.work.past.reads)
    stream.progress = progress
    return progress


def invalidate_ahead(plan: WindowPlan) -> None:
    """A window scored NaN: invalidate the KV that passes before its end computed for it. It was never checked, and
    must not reach a later window or a memory."""
    for frame in plan.frames:
        if frame.computed is not None:
            frame.computed[0, frame.computed[0] == plan.request.window] = INVALID
    # Start counting anew: with these tokens recomputed, counts would exceed the overlap found before.
    plan.stream.progress = None


def watched_rows(lengths: Sequence[int]) -> IntArray:
    """Indices of each question's last rows, at most ``WATCHED_ROWS`` in all; with more questions than that, the last
    row of an evenly spaced subset."""
    share = max(1, WATCHED_ROWS // len(lengths))
    ends = np.cumsum(lengths)
    rows = np.concatenate([np.arange(end - min(share, n), end) for end, n in zip(ends, lengths, strict=True)])
    return rows if len(rows) <= WATCHED_ROWS else rows[np.arange(WATCHED_ROWS) * len(rows) // WATCHED_ROWS]


def _positions(wanted: Sequence[tuple[StreamFrame, BoolArray]]) -> Iterator[Tensor]:
    """Positions ``[3, n]`` of the tokens to compute."""
    for frame, tokens in wanted:
        assert frame.positions is not None
        yield frame.positions if tokens.all() else frame.positions[:, torch.from_numpy(np.flatnonzero(tokens))]


def _rows(nothing: Tensor, wanted: Sequence[tuple[StreamFrame, BoolArray]], pool: KVPool) -> list[Tensor]:
    """Embeddings ``[n, W]`` of the tokens to compute; those of the oldest frames may come from host memory."""
    rows = [nothing]
    for frame, tokens in wanted:
        embeds = embeddings(frame)
        if not tokens.all():
            embeds = embeds[to_device(torch.from_numpy(np.flatnonzero(tokens)), embeds.device)]
        rows.append(embeds)
    away, here = ([row for row in rows if (row.device == pool.device) is there] for there in (False, True))
    return [to_device(torch.cat(away), pool.device), *here] if away else here


@dataclass(frozen=True, slots=True)
class WindowPlaces:
    """Maps window positions to the stream's own time; relative positions are those of a window that begins at 0.

    ``first``: own-time position of the first frame; ``system``: tokens before it; ``next``: window position of a
    question's first token; ``axes``: 1 for the axes that ``first`` shifts, else 0.
    """

    first: int
    system: int
    next: int
    axes: tuple[int, int, int]

    def text(self, positions: Sequence[int]) -> Tensor:
        """Own-time positions ``[3, n]`` of text at these window positions."""
        place = torch.tensor(positions, dtype=torch.int64) - self.system
        return torch.stack([place + axis * self.first for axis in self.axes])


def window_places(model: VisionLanguageModel, system: int, frames: Sequence[StreamFrame]) -> WindowPlaces:
    """The :class:`WindowPlaces` of a window of these frames."""
    first, last = (model.frame_place(frame.time_s, frame.slot, frame.grid) for frame in (frames[0], frames[-1]))
    following = model.next_position(system, last - first, frames[-1].grid)
    return WindowPlaces(first, system, following, model.moving_axes)
