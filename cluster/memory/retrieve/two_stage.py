"""Two-stage retrieval (Mosaic, section V): partitions first, then clusters within them."""

import math

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retrieved, Retriever, best_scores


class TwoStage(Retriever):
    """The partitions nearest to the question, and the nearest of their clusters.

    A partition's representative is the mean of its members' keys at this layer, so that the layer's query can be
    compared with it. Scores are the largest dot product of any row; of equal scores the lower number comes first.

    Args:
        partitions: how many, as a number (int) or as a share of those that there are (float up to 1, rounded up).
        clusters: likewise, of the clusters inside them.
        representatives: whether all other clusters are read as their mean (section V, global representatives).

    Raises:
        ConfigError: neither a positive number nor a share.
    """

    def __init__(
        self, *, partitions: int | float = 0.75, clusters: int | float = 0.25, representatives: bool = True
    ) -> None:
        for name, wanted in (("partitions", partitions), ("clusters", clusters)):
            if isinstance(wanted, bool) or wanted <= 0 or (isinstance(wanted, float) and not wanted <= 1):
                raise ConfigError(f"{name} is a number from 1 (int) or a share up to 1.0 (float), not {wanted!r}")
        self.partitions, self.clusters, self.representatives = partitions, clusters, representatives

    def select(self, query: Tensor, table: ClusterTable) -> Retrieved:
        if not len(table) or not len(query):
            return Retrieved.nothing(table.mean.device)
        numbers, inside = torch.unique(table.partition, return_inverse=True)
        weight = table.count.float()
        tokens = weight.new_zeros(len(numbers)).index_add_(0, inside, weight)
        summed = table.mean.new_zeros(len(numbers), table.mean.shape[1])
        summed.index_add_(0, inside, table.mean * weight[:, None])
        near = _first(best_scores(query, summed / tokens[:, None]), self.partitions)
        looked = torch.isin(inside, near).nonzero()[:, 0]
        best = looked[_first(best_scores(query, table.mean[looked]), self.clusters)]
        return Retrieved(best.sort().values, len(looked) / len(table))


def _first(scores: Tensor, wanted: int | float) -> Tensor:
    """Numbers of the highest of ``scores``: ``wanted`` of them, or that share."""
    count = wanted if isinstance(wanted, int) else math.ceil(wanted * len(scores))
    return scores.argsort(descending=True, stable=True)[:count]
