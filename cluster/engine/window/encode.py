"""Pending frames through the vision tower: of all streams together, in calls of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.stream import StreamFrame
from cluster.models.base import PatchBatch, VisionLanguageModel

# Patches of one call. The tower's activations grow with it; 16 whole 448 x 448 frames fill a GPU and fit a laptop.
CALL_PATCHES = 16384


def batch_of(frame: StreamFrame) -> PatchBatch:
    """A pending frame's patches for the tower."""
    assert frame.patches is not None
    return PatchBatch(torch.from_numpy(frame.patches), cells_of(frame), frame.grid)


def cells_of(frame: StreamFrame) -> Tensor:
    """Kept cells ``[t, 2]`` int64 of a frame on the merged grid, row-major."""
    merge = frame.grid.merge
    return torch.from_numpy(np.argwhere(frame.mask[::merge, ::merge]))


def encode_pending(model: VisionLanguageModel, frames: Iterable[StreamFrame]) -> dict[int, int]:
    """Encode those of ``frames`` that still hold patches, and let the patches go.

    Returns the tower's FLOPs per frame, by ``id(frame)``.
    """
    pending = [frame for frame in frames if frame.tokens is None]
    flops: dict[int, int] = {}
    for call in _calls(pending):
        batches = [batch_of(frame) for frame in call]
        for frame, batch, tokens in zip(call, batches, model.encode(batches), strict=True):
            # A copy: the call's result is one tensor, which a single frame kept from it would hold whole.
            frame.tokens = replace(tokens, embeds=tokens.embeds.clone())
            frame.patches = None
            flops[id(frame)] = model.tower_flops([batch])
    return flops


def _calls(frames: Sequence[StreamFrame]) -> list[list[StreamFrame]]:
    calls: list[list[StreamFrame]] = []
    patches = 0
    for frame in frames:
        assert frame.patches is not None
        # A frame without a single patch (nothing moved) may be the first.
        if not calls or patches + len(frame.patches) > CALL_PATCHES:
            calls.append([])
            patches = 0
        calls[-1].append(frame)
        patches += len(frame.patches)
    return calls
