"""Patches back into the picture they were cut from."""

from cluster.types import FrameSample, UInt8Array
from cluster.vision.pruners.base import any_in_group


def paste_patches(sample: FrameSample, t: int, picture: UInt8Array) -> None:
    """The reverse of ``cut_patches``: write sample ``t``'s kept patches into ``picture`` ``[height, width, 3]``."""
    grid = sample.grid
    merge, patch = grid.merge, grid.patch
    groups = any_in_group(sample.mask, merge)
    cells = picture.reshape(grid.group_rows, merge, patch, grid.group_cols, merge, patch, 3)
    patches = sample.patches[:, t].reshape(-1, merge, merge, 3, patch, patch)
    cells.transpose(0, 3, 1, 4, 6, 2, 5)[groups] = patches
