"""How well what is kept stands for what was there (CoRDS, figure 4)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cluster.memory.layer import LayerKV

Space = Literal["key", "value", "joint"]


def nearest_distances(full: LayerKV, kept: LayerKV, space: Space) -> Tensor:
    """Distance ``[H, n]`` of every token of ``full`` to the nearest of those that were ``kept`` of its head.

    ``joint``: root of the mean of both squared distances, each in units of its space's mean squared norm, so that
    neither counts for its scale.
    """
    parts = {
        "key": [(full.key, kept.key)],
        "value": [(full.value, kept.value)],
        "joint": [(full.key, kept.key), (full.value, kept.value)],
    }[space]
    squared = full.key.new_zeros((), dtype=torch.float32)
    for all_tokens, held in parts:
        wide, there = all_tokens.float(), held.float()
        apart = torch.cdist(wide, there).square() / wide.square().sum(-1).mean().clamp(min=1e-12)
        squared = squared + apart
    return (squared / len(parts)).amin(-1).sqrt()


def coverage_area(distances: Tensor, furthest: float) -> float:
    """Area under the distribution function of ``distances`` from 0 to ``furthest``, as a share: 1 where all are 0."""
    if furthest <= 0:
        return 1.0
    return float((1 - distances.clamp(max=furthest) / furthest).mean())
