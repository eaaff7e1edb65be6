"""Cluster statistics of one layer and head, written by organisers and read by retrievers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Prefix of organiser columns in a state.
_COLUMN = "column."
_OWN = ("mean", "value_mean", "variance", "count", "partition", "latest", "uid", "block")
_STORED = (*_OWN, "of_token")
_MEANS = ("mean", "value_mean")


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Tokens of one layer and head, in time order.

    * ``key``, ``value`` ``[t, D]``; keys before rotary
    * ``frame`` ``[t]`` int64: number of the frame
    * ``partition`` ``[t]`` int64: visual partition of the token's frame, 0 without partitions

    Raises:
        ValueError: inconsistent shapes.
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    partition: Tensor

    def __post_init__(self) -> None:
        count = len(self.key)
        if self.key.ndim != 2 or self.value.shape != self.key.shape:
            raise ValueError(f"keys {tuple(self.key.shape)} and values {tuple(self.value.shape)} must both be [t, D]")
        if self.frame.shape != (count,) or self.partition.shape != (count,):
            raise ValueError(f"every one of the {count} tokens needs a frame and a partition")

    def __len__(self) -> int:
        return len(self.key)


def _statistics(key: Tensor, value: Tensor, frame: Tensor, group: Tensor, groups: int) -> dict[str, Tensor]:
    """Table columns for tokens assigned to ``group`` ``[t]``, 0 to ``groups - 1``, none of them empty."""
    count = torch.bincount(group, minlength=groups)
    wide = key.float()

    def averaged(of: Tensor) -> Tensor:
        return of.new_zeros(groups, *of.shape[1:]).index_add_(0, group, of) / count.view(-1, *[1] * (of.ndim - 1))

    mean = averaged(wide)
    latest = count.new_zeros(groups).scatter_reduce_(0, group, frame.to(torch.int64), "amax", include_self=False)
    return {
        "count": count,
        "mean": _rounded(mean),
        "value_mean": _rounded(averaged(value.float())),
        "variance": averaged((wide - mean[group]).square().sum(1)),
        "latest": latest,
    }


class ClusterTable:
    """``c`` clusters, indexed densely, of ``n`` tokens, indexed in time order.

    * ``mean``, ``value_mean`` ``[c, D]`` float32 of the members' keys and values, rounded to float16 as in storage;
      ``value_mean`` has width 0 unless ``values``
    * ``variance`` ``[c]`` float32: mean squared distance of the members' keys to ``mean``
    * ``count`` ``[c]`` int64: number of members; ``latest`` ``[c]`` int64: largest frame number of a member
    * ``partition`` ``[c]`` int64: of the token that founded the cluster
    * ``uid`` ``[c]`` int64, ascending: stable over the cluster's life and never reused in this table
    * ``block`` ``[c]`` int64: number of the block that holds the members, set by the writer of blocks
    * ``of_token`` ``[n]`` int64: cluster of each token
    * ``columns``: an organiser's state per cluster, ``[c, ...]`` each; zeros for new clusters

    Statistics are up to date after every call. All tensors are on the CPU.
    """

    def __init__(self, width: int, *, values: bool = False) -> None:
        self.mean = torch.zeros(0, width)
        self.value_mean = torch.zeros(0, width if values else 0)
        self.variance = torch.zeros(0)
        # May be shared: empty columns are replaced, not written in place.
        self.count = self.partition = self.latest = self.uid = self.block = torch.zeros(0, dtype=torch.int64)
        self.of_token = torch.zeros(0, dtype=torch.int64)
        self.columns: dict[str, Tensor] = {}
        self.next_uid = 0

    def __len__(self) -> int:
        return len(self.count)

    @property
    def tokens(self) -> int:
        return len(self.of_token)

    @property
    def nbytes(self) -> int:
        """Upper bound of the size of :meth:`state`."""
        tensors = [getattr(self, name) for name in _STORED] + list(self.columns.values())
        whole: int = sum(tensor.numel() * min(4, tensor.itemsize) for tensor in tensors)
        halved = 2 * (self.mean.numel() + self.value_mean.numel())
        # Block numbers take 64 bits.
        return whole + 4 * len(self) - halved

    def add(self, tokens: NewTokens, cluster: Tensor) -> None:
        """Assign tokens to ``cluster`` ``[t]``; indices from ``len(self)`` on found new clusters.

        Means and variances are merged by Welford's update (Mosaic, eq. 3, 4), a whole group at a time. ``ValueError``
        unless there is one non-negative index per token and new indices have no gaps.
        """
        if cluster.shape != (len(tokens),):
            raise ValueError(f"{len(tokens)} tokens join as many clusters, not {tuple(cluster.shape)}")
        if not len(cluster):
            return
        joined, group = torch.unique(cluster, return_inverse=True)
        fresh = int((joined >= len(self)).sum())
        if int(joined[0]) < 0 or (fresh and int(joined[-1]) != len(self) + fresh - 1):
            raise ValueError("new clusters must be numbered without gaps")
        new = _statistics(tokens.key, self._counted(tokens.value), tokens.frame, group, len(joined))
        if fresh:
            first = torch.full_like(joined, len(tokens)).scatter_reduce_(0, group, torch.arange(len(tokens)), "amin")
            self._grow(tokens.partition[first[-fresh:]])
        before = self.count[joined]
        total = before + new["count"]
        share = new["count"] / total
        apart = new["mean"] - self.mean[joined]
        between = apart.square().sum(1) * share * (1 - share)
        self.variance[joined] += (new["variance"] - self.variance[joined]) * share + between
        self.mean[joined] = _rounded(self.mean[joined] + apart * share[:, None])
        between_values = new["value_mean"] - self.value_mean[joined]
        self.value_mean[joined] = _rounded(self.value_mean[joined] + between_values * share[:, None])
        self.count[joined] = total
        self.latest[joined] = torch.where(before > 0, self.latest[joined].maximum(new["latest"]), new["latest"])
        self.of_token = torch.cat([self.of_token, cluster.to(torch.int64)])

    def members(self, cluster: int) -> Tensor:
        """Indices of a cluster's tokens, in time order."""
        return (self.of_token == cluster).nonzero()[:, 0]

    def order(self) -> Tensor:
        """Token indices sorted by cluster, then time."""
        return self.of_token.argsort(stable=True)

    def keep_tokens(self, kept: Tensor, key: Tensor, value: Tensor, frame: Tensor) -> Tensor:
        """Keep only the tokens ``kept`` ``[m]`` (ascending), with ``key``, ``value`` ``[m, D]`` and ``frame`` ``[m]``.
        Tokens and clusters are reindexed densely; uids stay.

        Returns which clusters ``[c']``, in the new order, lost members. Their statistics are recomputed from the
        arguments; other clusters keep theirs. ``ValueError`` if ``kept`` is out of range or not ascending.
        """
        if len(kept) and (int(kept[0]) < 0 or int(kept[-1]) >= self.tokens or bool((kept[1:] <= kept[:-1]).any())):
            raise ValueError(f"the tokens to keep must be ascending numbers below {self.tokens}")
        stays = self.of_token[kept]
        count = torch.bincount(stays, minlength=len(self))
        lost = count < self.count
        alive = (count > 0).nonzero()[:, 0]
        number = torch.full_like(self.count, -1)
        number[alive] = torch.arange(len(alive))
        self._take(alive)
        self.of_token = number[stays]
        touched = lost[alive]
        again = touched.nonzero()[:, 0]
        if len(again):
            rank = torch.full_like(touched, -1, dtype=torch.int64)
            rank[again] = torch.arange(len(again))
            group = rank[self.of_token]
            of = (group >= 0).nonzero()[:, 0]
            self._set(again, _statistics(key[of], self._counted(value[of]), frame[of], group[of], len(again)))
        return touched

    def split_cluster(self, cluster: int, leave: Tensor, key: Tensor, value: Tensor, frame: Tensor) -> int:
        """Move the members where ``leave`` ``[n]`` is True to a new cluster of the same partition; returns its index.
        ``key``, ``value`` ``[n, D]``, ``frame`` ``[n]``: in the members' order. ``ValueError`` unless there is one row
        per member and neither part is empty."""
        members = self.members(cluster)
        if leave.shape != members.shape or len(key) != len(members):
            raise ValueError(f"a cluster of {len(members)} tokens cannot be divided by {tuple(leave.shape)}")
        if not bool(leave.any()) or bool(leave.all()):
            raise ValueError("a cluster must be divided into two non-empty parts")
        new = len(self)
        self._grow(self.partition[cluster : cluster + 1])
        self.of_token[members[leave]] = new
        self._set(torch.tensor([cluster, new]), _statistics(key, self._counted(value), frame, leave.to(torch.int64), 2))
        return new

    def merge_clusters(self, cluster: int, others: Tensor) -> None:
        """Merge the newer clusters ``others`` ``[m]`` (else ``ValueError``) into ``cluster``, with statistics as in
        :meth:`add`; clusters are reindexed densely."""
        if bool((others <= cluster).any()):
            raise ValueError("a cluster can only be merged into an older one")
        parts = torch.cat([others.new_tensor([cluster]), others])
        count = self.count[parts].float()
        share = (count / count.sum())[:, None]
        mean = (self.mean[parts] * share).sum(0)
        apart = (self.mean[parts] - mean).square().sum(1)
        self.variance[cluster] = ((self.variance[parts] + apart) * share[:, 0]).sum()
        self.mean[cluster] = _rounded(mean)
        self.value_mean[cluster] = _rounded((self.value_mean[parts] * share).sum(0))
        self.count[cluster] = self.count[parts].sum()
        self.latest[cluster] = self.latest[parts].max()
        stays = torch.ones(len(self), dtype=torch.bool)
        stays[others] = False
        number = stays.cumsum(0) - 1
        number[others] = cluster
        self.of_token = number[self.of_token]
        self._take(stays.nonzero()[:, 0])

    def subset(self, clusters: Tensor) -> Self:
        """A table of only ``clusters [m]``, ascending, and their tokens."""
        other = copy.copy(self)
        other._take(clusters)
        number = torch.full((len(self),), -1, dtype=torch.int64)
        number[clusters] = torch.arange(len(clusters))
        place = number[self.of_token]
        other.of_token = place[place >= 0]
        return other

    def copy(self) -> Self:
        other = copy.copy(self)
        for name in _STORED:
            setattr(other, name, getattr(self, name).clone())
        other.columns = {name: column.clone() for name, column in self.columns.items()}
        return other

    def validate(self) -> None:
        """Raise ``ValueError`` if the table is inconsistent."""
        columns = [getattr(self, name) for name in _OWN] + list(self.columns.values())
        if any(len(column) != len(self) for column in columns):
            raise ValueError("columns of different lengths")
        if self.tokens and not 0 <= int(self.of_token.min()) <= int(self.of_token.max()) < len(self):
            raise ValueError("tokens in clusters that do not exist")
        if not torch.equal(torch.bincount(self.of_token, minlength=len(self)), self.count):
            raise ValueError("cluster counts do not match their members")
        if bool((self.uid[1:] <= self.uid[:-1]).any()) or (len(self) and int(self.uid[-1]) >= self.next_uid):
            raise ValueError("uids do not ascend")

    def state(self) -> dict[str, Tensor]:
        """Tensors by name for :meth:`restore`: copies, means as float16, integers :func:`narrowed`."""
        named = {name: narrowed(getattr(self, name)) for name in _STORED}
        named |= {name: named[name].half() for name in _MEANS}
        named |= {_COLUMN + name: narrowed(column) for name, column in self.columns.items()}
        return named | {"next_uid": torch.tensor(self.next_uid)}

    @classmethod
    def restore(cls, state: Mapping[str, Tensor]) -> Self:
        """Inverse of :meth:`state`; ``ValueError`` if a tensor is missing."""
        missing = {*_STORED, "next_uid"} - set(state)
        if missing:
            raise ValueError(f"the state of a cluster table lacks {', '.join(sorted(missing))}")
        table = cls(state["mean"].shape[1])
        for name in _STORED:
            setattr(table, name, state[name].float() if name in _MEANS else widened(state[name]))
        table.columns = {
            name.removeprefix(_COLUMN): widened(column) for name, column in state.items() if name.startswith(_COLUMN)
        }
        table.next_uid = int(state["next_uid"])
        return table

    def _grow(self, partition: Tensor) -> None:
        """Append an empty cluster for each entry of ``partition``."""
        fresh = len(partition)
        uid = torch.arange(self.next_uid, self.next_uid + fresh)
        self.next_uid += fresh
        given = {"partition": partition, "uid": uid}
        for name in _OWN:
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, given.get(name, old.new_zeros(fresh, *old.shape[1:]))]))
        self.columns = {
            name: torch.cat([old, old.new_zeros(fresh, *old.shape[1:])]) for name, old in self.columns.items()
        }

    def _take(self, clusters: Tensor) -> None:
        for name in _OWN:
            setattr(self, name, getattr(self, name)[clusters])
        self.columns = {name: column[clusters] for name, column in self.columns.items()}

    def _set(self, clusters: Tensor, stats: Mapping[str, Tensor]) -> None:
        for name, column in stats.items():
            getattr(self, name)[clusters] = column

    def _counted(self, value: Tensor) -> Tensor:
        """``value``, cut to width 0 if value means are not kept."""
        return value[:, : self.value_mean.shape[1]]


def _rounded(mean: Tensor) -> Tensor:
    return mean.half().float()


def narrowed(tensor: Tensor) -> Tensor:
    """A copy, with integers in the smallest of 16, 32 and 64 bits that holds them."""
    if tensor.dtype in (torch.int64, torch.int32):
        most = int(tensor.abs().max()) if tensor.numel() else 0
        fits = [dtype for dtype in (torch.int16, torch.int32) if most <= torch.iinfo(dtype).max]
        return tensor.to(fits[0] if fits else tensor.dtype, copy=True)
    return tensor.clone()


def widened(tensor: Tensor) -> Tensor:
    """A copy, with narrowed integers back in 64 bits."""
    return tensor.to(torch.int64 if tensor.dtype in (torch.int16, torch.int32) else tensor.dtype, copy=True)
