"""Organisers, one per file: cluster remembered tokens, so that retrieval fetches clusters instead of tokens.

An organiser assigns each token of a head to a cluster as it arrives.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cluster.memory.organise.table import ClusterTable, NewTokens

__all__ = ["ClusterTable", "Members", "NewTokens", "Organiser"]

Members = Callable[[int], Tensor | None]
"""Keys ``[n, D]`` of a cluster's members before the tokens that come, in time order; None where they are offloaded."""


class Organiser(ABC):
    """Clusters the tokens of one layer and head. ``width``: of a key; options are keyword arguments with defaults.

    Per-cluster state lies in ``table.columns``, which the table's ``keep_tokens``, ``state`` and ``restore`` carry
    along. To resume, create an organiser with the same options, set its restored table and call ``load_state``. All
    computation is on the table's device (CPU unless ``table.to`` moves it).
    """

    # Whether it uses visual partitions, which are computed only then.
    wants_partitions: ClassVar[bool] = False
    # Whether it summarises clusters by the mean of their values, too.
    wants_values: ClassVar[bool] = False

    def __init__(self, width: int) -> None:
        self.table = ClusterTable(width, values=self.wants_values)

    def copy(self) -> Organiser:
        """An independent copy over the same clusters."""
        other = copy.copy(self)
        other.table = self.table.copy()
        return other

    @abstractmethod
    def add(self, tokens: NewTokens, members: Members) -> Tensor:
        """Assign tokens to clusters, in time order.

        Never moves existing tokens: a cluster to be split is marked in ``pending``.

        Returns:
            ``[t]`` int64: the cluster of each token.
        """

    @property
    def pending(self) -> Tensor:
        """``[c]`` bool: clusters to ``split`` as soon as their members are loaded."""
        return torch.zeros(len(self.table), dtype=torch.bool, device=self.table.device)

    def split(self, cluster: int, key: Tensor, value: Tensor, frame: Tensor) -> int | None:
        """Split a cluster in two and clear its mark; parts that still need a split are marked again.

        Args:
            cluster: its number.
            key: of its members in token order ``[n, D]``; value: likewise; frame: ``[n]``.

        Returns:
            Number of the new cluster, ``len(table) - 1`` from now on. The part with the oldest member keeps the number
            and the uid. None where there was no need to split, and always for an organiser that marks none.
        """
        del cluster, key, value, frame
        return None

    def state(self) -> dict[str, Tensor]:
        """State that is not in the table."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        del state
