"""What a window would ask of the model, counted on the native engine's own books without computing anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.engine.base import WindowRequest
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.planner import BoolArray
from cluster.engine.window.refresh import RefreshPolicy
from cluster.engine.window.refresh.context import refresh_context
from cluster.engine.window.stream import HeldFrame, Stream
from cluster.models.base import FrameTokens
from cluster.registry import refresh_policies
from cluster.types import TokenCount


def empty_slab() -> KVSlab:
    """KV of no layers: its slots are counted and take no memory."""
    return KVSlab(0, 0, 0, torch.float32, torch.device("cpu"))


def encode(frames: Sequence[HeldFrame]) -> int:
    """Take pending frames for encoded; returns their visual tokens."""
    encoded = 0
    for frame in frames:
        if frame.tokens is None:
            cells = np.argwhere(frame.mask[:: frame.grid.merge, :: frame.grid.merge])
            frame.tokens = FrameTokens(torch.zeros(len(cells), 0), torch.from_numpy(cells), frame.grid)
            frame.patches = None
            encoded += frame.size
    return encoded


def compute(
    stream: Stream, request: WindowRequest, frames: Sequence[HeldFrame], *, system: int, query: int, layers: int
) -> TokenCount:
    """Take a window of encoded frames for computed: its tokens, as the native engine's plan would have them.

    A policy that narrows between layers is counted at its first layer. Text that a family writes around frames is not
    counted.
    """
    encoded = encode(frames)
    stream.drop(stream.frames.index(frames[0]))
    kept = sum(frame.size for frame in frames)
    cached = sum(frame.size for frame in frames if frame.has_kv)
    computed = np.ones(kept, dtype=bool)
    computed[:cached] = _refreshed(stream, request, frames, system, layers)
    _commit(stream, request, frames, computed)
    refreshed = int(computed[:cached].sum())
    return TokenCount(
        full=full(frames),
        kept=kept,
        reused=cached - refreshed,
        refreshed=refreshed,
        new=kept - cached,
        query=query,
        encoded=encoded,
    )


def full(frames: Sequence[HeldFrame]) -> int:
    """Visual tokens with nothing pruned."""
    return sum(frame.grid.tokens for frame in frames)


def _refreshed(
    stream: Stream, request: WindowRequest, frames: Sequence[HeldFrame], system: int, layers: int
) -> BoolArray:
    """Which of the overlap's tokens the stream's policy computes again; see ``plan_window`` of the native engine."""
    policy: RefreshPolicy = refresh_policies.get(stream.spec.refresh)()
    context = refresh_context(stream, request.window, frames, system, layers)
    exact = policy.budgeted and frames[0].first == stream.first_token and frames[0].has_kv
    if exact or not len(context):
        return np.zeros(len(context), dtype=bool)
    return policy.select(context).mask


def _commit(stream: Stream, request: WindowRequest, frames: Sequence[HeldFrame], computed: BoolArray) -> None:
    """Every token that was computed knows under which context; see ``commit`` of the native engine."""
    context = np.array([[request.window], [0], [frames[0].pts]])
    start = 0
    for frame in frames:
        if frame.computed is None:
            frame.first = stream.next_token
            frame.computed = np.zeros((3, frame.size), np.int64)
            stream.next_token += frame.size
        context[1, 0] = frames[0].first
        stop = start + frame.size
        frame.computed[:, computed[start:stop]] = context
        start = stop
    stream.kv.length = start
