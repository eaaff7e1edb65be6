"""The clusters whose means are nearest to the question: among all, or within the nearest partitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import HeadRetriever


class TopK(HeadRetriever):
    """Top-k clusters of each head; with single-token clusters this is InfiniGen-P (V-Rex, section VI-B) with exact
    scores.

    Selects the highest-scoring clusters until their tokens reach a budget, including the one that reaches it. A
    cluster's score is the largest dot product of any row with its mean; ties go to the lower index.

    Args:
        share: budget as a share of all tokens, 0 to 1 (else ``ConfigError``).
        tokens: budget in tokens instead, 0 or more (else ``ConfigError``).
    """

    def __init__(self, *, share: float = 0.1, tokens: int | None = None) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of tokens to retrieve is between 0 and 1, not {share:g}")
        if tokens is not None and tokens < 0:
            raise ConfigError(f"the number of tokens to retrieve is 0 or more, not {tokens}")
        self.share, self.tokens = share, tokens

    def select(self, query: Tensor, table: ClusterTable) -> Tensor:
        if not len(table) or not len(query):
            return torch.zeros(0, dtype=torch.int64)
        order = best_scores(query, table.mean).argsort(descending=True, stable=True)
        count = table.count[order]
        budget = self.share * table.tokens if self.tokens is None else self.tokens
        taken = count.cumsum(0) - count < budget
        return order[taken].sort().values

    def for_prediction(self) -> TopK:
        """With twice the budget."""
        return TopK(share=min(1.0, 2 * self.share), tokens=None if self.tokens is None else 2 * self.tokens)


class TwoStage(HeadRetriever):
    """Two-stage retrieval (Mosaic, section V-C): the partitions nearest to the question, then the nearest clusters
    within them.

    A partition's representative is the mean of its members' keys at this layer, which makes it comparable with the
    layer's query. Scores are the largest dot product of any row; ties go to the lower index. The paper reads 64 frames
    (section VIII-A), which means little when frames are pruned; here it is a share.

    Args:
        partitions: number (int) or share of all (float up to 1, rounded up); ``ConfigError`` otherwise.
        clusters: likewise, of the clusters in those partitions.
        representatives: whether the other clusters are read as their mean (section V-C, global representatives; the
            paper also reads the means of selected clusters beside their members).
    """

    def __init__(
        self, *, partitions: int | float = 0.75, clusters: int | float = 0.25, representatives: bool = True
    ) -> None:
        for name, wanted in (("partitions", partitions), ("clusters", clusters)):
            if isinstance(wanted, bool) or wanted <= 0 or (isinstance(wanted, float) and not wanted <= 1):
                raise ConfigError(f"{name} is a number from 1 (int) or a share up to 1.0 (float), not {wanted!r}")
        self.partitions, self.clusters, self.representatives = partitions, clusters, representatives

    def select(self, query: Tensor, table: ClusterTable) -> Tensor:
        if not len(table) or not len(query):
            return torch.zeros(0, dtype=torch.int64)
        numbers, inside = torch.unique(table.partition, return_inverse=True)
        weight = table.count.float()
        tokens = weight.new_zeros(len(numbers)).index_add_(0, inside, weight)
        summed = table.mean.new_zeros(len(numbers), table.mean.shape[1])
        summed.index_add_(0, inside, table.mean * weight[:, None])
        near = _first(best_scores(query, summed / tokens[:, None]), self.partitions)
        looked = torch.isin(inside, near).nonzero()[:, 0]
        best = looked[_first(best_scores(query, table.mean[looked]), self.clusters)]
        return best.sort().values


def _first(scores: Tensor, wanted: int | float) -> Tensor:
    """Indices of the highest ``scores``: ``wanted`` of them (int), or that share (float)."""
    count = wanted if isinstance(wanted, int) else math.ceil(wanted * len(scores))
    return scores.argsort(descending=True, stable=True)[:count]


def best_scores(query: Tensor, mean: Tensor) -> Tensor:
    """Largest dot product of any row of ``query [r, D]`` with each of ``mean [c, D]``: ``[c]``."""
    return (query.float() @ mean.float().mT).amax(0)
