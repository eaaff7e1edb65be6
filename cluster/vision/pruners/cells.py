"""Patch grid arithmetic shared by the pruners: patch means, merge groups, neighbours."""

import numpy as np

from cluster.types import BoolGrid, FloatGrid, PatchGrid, UInt8Array


def cell_means(plane: UInt8Array, grid: PatchGrid) -> FloatGrid:
    """Mean of a uint8 plane ``[height, width]`` over each patch, ``[rows, cols]`` float32.

    Columns of a patch are summed in 16 bits first (255 x patch fits for any patch up to 257 pixels): several times
    faster than one reduction over two axes.
    """
    patch = grid.patch
    strips = np.add.reduce(plane.reshape(grid.rows, patch, grid.width), axis=1, dtype=np.uint16)
    # Sums of whole numbers are exact in any order, so that every implementation rounds a mean alike.
    sums: FloatGrid = strips.astype(np.float32).reshape(-1, patch) @ np.ones(patch, dtype=np.float32)
    means: FloatGrid = (sums / np.float32(patch * patch)).reshape(grid.rows, grid.cols)
    return means


def any_in_group(mask: BoolGrid, merge: int) -> BoolGrid:
    """``[rows, cols]`` -> ``[rows / merge, cols / merge]``: groups with at least one set cell."""
    rows, cols = mask.shape
    groups: BoolGrid = np.logical_or.reduce(mask.reshape(rows // merge, merge, cols // merge, merge), axis=(1, 3))
    return groups


def complete_groups(mask: BoolGrid, merge: int) -> BoolGrid:
    """Set every cell of a group that has one set (CodecSight section 3.3.2, "group-complete mask")."""
    return expand_groups(any_in_group(mask, merge), merge)


def expand_groups(groups: BoolGrid, merge: int) -> BoolGrid:
    """``[group rows, group cols]`` -> ``[rows, cols]``: each group's value for all of its cells."""
    return groups.repeat(merge, axis=0).repeat(merge, axis=1)


def dilate(mask: BoolGrid) -> BoolGrid:
    """Set cells and their eight neighbours."""
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    wide = tall.copy()
    wide[:, 1:] |= tall[:, :-1]
    wide[:, :-1] |= tall[:, 1:]
    return wide


def neighbours(mask: BoolGrid) -> UInt8Array:
    """Number of set cells among each cell's eight neighbours, ``[rows, cols]`` uint8; outside counts as unset."""
    count = np.zeros((mask.shape[0] + 2, mask.shape[1] + 2), dtype=np.uint8)
    count[1:-1, 1:-1] = mask
    columns = count[:-2] + count[1:-1] + count[2:]
    square = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
    around: UInt8Array = square - mask
    return around
