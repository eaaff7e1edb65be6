"""Organisers: assign each new token of a head to a cluster, so that retrieval fetches clusters instead of tokens."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from cluster.memory.organise.table import ClusterTable, NewTokens

__all__ = ["AtHand", "ClusterTable", "NewTokens", "Organiser"]

AtHand = Callable[[Tensor], Tensor]
"""Cluster indices ``[m]`` -> ``[m]`` bool: whether their members are resident; False if offloaded."""


class Organiser(ABC):
    """Clusters the tokens of one layer and head. ``width``: of a key; options are keyword arguments with defaults.

    Per-cluster state is kept in ``table.columns``, which the table's ``keep_tokens``, ``state`` and ``restore`` handle.
    To resume, create an organiser with the same options, set its restored table and call ``load_state``. All
    computation is on the CPU.
    """

    # Whether it uses visual partitions, which are computed only on demand.
    wants_partitions: ClassVar[bool] = False
    # Whether the table also keeps the mean of each cluster's values.
    wants_values: ClassVar[bool] = False
    # Whether compression drops whole clusters, so that blocks are never rewritten.
    written_once: ClassVar[bool] = False

    def __init__(self, width: int) -> None:
        self.table = ClusterTable(width, values=self.wants_values)

    def copy(self) -> Self:
        other = copy.copy(self)
        other.table = self.table.copy()
        return other

    @abstractmethod
    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        """Assign tokens, in time order, to clusters ``[t]`` int64. ``at_hand``: joining an offloaded cluster would take
        a transfer. Never moves existing tokens: clusters to be split or merged are marked ``pending``."""

    @property
    def pending(self) -> Tensor:
        """``[c]`` bool: clusters to ``merge`` and ``split`` once their members are loaded."""
        return torch.zeros(len(self.table), dtype=torch.bool)

    def founded_for(self, cluster: int) -> Tensor:
        """Clusters founded for tokens that would have joined ``cluster`` had it not been offloaded; ascending, above
        its index."""
        del cluster
        return torch.zeros(0, dtype=torch.int64)

    def merge(self, cluster: int, others: Tensor) -> None:
        """Merge ``others [m]``, founded for a cluster, into it; its index and the tokens' stay."""
        self.table.merge_clusters(cluster, others)

    def split(self, cluster: int, key: Tensor, value: Tensor, frame: Tensor) -> int | None:
        """Split a cluster with the members ``key``, ``value`` ``[n, D]`` and ``frame`` ``[n]``, in token order, in two
        and clear its mark; parts that still need splitting are marked again.

        Returns the index of the new cluster, the table's last; the part with the oldest member keeps index and uid.
        None if no split is needed, and always for organisers that mark none.
        """
        del cluster, key, value, frame
        return None

    def state(self) -> dict[str, Tensor]:
        """State outside the table."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        del state
