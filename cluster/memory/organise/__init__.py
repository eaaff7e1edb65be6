"""Organisers: cluster remembered tokens, so that retrieval fetches clusters instead of tokens.

An organiser assigns each token of a head to a cluster as it arrives.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from cluster.memory.organise.table import ClusterTable, NewTokens

__all__ = ["AtHand", "ClusterTable", "NewTokens", "Organiser"]

AtHand = Callable[[Tensor], Tensor]
"""Numbers of clusters ``[m]`` -> ``[m]`` bool: whether their members are at hand, or offloaded."""


class Organiser(ABC):
    """Clusters the tokens of one layer and head. ``width``: of a key; options are keyword arguments with defaults.

    Per-cluster state lies in ``table.columns``, which the table's ``keep_tokens``, ``state`` and ``restore`` carry
    along. To resume, create an organiser with the same options, set its restored table and call ``load_state``. All
    computation is on the CPU.
    """

    # Whether it uses visual partitions, which are computed only then.
    wants_partitions: ClassVar[bool] = False
    # Whether it summarises clusters by the mean of their values, too.
    wants_values: ClassVar[bool] = False
    # Whether a compression drops whole clusters, so that no block is written again.
    written_once: ClassVar[bool] = False

    def __init__(self, width: int) -> None:
        self.table = ClusterTable(width, values=self.wants_values)

    def copy(self) -> Self:
        other = copy.copy(self)
        other.table = self.table.copy()
        return other

    @abstractmethod
    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        """Assign tokens, in time order, to clusters ``[t]`` int64. ``at_hand``: a cluster that is offloaded cannot be
        joined without a transfer.

        Never moves existing tokens: a cluster to be split or merged with others is marked in ``pending``.
        """

    @property
    def pending(self) -> Tensor:
        """``[c]`` bool: clusters to ``merge`` and ``split`` as soon as their members are loaded."""
        return torch.zeros(len(self.table), dtype=torch.bool)

    def founded_for(self, cluster: int) -> Tensor:
        """Numbers of the clusters that hold what a cluster should have taken while it was offloaded, ascending and
        above its own."""
        del cluster
        return torch.zeros(0, dtype=torch.int64)

    def merge(self, cluster: int, others: Tensor) -> None:
        """Merge ``others [m]``, founded for a cluster, into it; its number stays, and so do the tokens'."""
        self.table.merge_clusters(cluster, others)

    def split(self, cluster: int, key: Tensor, value: Tensor, frame: Tensor) -> int | None:
        """Split a cluster with the members ``key``, ``value`` ``[n, D]`` and ``frame`` ``[n]``, in token order, in two
        and clear its mark; parts that still need a split are marked again.

        Returns the number of the new cluster, ``len(table) - 1`` from now on: the part with the oldest member keeps the
        number and the uid. None where there was no need to split, and always for an organiser that marks none.
        """
        del cluster, key, value, frame
        return None

    def state(self) -> dict[str, Tensor]:
        """State that is not in the table."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        del state
