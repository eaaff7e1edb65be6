"""Refresh context of a window's overlap, and the selection of its policy."""

from collections.abc import Sequence

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection
from cluster.engine.window.stream import Stream, StreamFrame, token_counts
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies


def choose_refreshed(
    stream: Stream,
    window: int,
    frames: Sequence[StreamFrame],
    system: int,
    model: VisionLanguageModel,
) -> Selection:
    """The selection of the stream's policy."""
    policy: RefreshPolicy = refresh_policies.get(stream.spec.refresh)()
    profile = model.settings.layer_profile
    context = refresh_context(stream, window, frames, system, len(model.layers), profile)
    # Until the first frame leaves the window, every token was computed under the context it has now: causal attention
    # makes that KV the one a full computation gives, and there is nothing to refresh.
    exact = policy.budgeted and frames[0].first == stream.first_token and frames[0].has_kv
    if exact or not len(context):
        return Selection(np.zeros(len(context), dtype=bool))
    return policy.select(context)


def refresh_context(
    stream: Stream,
    window: int,
    frames: Sequence[StreamFrame],
    system: int,
    layers: int,
    profile: tuple[float, ...] = (),
) -> RefreshContext:
    """Build the context of those ``frames`` that have KV."""
    known = [frame for frame in frames if frame.computed is not None]
    counts = np.array(token_counts(known), np.int64)
    count = int(counts.sum())
    frame = np.arange(len(known)).repeat(counts)
    offset = np.arange(count) - (counts.cumsum() - counts)[frame]
    number = offset + np.array([each.first for each in known], np.int64)[frame]
    computed = np.concatenate([np.zeros((2, 0), np.int64), *(f.computed for f in known if f.computed is not None)], 1)
    share = stream.spec.refresh_budget
    return RefreshContext(
        stream=stream.spec.stream,
        window=window,
        system=system,
        layers=layers,
        budget=None if share is None else min(count, round(share * count)),
        frame=frame,
        offset=offset,
        frame_tokens=counts[frame],
        anchor=np.array([each.anchor for each in known], np.bool_)[frame],
        age=window - computed[0],
        context=number - computed[1],
        lost=frames[0].first - computed[1],
        profile=profile,
    )
