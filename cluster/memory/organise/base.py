"""What an organiser is: it puts every token of a head into a cluster, as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cluster.registry import Registry


class ClusterTable:
    """Clusters of one layer and head: ``mean [c, D]`` float32 and ``count [c]`` of their keys, and whose each token is.

    Means are kept up by Welford's update, so that a cluster that grows costs one addition per token.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.mean = torch.zeros(0, width, device=device)
        self.count = torch.zeros(0, dtype=torch.int64, device=device)
        self.of_token = torch.zeros(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.count)

    def add(self, key: Tensor, cluster: Tensor) -> None:
        """Tokens ``key [t, D]`` join ``cluster [t]``; a number not seen before founds one.

        Raises:
            ValueError: a cluster's number leaves out those before it.
        """
        if not len(cluster):
            return
        total = max(len(self), int(cluster.max()) + 1)
        joined = torch.bincount(cluster, minlength=total)
        if bool((joined[len(self) :] == 0).any()):
            raise ValueError("new clusters must be numbered without gaps")
        fresh = total - len(self)
        mean = torch.cat([self.mean, self.mean.new_zeros(fresh, self.mean.shape[1])])
        count = torch.cat([self.count, self.count.new_zeros(fresh)])
        apart = torch.zeros_like(mean).index_add_(0, cluster, key.float() - mean[cluster])
        self.count = count + joined
        self.mean = mean + apart / self.count[:, None]
        self.of_token = torch.cat([self.of_token, cluster])

    def members(self, cluster: int) -> Tensor:
        """Numbers of a cluster's tokens, in time order."""
        return (self.of_token == cluster).nonzero()[:, 0]

    def order(self) -> Tensor:
        """All tokens, such that those of one cluster lie together, clusters in order and each in time order."""
        return self.of_token.argsort(stable=True)


class Organiser(ABC):
    """Groups the tokens of one layer and head."""

    def __init__(self, width: int) -> None:
        self.table = ClusterTable(width)

    @abstractmethod
    def add(self, key: Tensor, frame: Tensor) -> None:
        """Take in tokens ``key [t, D]`` of frames ``frame [t]``, in time order."""


organisers: Registry[type[Organiser]] = Registry("organiser")
