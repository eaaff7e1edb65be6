"""WiCSum (V-Rex, section 4): as many clusters as hold a share of the expected attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retrieved, Retriever

# Clusters sorted first; doubled until sufficient.
_FIRST = 16


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
    sum exceeds its share, and the rows' choices are united. Of equal weights the lower number comes first. A full sort
    is not needed: only the heaviest are put in order, twice as many whenever some row has not got enough.

    Args:
        query: ``[r, D]``, rotated or not as the means are.
        mean: representatives ``[c, D]``; count: tokens of each ``[c]``.
        ratio: share of the sum, 0 to 1; at 1 everything is taken.

    Raises:
        ValueError: the ratio is no share.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"the ratio is a share, not {ratio}")
    clusters = len(mean)
    if not clusters or not len(query):
        return Retrieved.nothing(mean.device)
    scores = query.float() @ mean.float().mT / math.sqrt(query.shape[1])
    weight = (scores - scores.amax(1, keepdim=True)).exp() * count
    wanted = ratio * weight.sum(1, keepdim=True)
    looked = min(_FIRST, clusters)
    while True:
        # Stable, so that ties do not depend on the number sorted.
        top = _heaviest(weight, looked)
        running = weight.gather(1, top).cumsum(1)
        if looked == clusters or (ratio < 1 and bool((running[:, -1:] > wanted).all())):
            break
        looked = min(2 * looked, clusters)
    # The cluster with which a row exceeds its share is its last.
    taken = (running - weight.gather(1, top)) <= wanted
    chosen = torch.zeros(clusters, dtype=torch.bool, device=mean.device)
    chosen[top[taken]] = True
    return Retrieved(chosen.nonzero()[:, 0], looked / clusters)


def _heaviest(weight: Tensor, count: int) -> Tensor:
    """Numbers ``[r, count]`` of the largest entries of each row, in descending order, the lower of two equals first."""
    if count == weight.shape[1]:
        return weight.argsort(dim=1, descending=True, stable=True)
    least = weight.topk(count, dim=1).values[:, -1:]
    # Of ties at the threshold, the lowest numbers are taken.
    above = weight > least
    equal = weight == least
    room = count - above.sum(1, keepdim=True)
    among = above | (equal & (equal.cumsum(1) <= room))
    numbers = among.nonzero()[:, 1].view(len(weight), count)
    order = weight.gather(1, numbers).argsort(dim=1, descending=True, stable=True)
    return numbers.gather(1, order)
