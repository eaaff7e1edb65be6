"""Vision encoding: pending frames of all streams through the tower in calls of bounded size."""

import itertools
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.stream import StreamFrame
from cluster.models.base import FrameSpan, PatchBatch, VisionLanguageModel


def patch_batches(frames: Sequence[StreamFrame]) -> list[PatchBatch]:
    """Patches of pending frames as the tower's input."""
    batches: list[PatchBatch] = []
    for frame, cells in zip(frames, frame_cells(frames), strict=True):
        assert frame.patches is not None
        batches.append(PatchBatch(torch.from_numpy(frame.patches), cells, frame.grid, frame.time_s))
    return batches


def frame_cells(frames: Sequence[StreamFrame]) -> list[Tensor]:
    """Kept cells ``[t, 2]`` int64 of each frame on the merged grid, row-major."""
    cells: list[Tensor] = []
    for grid, alike in itertools.groupby(frames, attrgetter("grid")):
        group = list(alike)
        masks = np.stack([frame.mask[:: grid.merge, :: grid.merge] for frame in group])
        found = torch.from_numpy(masks).nonzero()[:, 1:]
        # A view would keep all frames' alive.
        cells += [each.clone() for each in torch.split(found, [frame.size for frame in group])]
    return cells


def encode_pending(model: VisionLanguageModel, pending: Sequence[StreamFrame]) -> list[PatchBatch]:
    """Encode frames that still hold patches, and free the patches; in halves where memory runs out.

    Returns what the tower was given of each frame.

    Raises:
        torch.OutOfMemoryError: not even one frame fits.
    """
    batches = patch_batches(pending)
    encoded = None
    try:
        encoded = model.encode(batches)
    except torch.OutOfMemoryError:
        if len(pending) == 1:
            raise
    if encoded is None:
        # Not in the handler: its traceback holds what the attempt allocated.
        half = len(pending) // 2
        return [*encode_pending(model, pending[:half]), *encode_pending(model, pending[half:])]
    spans = [
        FrameSpan(frame.time_s, frame.slot, tokens.cells, frame.grid)
        for frame, tokens in zip(pending, encoded, strict=True)
    ]
    placed = model.frame_positions(0, spans)
    for frame, tokens, positions in zip(pending, encoded, placed, strict=True):
        frame.tokens, frame.positions = tokens, positions
        frame.patches = None
    return batches


@torch.inference_mode()
def warm_up(model: VisionLanguageModel) -> None:
    """Compute a blank frame, and what it takes of the language model: first calls join weights and compile kernels,
    which takes memory and seconds. Leaves no memory of theirs in torch's cache."""
    grid = model.geometry.largest
    shape = grid.rows * grid.cols, grid.temporal, 3, grid.patch, grid.patch
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    (frame,) = model.encode([PatchBatch(torch.zeros(shape, dtype=torch.uint8), cells, grid)])
    model.raw_query(0, frame.embeds[:, : model.text_config.hidden_size])
    del frame
    torch.cuda.empty_cache()
