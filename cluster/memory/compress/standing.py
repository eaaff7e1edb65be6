"""What the tokens of a memory stand for: themselves, and those that were left out near them (a weighted coreset)."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.memory.layer import LayerKV

_CELLS = 1 << 24
"""More than a grid has: a frame and a cell are then one number."""
_PART = 1024
"""Points whose distances to all are looked at together."""


class Standing:
    """Weights of one layer's tokens, from one compression to the next.

    A token weighs one until others are left out for it, so that together those of a head weigh as much as all tokens
    that it ever held, less those that went another way (forgotten, lost). Tokens are known by frame and cell.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor] | None = None

    def of(self, layer: LayerKV) -> Tensor:
        """Weights ``[H, n]`` float32 of a layer's tokens; one for those that no compression chose before."""
        if self._known is None or len(self._known[0]) != layer.heads or not self._known[0].shape[1]:
            return torch.ones(layer.frame.shape, device=layer.key.device)
        names, weights = (each.to(layer.key.device) for each in self._known)
        asked = _names(layer.frame, layer.cell)
        place = torch.searchsorted(names, asked).clamp_(max=names.shape[1] - 1)
        return weights.gather(1, place).where(names.gather(1, place) == asked, 1.0)

    def keep(self, layer: LayerKV, chosen: Tensor, weights: Tensor) -> None:
        """From here on the tokens ``chosen [H, m]`` of a layer weigh ``weights [H, m]``."""
        names, order = _names(layer.frame, layer.cell).gather(1, chosen).sort(dim=1)
        self._known = names, weights.gather(1, order)


def handed_on(points: Tensor, weight: Tensor, stays: Tensor) -> Tensor:
    """Weights ``[H, u]`` once each point ``[H, u, D]`` gave its ``weight [H, u]`` to the nearest that ``stays [H, u]``.

    At least one stays in each head.
    """
    given = torch.zeros_like(weight)
    # Not all at once: distances of all to all can be larger than what is compressed.
    for part, whose in zip(torch.split(points, _PART, dim=1), torch.split(weight, _PART, dim=1), strict=True):
        nearest = torch.cdist(part, points).masked_fill_(~stays[:, None], torch.inf).argmin(dim=2)
        given.scatter_add_(1, nearest, whose)
    return given


def _names(frame: Tensor, cell: Tensor) -> Tensor:
    return frame * _CELLS + cell
