"""System prompt and window of one camera behind its memory: rotated to where they stand, for questions and frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.engine.native.attention import rotate
from cluster.engine.native.plan import SystemPrompt
from cluster.engine.native.recall import Local, Surroundings, Timeline
from cluster.engine.window.stream import HeldFrame, spans_of, tokens_of
from cluster.memory.stream import StreamMemory
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.types import MICROSECONDS, PatchGrid

# Seconds that the memory takes up before the window at most; what is older is squeezed into them.
SPAN_S = 40.0


def surroundings(
    model: VisionLanguageModel,
    system: SystemPrompt,
    memory: StreamMemory,
    frames: Sequence[HeldFrame],
    kv: tuple[Tensor, Tensor] | None,
    *,
    since: int | None = None,
) -> Surroundings:
    """What rows see of a camera beside what they recall.

    Args:
        frames: the window, encoded; those with KV come first.
        kv: raw KV ``[L, Hkv, s, d]`` of those that have some and perhaps of frames before them; None where none has.
        since: time (microseconds, as the memory counts) before which nothing of the memory is wanted.
    """
    timeline, grid = _timeline(model, memory, frames, since)
    before = timeline.length_s
    spans = spans_of(frames, after_s=before, after_slots=timeline.slots)
    # Without a window, the place of the last remembered frame: the question stands behind that.
    last = max(0.0, before - timeline.frame_s)
    empty = FrameSpan(last, max(0, timeline.slots - 1), torch.zeros(0, 2, dtype=torch.int64), grid)
    window = model.window_positions(len(system), spans or [empty])
    device = model.device
    positions = torch.cat(
        [torch.arange(len(system), device=device).expand(3, -1), *(part.to(device) for part in window.frames)], dim=1
    )
    known = [tokens_of(frame) for frame in frames if frame.has_kv]
    count = len(system) + sum(map(len, known))
    cos, sin = (part.to(model.dtype) for part in model.rotary(positions[:, :count]))
    held_k, held_v = _last(kv, count - len(system), system)
    key = torch.cat([system.k, held_k], dim=2)
    number = [torch.full((len(held),), -2 - i, device=device) for i, held in enumerate(known)]
    local = Local(
        rotate(key, cos, sin, torch.empty_like(key)),
        torch.cat([system.v, held_v], dim=2),
        torch.cat([torch.full((len(system),), -1, device=device), *number]),
    )
    return Surroundings(local, len(system), timeline, grid, positions[:, count:], window.next)


def _timeline(
    model: VisionLanguageModel, memory: StreamMemory, frames: Sequence[HeldFrame], since: int | None
) -> tuple[Timeline, PatchGrid]:
    geometry = model.geometry
    if frames:
        opened, grid = memory.time_of(frames[0].pts), frames[0].grid
        if memory.newest is not None:
            # Before the first frame of a clock that was set back has left the window.
            opened = max(opened, memory.newest + 1)
        frame_s = frames[0].duration / MICROSECONDS
    else:
        frame_s, merge = geometry.temporal / 2.0, geometry.merge
        opened = (memory.newest or 0) + round(frame_s * MICROSECONDS)
        grid = PatchGrid(memory.rows * merge, memory.columns * merge, geometry.patch, merge, geometry.temporal)
    oldest = memory.oldest if memory.oldest is not None else opened
    if since is not None:
        oldest = max(since, oldest)
    return Timeline(opened / MICROSECONDS, min(opened, oldest) / MICROSECONDS, SPAN_S, frame_s), grid


def _last(kv: tuple[Tensor, Tensor] | None, count: int, system: SystemPrompt) -> tuple[Tensor, Tensor]:
    """The last ``count`` slots of raw KV; of none, of the system prompt's shape."""
    key, value = (system.k, system.v) if kv is None else kv
    first = key.shape[2] - count
    return key[:, :, first:], value[:, :, first:]
