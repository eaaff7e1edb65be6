"""Attention of question rows over window and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.engine.native.plan import SystemPrompt
from cluster.engine.native.timeline import Timeline, frames_that_fit
from cluster.engine.window.kv import StreamKV, rotate
from cluster.engine.window.stream import StreamFrame, encoded_tokens, frame_spans, own_positions
from cluster.memory.manifest import FrameLog
from cluster.memory.retrieval_session import RetrievalSession, RetrievedKV
from cluster.memory.stream import StreamMemory
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.types import MICROSECONDS, PatchGrid


def ask_context(
    model: VisionLanguageModel,
    system: SystemPrompt,
    memory: StreamMemory,
    frames: Sequence[StreamFrame],
    kv: StreamKV | None,
    *,
    held: FrameLog,
    text: int,
    frame_us: int,
    newer: int = 0,
) -> AskContext:
    """Build the local attention context (system prompt and window) of a question.

    Args:
        frames: the window, encoded; those with KV come first.
        kv: of those that have some, and perhaps of frames before them; None where none has.
        held: frames of the memory that may be retrieved.
        text: tokens of the question and its answer.
        frame_us: length of a frame, microseconds.
        newer: tokens of ``kv`` after those of ``frames``.
    """
    timeline, grid = _timeline(model, memory, frames, held, len(system), text, frame_us)
    spans = frame_spans(frames, after_s=timeline.length_s, after_slots=timeline.slots) or [_last_span(timeline, grid)]
    window = model.window_positions(len(system), spans)
    device = model.device
    positions = torch.cat([torch.arange(len(system)).expand(3, -1), *window.frames], dim=1)
    known = [encoded_tokens(frame) for frame in frames if frame.has_kv]
    count = len(system) + sum(map(len, known))
    cos, sin = (part.to(model.dtype) for part in model.rotary(positions[:, :count]))
    held_k, held_v = _raw(kv, [frame for frame in frames if frame.has_kv], system, newer)
    key = torch.cat([system.k, held_k], dim=2)
    number = [torch.full((len(each),), -2 - i, device=device) for i, each in enumerate(known)]
    return AskContext(
        rotate(key, cos, sin, torch.empty_like(key)),
        torch.cat([system.v, held_v], dim=2),
        torch.cat([torch.full((len(system),), -1, device=device), *number]),
        len(system),
        timeline.to(device),
        grid,
        window.next,
    )


def _timeline(
    model: VisionLanguageModel,
    memory: StreamMemory,
    frames: Sequence[StreamFrame],
    held: FrameLog,
    system: int,
    text: int,
    frame_us: int,
) -> tuple[Timeline, PatchGrid]:
    geometry = model.geometry
    newest = held.times[-1] if held.times else None
    if frames:
        opened, grid = frames[0].memory_time, frames[0].grid
    else:
        opened, merge = -(2**62), geometry.merge
        grid = PatchGrid(memory.rows * merge, memory.columns * merge, geometry.patch, merge, geometry.temporal)
    if newest is not None and opened <= newest:
        # No window, or a restored one whose first frames the memory has, too.
        opened = newest + frame_us
    frame_s = frame_us / MICROSECONDS
    taken = model.window_positions(system, frame_spans(frames)[-1:]).next + text
    most = frames_that_fit(model, taken, frame_s, grid)
    return Timeline.of(held.numbers, held.times, opened, frame_s=frame_s, most=most), grid


def _last_span(timeline: Timeline, grid: PatchGrid) -> FrameSpan:
    """The last remembered frame, which a question without a window follows."""
    time_s = float(timeline.time_s[-1]) if len(timeline.time_s) else 0.0
    slot = int(timeline.slot[-1]) if len(timeline.slot) else 0
    return FrameSpan(time_s, slot, torch.zeros(0, 2, dtype=torch.int64), grid)


def _raw(kv: StreamKV | None, frames: Sequence[StreamFrame], system: SystemPrompt, newer: int) -> tuple[Tensor, Tensor]:
    """KV of these newest frames but for the last ``newer`` tokens, keys before rotary; empty with none."""
    if kv is None or not frames:
        return system.k[:, :, :0], system.v[:, :, :0]
    at = own_positions(frames)
    stop = len(kv) - newer
    return kv.raw(at, stop - at.shape[1], stop)


@dataclass(frozen=True, slots=True, eq=False)
class AskContext:
    """Local context and positions of a question.

    * ``key``, rotated, and ``value`` ``[L, Hkv, s, d]``: of system prompt and window
    * ``frame [s]``: -1 for the system prompt, -2 and below for the window's frames, counting down
    * ``first_position``: follows the system prompt
    * ``timeline``, ``grid``: of the memory's frames
    * ``next_position``: follows the last frame
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    first_position: int
    timeline: Timeline
    grid: PatchGrid
    next_position: int


class MemoryAttention:
    """Attention called by every decoder layer for a question's rows: over the local context, the
    retrieved KV, and the earlier rows.

    The first pass retrieves each layer's KV; later passes, for the answer's tokens, reuse it. Between attention and MLP
    of a layer, the next layer's query is predicted and its blocks are prefetched.

    Args:
        model: for positions and rotary.
        around: the local context.
        retrieval: session over the memory; None retrieves nothing.
    """

    def __init__(self, model: VisionLanguageModel, around: AskContext, retrieval: RetrievalSession | None) -> None:
        self._model, self._around, self._retrieval = model, around, retrieval
        self._context: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        # The last row's attention: frame (numbers as in `AskContext`) and mass of each slot, per layer, over all heads.
        self._masses: list[tuple[Tensor, Tensor]] = []
        self._cos = self._sin = torch.zeros(0)

    def run(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """Run rows ``[n, W]`` at ``positions [3, n]`` through all layers; hidden states ``[n, D]`` after the last."""
        cos, sin = self._model.rotary(positions)
        self._cos, self._sin = cos.to(self._model.dtype), sin.to(self._model.dtype)
        hidden = embeds[:, : self._model.text_config.hidden_size]
        predicts = not self._context and self._retrieval is not None and self._retrieval.prefetches
        last = len(self._model.layers) - 1
        for index in range(last + 1):
            predict = partial(self._predict, index + 1) if predicts and index < last else None
            hidden = self._model.run_layer(index, hidden, embeds, None, self, predict)
        return hidden

    def _predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch a layer's blocks with its own query of ``hidden [n, D]``, which lacks the MLP before it alone."""
        assert self._retrieval is not None
        query = self._model.raw_query(layer, hidden).transpose(0, 1)
        self._retrieval.prefetch(layer, query.reshape(self._model.text_config.num_key_value_heads, -1, query.shape[2]))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [n, H, d]``, ``key, value [n, Hkv, d]``, before rotary -> ``[n, H, d]``."""
        rows, heads, size = query.shape
        query, key, own_value = (part.transpose(0, 1) for part in (query, key, value))
        kv_heads = key.shape[0]
        group = heads // kv_heads
        beginning = layer not in self._context
        if beginning:
            self._context[layer] = self._load_context(layer, query.reshape(kv_heads, group * rows, size))
        context_key, context_value, there, frame = self._context[layer]
        own_key = rotate(key, self._cos, self._sin, torch.empty_like(key))
        if layer in self._own:
            own_key = torch.cat([self._own[layer][0], own_key], dim=1)
            own_value = torch.cat([self._own[layer][1], own_value], dim=1)
        self._own[layer] = own_key, own_value
        turned = rotate(query, self._cos, self._sin, query.new_empty(heads, rows, size))
        turned = turned.view(kv_heads, group, rows, size)
        keys = torch.cat([context_key, own_key], dim=1)
        values = torch.cat([context_value, own_value], dim=1)
        before = own_key.shape[1] - rows
        causal = torch.ones(rows, own_key.shape[1], dtype=torch.bool, device=keys.device).tril(before)
        mask = torch.cat([there[:, None, None].expand(-1, 1, rows, -1), causal.expand(kv_heads, 1, -1, -1)], dim=3)
        out = F.scaled_dot_product_attention(
            turned,
            keys[:, None].expand(-1, group, -1, -1),
            values[:, None].expand(-1, group, -1, -1),
            mask,
            scale=scale,
        )
        if beginning:
            self._add_mass(turned[:, :, -1], keys, mask[:, :, -1], frame, scale)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, size)

    def _load_context(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer's context: rotated keys and values ``[Hkv, s, d]``, validity, and frame of each slot."""
        around = self._around
        heads = query.shape[0]
        there = torch.ones(heads, around.frame.shape[0], dtype=torch.bool, device=query.device)
        if self._retrieval is None:
            return around.key[layer], around.value[layer], there, around.frame.expand(heads, -1)
        recalled = self._retrieval.fetch(layer, query)
        turned = recalled.key
        if recalled.tokens:
            turned = rotate_retrieved(
                self._model,
                self._retrieval.memory,
                recalled,
                around.timeline,
                around.grid,
                first_position=around.first_position,
            )
        return (
            torch.cat([around.key[layer], turned.to(around.key.dtype)], dim=1),
            torch.cat([around.value[layer], recalled.value], dim=1),
            torch.cat([there, recalled.valid], dim=1),
            torch.cat([around.frame.expand(heads, -1), recalled.frame], dim=1),
        )

    def _add_mass(self, query: Tensor, keys: Tensor, mask: Tensor, frame: Tensor, scale: float) -> None:
        """Accumulate the last row's attention per frame; ``query [Hkv, G, d]``."""
        scores = torch.einsum("hgd,hsd->hgs", query.float(), keys.float()) * scale
        mass = scores.masked_fill(~mask, float("-inf")).softmax(-1).sum(1)[:, : frame.shape[1]]
        self._masses.append((frame.flatten(), mass.flatten()))

    def attention_mass(self) -> tuple[Tensor, Tensor]:
        """Frame numbers ``[n]`` int64, ascending, and the attention ``[n]`` float32 that they got in all layers; on the
        host."""
        frame, mass = (torch.cat(parts).cpu() for parts in zip(*self._masses, strict=True))
        numbers, index = torch.unique(frame, return_inverse=True)
        totals = mass.new_zeros(len(numbers)).index_add_(0, index, mass)
        return numbers[numbers != -1], totals[numbers != -1]


def rotate_retrieved(
    model: VisionLanguageModel,
    memory: StreamMemory,
    recalled: RetrievedKV,
    timeline: Timeline,
    grid: PatchGrid,
    *,
    first_position: int = 0,
    origin: tuple[float, int] = (0.0, 0),
) -> Tensor:
    """Retrieved keys ``[H, m, D]``, rotated to the places of their frames. ``origin``: seconds and slots of the
    timeline's beginning, counted from ``first_position``."""
    heads, count, size = recalled.key.shape
    frame = torch.where(recalled.valid, recalled.frame, recalled.frame.amax()).flatten()
    time_s, slot = timeline.places(frame)
    row = torch.div(recalled.cell, memory.columns, rounding_mode="floor").flatten()
    text = row >= memory.rows
    column = recalled.cell.flatten() - torch.where(text, memory.rows, row) * memory.columns
    cells = torch.stack([torch.where(text, -1, row), column], dim=1)
    positions = model.token_positions(first_position, time_s + origin[0], slot + origin[1], cells, grid)
    cos, sin = (part.to(recalled.key.dtype).view(heads, count, size) for part in model.rotary(positions))
    return rotate(recalled.key, cos, sin, torch.empty_like(recalled.key))
