"""Patches of grids that show the middle of a picture twice."""

import torch

from cluster.types import PatchGrid


def same_where_shown_twice(patches: torch.Tensor, cells: torch.Tensor, grid: PatchGrid) -> torch.Tensor:
    """Patches of one picture: what stands in the grid twice has the same pixels."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    same = patches.clone()
    for group, (row, col) in enumerate(cells.tolist()):
        for inner in range(grid.merge**2):
            down, across = divmod(inner, grid.merge)
            place = int(grid.sources[row * grid.merge + down]), int(grid.sources[col * grid.merge + across])
            number = group * grid.merge**2 + inner
            same[number] = seen.setdefault(place, patches[number])
    return same
