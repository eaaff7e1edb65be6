"""Refresh context of a window's overlap, and the selection of its policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection
from cluster.engine.window.stream import Stream, StreamFrame, encoded_tokens
from cluster.registry import refresh_policies
from cluster.types import MICROSECONDS


def choose_refreshed(
    stream: Stream,
    window: int,
    frames: Sequence[StreamFrame],
    system: int,
    layers: int,
) -> Selection:
    """The selection of the stream's policy."""
    policy: RefreshPolicy = refresh_policies.get(stream.spec.refresh)()
    context = refresh_context(stream, window, frames, system, layers)
    # Until the first frame leaves the window, every token was computed under the context it has now: causal attention
    # makes that KV the one a full computation gives, and there is nothing to refresh.
    exact = policy.budgeted and frames[0].first == stream.first_token and frames[0].has_kv
    if exact or not len(context):
        return Selection(np.zeros(len(context), dtype=bool))
    return policy.select(context)


def refresh_context(
    stream: Stream, window: int, frames: Sequence[StreamFrame], system: int, layers: int
) -> RefreshContext:
    """Build the context of those ``frames`` that have KV."""
    overlap = [(index, frame) for index, frame in enumerate(frames) if frame.has_kv and len(encoded_tokens(frame))]
    counts = np.array([len(encoded_tokens(frame)) for _, frame in overlap], np.int64)
    count = int(counts.sum())

    def spread(values: Sequence[float], dtype: type) -> npt.NDArray[Any]:
        return np.repeat(np.array(values, dtype), counts)

    offset = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    number = offset + spread([frame.first for _, frame in overlap], np.int64)
    computed = np.concatenate(
        [np.zeros((3, 0), np.int64), *(f.computed for _, f in overlap if f.computed is not None)], 1
    )
    cells = [encoded_tokens(frame).cells.cpu().numpy() for _, frame in overlap]
    share = stream.spec.refresh_budget
    return RefreshContext(
        stream=stream.spec.stream,
        window=window,
        system=system,
        layers=layers,
        budget=None if share is None else min(count, round(share * count)),
        frame=spread([index for index, _ in overlap], np.int64),
        offset=offset,
        frame_tokens=np.repeat(counts, counts),
        cells=np.concatenate([np.zeros((0, 2), np.int64), *cells]),
        anchor=spread([frame.anchor for _, frame in overlap], np.bool_),
        complete=spread([frame.complete for _, frame in overlap], np.bool_),
        activity=spread([frame.activity for _, frame in overlap], np.float32),
        age=window - computed[0],
        context=number - computed[1],
        lost=frames[0].first - computed[1],
        shift_s=((frames[0].pts - computed[2]) / MICROSECONDS).astype(np.float32),
    )
