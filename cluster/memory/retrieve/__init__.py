"""Retrievers: which clusters a question reads.

A retriever implements :meth:`Retriever.select_layer`, which returns cluster numbers of all heads of a layer; where each
head chooses for itself, a :class:`HeadRetriever` implements :meth:`Retriever.select`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from cluster.memory.organise.table import ClusterTable


class Retriever(ABC):
    """Selects clusters for query rows. Options are keyword arguments with defaults.

    ``representatives``: of clusters that are not selected, the mean key and value are read instead, where the organiser
    keeps them (``wants_values``).
    """

    representatives: bool = False

    def select(self, query: Tensor, table: ClusterTable) -> Tensor:
        """Clusters ``[m]`` int64, ascending, for the query rows ``[r, D]`` of one key head, before rotary like the
        means: here as a layer of one head. An empty table or no rows select nothing."""
        return self.select_layer(query[None], [table])[0]

    @abstractmethod
    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        """Select for the query rows ``[H, r, D]`` of all key heads of a layer, one table each."""

    def select_groups(self, query: Tensor, sizes: Sequence[int], tables: Sequence[ClusterTable]) -> list[Tensor]:
        """:meth:`select_layer` for groups of rows, so many of each head one after the other, each group for itself: per
        head, which group reads which cluster ``[F, c]`` bool."""
        chosen = [torch.zeros(len(sizes), len(table), dtype=torch.bool) for table in tables]
        for group, rows in enumerate(torch.split(query, list(sizes), dim=1)):
            for of_head, found in zip(chosen, self.select_layer(rows, tables), strict=True):
                of_head[group, found] = True
        return chosen

    def for_prediction(self) -> Self:
        """What selects for a predicted query. It selects more: one block that was not predicted costs as much waiting
        as a whole layer's. By default the same."""
        return self


class HeadRetriever(Retriever):
    """Selects for each head for itself."""

    @abstractmethod
    def select(self, query: Tensor, table: ClusterTable) -> Tensor: ...

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        return [self.select(rows, table) for rows, table in zip(query, tables, strict=True)]
