"""Two-means by cosine: how clusters are divided, many of them at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Rounds after which a division that still changes is good enough.
_ROUNDS = 10
# Directions that are nearer than this are the same.
_SAME = 1e-6


def two_means(key: Tensor, weight: Tensor, group: Tensor, groups: int) -> Tensor:
    """Divide each group of points by direction into two parts, each nearer to its own mean direction.

    Begins with the point least like the mean and the point least like that one, so that nothing is left to chance.

    Args:
        key: ``[n, D]``.
        weight: of each point in its part's mean ``[n]``.
        group: of each point ``[n]``, 0 to ``groups - 1``, none without points.

    Returns:
        ``[n]`` bool: the part that its group's first point is not in; empty where all directions are the same.
    """
    unit = normalize(key.float(), dim=1)
    weighted = unit * weight[:, None]

    def summed(of: Tensor) -> Tensor:
        return of.new_zeros(groups, of.shape[1]).index_add_(0, group, of)

    def likeness(centres: Tensor) -> Tensor:
        return (unit * centres[group]).sum(1)

    one = unit[_first_least(likeness(summed(weighted)), group, groups)]
    apart = likeness(one)
    farthest = _first_least(apart, group, groups)
    differ = apart[farthest] <= 1 - _SAME
    side = likeness(unit[farthest]) > apart
    size = torch.bincount(group, minlength=groups)
    for _ in range(_ROUNDS):
        second = summed(weighted * side[:, None])
        first = summed(weighted * ~side[:, None])
        again = likeness(normalize(second, dim=1)) > likeness(normalize(first, dim=1))
        count = torch.bincount(group[again], minlength=groups)
        again = torch.where(((count > 0) & (count < size))[group], again, side)
        if bool((again == side).all()):
            break
        side = again
    oldest = _first_least(torch.zeros_like(apart), group, groups)
    return (side ^ side[oldest][group]) & differ[group]


def _first_least(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Number of the least of ``values [n]`` in each group, the first of several."""
    least = values.new_zeros(groups).scatter_reduce_(0, group, values, "amin", include_self=False)
    number = torch.arange(len(values), device=values.device)
    last = torch.full((groups,), len(values), device=values.device)
    among = values == least[group]
    return last.scatter_reduce_(0, group[among], number[among], "amin")
