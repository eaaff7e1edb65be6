"""WiCSum (V-Rex, section 4): as many clusters as hold a share of the expected attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retrieved, Retriever

# A weight's bucket: the leading bits of its float32, the exponent and three bits behind it.
_SHIFT, _BUCKETS = 20, 2**11


class WiCSum(Retriever):
    """Selects the clusters that hold more than a share of the expected attention.

    Args:
        ratio: the share, 0 to 1; at 1 everything is taken.

    Raises:
        ConfigError: the ratio is no share.
    """

    def __init__(self, *, ratio: float = 0.3) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"the ratio of attention to retrieve is between 0 and 1, not {ratio:g}")
        self.ratio = ratio

    def select(self, query: Tensor, table: ClusterTable) -> Retrieved:
        return wicsum(query, table.mean, table.count, self.ratio)

    def for_prediction(self) -> WiCSum:
        """With twice the share."""
        return WiCSum(ratio=min(1.0, 2 * self.ratio))


def wicsum(query: Tensor, mean: Tensor, count: Tensor, ratio: float = 0.3) -> Retrieved:
    """Clusters that together hold more than ``ratio`` of the attention that each query row is expected to give.

    A cluster's weight for a row is ``count * exp(q . mean / sqrt(D) - max)``; each row takes the heaviest until their
    sum exceeds its share, and the rows' choices are united. Of equal weights the lower number comes first. Weights are
    summed in buckets by their size: only the bucket in which a row's sum exceeds its share is sorted.

    Args:
        query: ``[r, D]``, rotated or not as the means are.
        mean: representatives ``[c, D]``; count: tokens of each ``[c]``.
        ratio: share of the sum, 0 to 1; at 1 everything is taken.

    Raises:
        ValueError: the ratio is no share.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"the ratio is a share, not {ratio}")
    clusters, rows = len(mean), len(query)
    if not clusters or not rows:
        return Retrieved.nothing(mean.device)
    if ratio == 1:
        return Retrieved(torch.arange(clusters, device=mean.device), 0.0)
    scores = query.float() @ mean.float().mT / math.sqrt(query.shape[1])
    weight = (scores - scores.amax(1, keepdim=True)).exp() * count
    # Floats of one sign are in order as their bits are.
    bucket = weight.view(torch.int32) >> _SHIFT
    first = torch.arange(rows, dtype=torch.int32, device=mean.device)[:, None] * _BUCKETS
    held = torch.bincount((bucket + first).flatten(), weight.double().flatten(), minlength=rows * _BUCKETS)
    held = held.view(rows, _BUCKETS)
    # Of each bucket and all heavier ones; nothing is heavier than the last.
    downwards = F.pad(held.flip(1).cumsum(1).flip(1), (0, 1))
    wanted = ratio * downwards[:, :1]
    last = (downwards > wanted).sum(1, keepdim=True) - 1
    chosen = (bucket > last).any(0)
    row, number, running = _sorted(weight, bucket == last, downwards.gather(1, last + 1)[:, 0])
    # The cluster with which a row exceeds its share is its last.
    chosen[number[running <= wanted[row, 0]]] = True
    return Retrieved(chosen.nonzero()[:, 0], len(row) / weight.numel())


def _sorted(weight: Tensor, among: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, numbers and sums before them (from ``above [r]`` on) of the entries ``among [r, c]``, row by row in
    descending order of weight, the lower number of two equals first."""
    row, number = among.nonzero(as_tuple=True)
    mass = weight[row, number].double()
    order = mass.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    row, number, mass = row[order], number[order], mass[order]
    before = mass.cumsum(0) - mass
    first = torch.searchsorted(row, torch.arange(len(above), device=row.device))
    return row, number, before - before[first[row]] + above[row]
