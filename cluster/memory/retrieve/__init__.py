"""Retrievers: which clusters a question reads.

A retriever implements :meth:`Retriever.select_layer`, which selects clusters for all heads of a layer; if heads are
independent, a :class:`HeadRetriever` implements :meth:`Retriever.select` instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from cluster.memory.organise.table import ClusterTable


class Retriever(ABC):
    """Selects clusters for query rows. Options are keyword arguments with defaults.

    ``representatives``: whether clusters not selected are read as their mean key and value, if the organiser keeps
    these (``wants_values``).
    """

    representatives: bool = False

    def select(self, query: Tensor, table: ClusterTable) -> Tensor:
        """Clusters ``[m]`` int64, ascending, for the query rows ``[r, D]`` of one key head, before rotary like the
        means. An empty table or no rows select nothing. Default: :meth:`select_layer` with one head."""
        return self.select_layer(query[None], [table])[0]

    @abstractmethod
    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        """Select for the query rows ``[H, r, D]`` of all key heads of a layer, one table each."""

    def select_groups(self, query: Tensor, sizes: Sequence[int], tables: Sequence[ClusterTable]) -> list[Tensor]:
        """Apply :meth:`select_layer` to each group of consecutive rows, ``sizes`` per head, separately; per head, which
        group reads which cluster ``[F, c]`` bool."""
        chosen = [torch.zeros(len(sizes), len(table), dtype=torch.bool) for table in tables]
        for group, rows in enumerate(torch.split(query, list(sizes), dim=1)):
            for of_head, found in zip(chosen, self.select_layer(rows, tables), strict=True):
                of_head[group, found] = True
        return chosen

    def for_prediction(self) -> Self:
        """The retriever for predicted queries, by default this one. It should select more: one unpredicted block costs
        as long a wait as a whole layer's."""
        return self


class HeadRetriever(Retriever):
    """Selects for each head independently."""

    @abstractmethod
    def select(self, query: Tensor, table: ClusterTable) -> Tensor: ...

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        return [self.select(rows, table) for rows, table in zip(query, tables, strict=True)]
