"""Attention of a free question's rows over window and memory."""

from __future__ import annotations

from collections.abc import Sequence
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
        # No window, or a restored one whose first frames are also in the memory.
        opened = newest + frame_us
    frame_s = frame_us / MICROSECONDS
    taken = model.window_positions(system, frame_spans(frames)[-1:]).next + text
    most = frames_that_fit(model, taken, frame_s, grid)
    return Timeline.of(held.numbers, held.times, opened, frame_s=frame_s, most=most), grid


def _last_span(timeline: Timeline, grid: PatchGrid) -> FrameSpan:
    """Span of the last remembered frame, for a question without a window."""
    time_s = float(timeline.time_s[-1]) if len(timeline.time_s) else 0.0
    slot = int(timeline.slot[-1]) if len(timeline.slot) else 0
    return FrameSpan(time_s, slot, torch.zeros(0, 2, dtype=torch.int64), grid)


def _raw(kv: StreamKV | None, frames: Sequence[StreamFrame], system: SystemPrompt, newer: int) -> tuple[Tensor, Tensor]:
    """KV of ``frames``, which end ``newer`` tokens before the end of ``kv``, keys before rotary; empty without any."""
    if kv is None or not frames:
        return system.k[:, :, :0], system.v[:, :, :0]
    at = own_positions(frames)
    stop = len(kv) - newer
    return kv.raw(at, stop - at.shape[1], stop)


class MemoryAttention:
    """Attention that every decoder layer calls for a question's rows: over system prompt, window, retrieved KV and the
    earlier rows.

    The first pass retrieves each layer's KV; later passes, for the answer's tokens, reuse it. Between a layer's
    attention and MLP, the next layer's query is predicted and its blocks are prefetched.

    Args:
        retrieval: session over the memory.
        frames: the window's encoded frames; those with KV come first.
        kv: KV of these frames, perhaps with earlier ones; None if no frame has KV.
        held: frames of the memory that may be retrieved.
        text: tokens of the question and its answer.
        frame_us: length of a frame, microseconds.
        newer: tokens of ``kv`` after those of ``frames``.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        system: SystemPrompt,
        retrieval: RetrievalSession,
        frames: Sequence[StreamFrame],
        kv: StreamKV | None,
        *,
        held: FrameLog,
        text: int,
        frame_us: int,
        newer: int = 0,
    ) -> None:
        self._model, self._retrieval = model, retrieval
        timeline, self._grid = _timeline(model, retrieval.memory, frames, held, len(system), text, frame_us)
        spans = frame_spans(frames, after_s=timeline.length_s, after_slots=timeline.slots)
        window = model.window_positions(len(system), spans or [_last_span(timeline, self._grid)])
        positions = torch.cat([torch.arange(len(system)).expand(3, -1), *window.frames], dim=1)
        known = [frame for frame in frames if frame.has_kv]
        counts = [len(encoded_tokens(frame)) for frame in known]
        cos, sin = (part.to(model.dtype) for part in model.rotary(positions[:, : len(system) + sum(counts)]))
        held_k, held_v = _raw(kv, known, system, newer)
        # System prompt and window, [L, Hkv, s, d].
        self._key = rotate(torch.cat([system.k, held_k], dim=2), cos, sin)
        self._value = torch.cat([system.v, held_v], dim=2)
        # Frame number of each slot: -1 for the system prompt, then -2, -3, … for the window's frames.
        number = torch.tensor([-1, *range(-2, -2 - len(known), -1)])
        self._frame = number.repeat_interleave(torch.tensor([len(system), *counts])).to(model.device)
        self._timeline, self._first_position, self._next_position = timeline.to(model.device), len(system), window.next
        self._context: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        # Attention of the prompt's last row, per layer: frame and mass of each slot, over all heads.
        self._masses: list[tuple[Tensor, Tensor]] = []
        self._cos = self._sin = torch.zeros(0)

    def run(self, embeds: Tensor) -> Tensor:
        """Run rows ``[n, W]``, following all earlier ones, through all layers; returns hidden states ``[n, D]``."""
        positions = torch.arange(self._next_position, self._next_position + len(embeds), device=self._model.device)
        self._next_position += len(embeds)
        cos, sin = self._model.rotary(positions.expand(3, -1))
        self._cos, self._sin = cos.to(self._model.dtype), sin.to(self._model.dtype)
        hidden = embeds[:, : self._model.text_config.hidden_size]
        predicts = not self._context and self._retrieval.prefetches
        last = len(self._model.layers) - 1
        for index in range(last + 1):
            predict = partial(self._predict, index + 1) if predicts and index < last else None
            hidden = self._model.run_layer(index, hidden, embeds, None, self, predict)
        return hidden

    def _predict(self, layer: int, hidden: Tensor) -> None:
        """Prefetch a layer's blocks with its own query on ``hidden [n, D]``, which lacks only the preceding MLP."""
        query = self._model.projections(layer, hidden)[0].transpose(0, 1)
        self._retrieval.prefetch(layer, query.reshape(self._model.text_config.num_key_value_heads, -1, query.shape[2]))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``query [n, H, d]``, ``key, value [n, Hkv, d]``, before rotary -> ``[n, H, d]``."""
        rows, heads, size = query.shape
        query, key, own_value = (part.transpose(0, 1) for part in (query, key, value))
        kv_heads = key.shape[0]
        group = heads // kv_heads
        first_pass = layer not in self._context
        if first_pass:
            self._context[layer] = self._load_context(layer, query.reshape(kv_heads, group * rows, size))
        context_key, context_value, valid, frame = self._context[layer]
        own_key = rotate(key, self._cos, self._sin)
        if layer in self._own:
            own_key = torch.cat([self._own[layer][0], own_key], dim=1)
            own_value = torch.cat([self._own[layer][1], own_value], dim=1)
        self._own[layer] = own_key, own_value
        rotated = rotate(query, self._cos, self._sin).view(kv_heads, group, rows, size)
        keys = torch.cat([context_key, own_key], dim=1)
        values = torch.cat([context_value, own_value], dim=1)
        before = own_key.shape[1] - rows
        causal = torch.ones(rows, own_key.shape[1], dtype=torch.bool, device=keys.device).tril(before)
        mask = torch.cat([valid[:, None, None].expand(-1, 1, rows, -1), causal.expand(kv_heads, 1, -1, -1)], dim=3)
        out = F.scaled_dot_product_attention(
            rotated,
            keys[:, None].expand(-1, group, -1, -1),
            values[:, None].expand(-1, group, -1, -1),
            mask,
            scale=scale,
        )
        if first_pass:
            self._add_mass(rotated[:, :, -1], keys, mask[:, :, -1], frame, scale)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, size)

    def _load_context(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer's context: rotated keys and values ``[Hkv, s, d]``, and validity and frame of each slot."""
        heads = query.shape[0]
        valid = torch.ones(heads, len(self._frame), dtype=torch.bool, device=query.device)
        retrieved = self._retrieval.fetch(layer, query)
        rotated = retrieved.key
        if retrieved.tokens:
            rotated = rotate_retrieved(
                self._model,
                self._retrieval.memory,
                retrieved,
                layer,
                self._timeline,
                self._grid,
                first_position=self._first_position,
            )
        return (
            torch.cat([self._key[layer], rotated.to(self._key.dtype)], dim=1),
            torch.cat([self._value[layer], retrieved.value], dim=1),
            torch.cat([valid, retrieved.valid], dim=1),
            torch.cat([self._frame.expand(heads, -1), retrieved.frame], dim=1),
        )

    def _add_mass(self, query: Tensor, keys: Tensor, mask: Tensor, frame: Tensor, scale: float) -> None:
        """Accumulate the last row's attention per frame; ``query [Hkv, G, d]``."""
        scores = torch.einsum("hgd,hsd->hgs", query.float(), keys.float()) * scale
        mass = scores.masked_fill(~mask, float("-inf")).softmax(-1).sum(1)[:, : frame.shape[1]]
        self._masses.append((frame.flatten(), mass.flatten()))

    def attention_mass(self) -> tuple[Tensor, Tensor]:
        """Frame numbers ``[n]`` int64, ascending, and the attention ``[n]`` float32 each got, summed over layers; on
        the host."""
        frame, mass = (torch.cat(parts).cpu() for parts in zip(*self._masses, strict=True))
        numbers, index = torch.unique(frame, return_inverse=True)
        totals = mass.new_zeros(len(numbers)).index_add_(0, index, mass)
        return numbers[numbers != -1], totals[numbers != -1]


def rotate_retrieved(
    model: VisionLanguageModel,
    memory: StreamMemory,
    retrieved: RetrievedKV,
    layer: int,
    timeline: Timeline,
    grid: PatchGrid,
    *,
    first_position: int = 0,
    origin: tuple[float, int] = (0.0, 0),
) -> Tensor:
    """Keys ``[H, m, D]`` retrieved in ``layer``, with the bias that the memory leaves out, rotated to the positions of
    their frames. ``origin``: seconds and slots between ``first_position`` and the timeline's beginning."""
    heads, count, size = retrieved.key.shape
    frame = torch.where(retrieved.valid, retrieved.frame, retrieved.frame.amax()).flatten()
    time_s, slot = timeline.places(frame)
    row = torch.div(retrieved.cell, memory.columns, rounding_mode="floor").flatten()
    text = row >= memory.rows
    column = retrieved.cell.flatten() - torch.where(text, memory.rows, row) * memory.columns
    cells = torch.stack([torch.where(text, -1, row), column], dim=1)
    positions = model.token_positions(first_position, time_s + origin[0], slot + origin[1], cells, grid)
    cos, sin = (part.view(heads, count, size) for part in model.rotary(positions))
    key = retrieved.key.float()
    if model.key_bias is not None:
        key = key + model.key_bias[layer]
    return rotate(key, cos, sin).to(retrieved.key.dtype)
