"""Vision encoding: runs the pending frames of all streams through the tower, in calls of bounded size."""

import itertools
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.stream import StreamFrame
from cluster.models.base import FrameSpan, PatchBatch, VisionLanguageModel


def patch_batches(frames: Sequence[StreamFrame]) -> list[PatchBatch]:
    """The tower's input for pending frames."""
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
        # Cloned: a view would keep the cells of all frames alive.
        cells += [each.clone() for each in torch.split(found, [frame.size for frame in group])]
    return cells


def encode_pending(model: VisionLanguageModel, pending: Sequence[StreamFrame]) -> list[PatchBatch]:
    """Encode frames that still hold patches, and free the patches; halves the batch when memory runs out.

    Returns the tower's input for each frame. Raises ``torch.OutOfMemoryError``: a single frame does not fit.
    """
    batches = patch_batches(pending)
    encoded = None
    try:
        encoded = model.encode(batches)
    except torch.OutOfMemoryError:
        if len(pending) == 1:
            raise
    if encoded is None:
        # Outside the handler, whose traceback keeps the failed attempt's tensors alive.
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
    """Encode a blank frame and project its queries: first calls fuse weights and compile kernels, which takes seconds
    and memory. Empties torch's cache afterwards."""
    grid = model.geometry.largest
    shape = grid.rows * grid.cols, grid.temporal, 3, grid.patch, grid.patch
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    (frame,) = model.encode([PatchBatch(torch.zeros(shape, dtype=torch.uint8), cells, grid)])
    model.projections(0, frame.embeds[:, : model.text_config.hidden_size])
    del frame
    torch.cuda.empty_cache()
