"""Vision encoding: pending frames of all streams through the tower in calls of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

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
    return torch.from_numpy(frame.mask[::merge, ::merge]).nonzero()


def encode_pending(model: VisionLanguageModel, pending: Sequence[StreamFrame]) -> list[int]:
    """Encode frames that still hold patches, and free the patches; in halves where memory runs out.

    Returns the tower's FLOPs of each frame.

    Raises:
        torch.OutOfMemoryError: not even one frame fits.
    """
    batches = [patch_batch(frame) for frame in pending]
    try:
        encoded = model.encode(batches)
    except torch.OutOfMemoryError:
        half = len(pending) // 2
        if not half:
            raise
        return [*encode_pending(model, pending[:half]), *encode_pending(model, pending[half:])]
    for frame, tokens in zip(pending, encoded, strict=True):
        frame.tokens = tokens
        frame.patches = None
    return [model.tower_flops([batch]) for batch in batches]
