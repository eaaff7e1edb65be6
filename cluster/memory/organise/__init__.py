"""Organisers, one per file: how remembered tokens are grouped, so that a question fetches groups and not tokens.

What an organiser is: it puts every token of a head into a cluster, as they come.
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
    """Groups the tokens of one layer and head. ``width``: of a key; options are keyword arguments with defaults.

    What an organiser knows of each cluster lies in ``table.columns``, so that the table's ``keep``, ``state`` and
    ``restore`` carry it along; to go on from a state, make an organiser of the same options, give it the restored
    table and call ``load_state``. All runs on the table's device: the CPU, unless ``table.to`` moves it.
    """

    # Whether it goes by the visual partitions of frames: nobody sorts frames for those that do not.
    wants_partitions: ClassVar[bool] = False

    def __init__(self, width: int) -> None:
        self.table = ClusterTable(width)

    def copy(self) -> Organiser:
        """Another organiser that goes on from the same clusters."""
        other = copy.copy(self)
        other.table = self.table.copy()
        return other

    @abstractmethod
    def add(self, tokens: NewTokens, members: Members) -> Tensor:
        """Take in tokens, in time order.

        Never moves a token that is there already: a cluster that should be split is marked in ``pending``.

        Returns:
            ``[t]`` int64: the clusters that the tokens joined.
        """

    @property
    def pending(self) -> Tensor:
        """``[c]`` bool: clusters to ``split``, at once where their members are on the device, and else when they are
        next loaded."""
        return torch.zeros(len(self.table), dtype=torch.bool, device=self.table.device)

    def split(self, cluster: int, key: Tensor, value: Tensor, place: Tensor, frame: Tensor) -> int | None:
        """Split a cluster in two and clear its mark; parts that are still to be split are marked anew.

        Args:
            cluster: its number.
            key: of its members in token order ``[n, D]``; value: likewise; place: ``[n, 3]``; frame: ``[n]``.

        Returns:
            Number of the new cluster, ``len(table) - 1`` from now on. The part with the oldest member keeps the number
            and the uid. None where there was no need to split, and always for an organiser that marks none.
        """
        del cluster, key, value, place, frame
        return None

    def state(self) -> dict[str, Tensor]:
        """What is not in the table."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` gave."""
        del state
