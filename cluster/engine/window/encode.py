"""Vision encoding: pending frames of all streams through the tower in calls of bounded size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.stream import StreamFrame
from cluster.models.base import PatchBatch, VisionLanguageModel


def patch_batch(frame: StreamFrame) -> PatchBatch:
    """Patches of a pending frame as the tower's input."""
    assert frame.patches is not None
    return PatchBatch(torch.from_numpy(frame.patches), frame_cells(frame), frame.grid, frame.time_s)


def frame_cells(frame: StreamFrame) -> Tensor:
    """Kept cells ``[t, 2]`` int64 of a frame on the merged grid, row-major."""
    merge = frame.grid.merge
    return torch.from_numpy(np.argwhere(frame.mask[::merge, ::merge]))


def encode_pending(model: VisionLanguageModel, frames: Iterable[StreamFrame]) -> dict[int, int]:
    """Encode those of ``frames`` that still hold patches, and free the patches; in halves where memory runs out.

    Returns the tower's FLOPs per frame, by ``id(frame)``.

    Raises:
        torch.OutOfMemoryError: not even one frame fits.
    """
    pending = [frame for frame in frames if frame.tokens is None]
    batches = [patch_batch(frame) for frame in pending]
    try:
        encoded = model.encode(batches)
    except torch.OutOfMemoryError:
        half = len(pending) // 2
        if not half:
            raise
        return encode_pending(model, pending[:half]) | encode_pending(model, pending[half:])
    flops: dict[int, int] = {}
    for frame, batch, tokens in zip(pending, batches, encoded, strict=True):
        frame.tokens = tokens
        frame.patches = None
        flops[id(frame)] = model.tower_flops([batch])
    return flops
