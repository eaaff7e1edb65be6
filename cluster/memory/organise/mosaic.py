"""Mosaic clusters (sections V and VI): cosine clusters within a visual partition, split when their variance grows."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cluster.errors import ConfigError
from cluster.memory.organise import AtHand, NewTokens, Organiser


class VisualPartitions:
    """Online k-means by cosine similarity over one embedding per frame.

    A frame joins the partition with the most similar centre, or founds one if none is similar enough. Beyond ``limit``
    the least recently joined partition is closed: its clusters stay but take no more tokens (ours; the paper's videos
    are short). Centres are means of unit vectors.

    Args:
        width: of an embedding.
        limit: maximum number of open partitions, at least 1 (else ``ConfigError``).
        similarity: minimum cosine between a frame and the centre it joins, -1 to 1 (else ``ConfigError``).
    """

    def __init__(self, width: int, *, limit: int = 16, similarity: float = 0.6) -> None:
        if limit < 1 or not -1 <= similarity <= 1:
            raise ConfigError(f"partitions need a limit of at least 1 and a cosine, not {limit} and {similarity:g}")
        self.limit, self.similarity = limit, similarity
        # Least recently joined first.
        self.summed = torch.zeros(0, width)
        self.number = torch.zeros(0, dtype=torch.int64)
        self.founded = 0

    def __len__(self) -> int:
        return len(self.number)

    def add(self, embedding: Tensor) -> int:
        """Assign a frame by its ``embedding [D]``; returns its partition number."""
        unit = normalize(embedding.float(), dim=0)
        likeness = normalize(self.summed, dim=1) @ unit
        if not len(self) or float(likeness.amax()) < self.similarity:
            summed, number = unit, self.founded
            self.founded += 1
            keep = torch.arange(max(0, len(self) + 1 - self.limit), len(self))
        else:
            joined = int(likeness.argmax())
            summed, number = self.summed[joined] + unit, int(self.number[joined])
            keep = (torch.arange(len(self)) != joined).nonzero()[:, 0]
        self.summed = torch.cat([self.summed[keep], summed[None]])
        self.number = torch.cat([self.number[keep], self.number.new_tensor([number])])
        return number

    def state(self) -> dict[str, Tensor]:
        return {
            "summed": self.summed.clone(),
            "number": self.number.clone(),
            "founded": torch.tensor(self.founded),
            "limit": torch.tensor(self.limit),
            "similarity": torch.tensor(self.similarity, dtype=torch.float64),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor]) -> Self:
        made = cls(state["summed"].shape[1], limit=int(state["limit"]), similarity=float(state["similarity"]))
        made.summed, made.number = state["summed"].clone(), state["number"].clone()
        made.founded = int(state["founded"])
        return made


# Maximum number of iterations of two-means.
_ROUNDS = 10
# Cosine distance below which directions count as equal.
_SAME = 1e-6


def two_means(key: Tensor, weight: Tensor, group: Tensor, groups: int) -> Tensor:
    """Split each group of points ``key [n, D]`` in two by direction (2-means, each point weighted by ``weight [n]``).
    ``group [n]``: of each point, 0 to ``groups - 1``, none empty.

    Deterministic: starts from the point least similar to the mean, and the point least similar to that one.

    Returns ``[n]`` bool: the part without its group's first point; all False if all directions are equal.
    """
    unit = normalize(key.float(), dim=1)
    weighted = unit * weight[:, None]

    def summed(of: Tensor) -> Tensor:
        return of.new_zeros(groups, of.shape[1]).index_add_(0, group, of)

    def likeness(centres: Tensor) -> Tensor:
        return (unit * centres[group]).sum(1)

    one = unit[_first_least(likeness(summed(weighted)), group, groups)]
    apart = likeness(one)
    farthest = _first_least(apart, group, groups)
    differ = apart[farthest] <= 1 - _SAME
    side = likeness(unit[farthest]) > apart
    size = torch.bincount(group, minlength=groups)
    for _ in range(_ROUNDS):
        second = summed(weighted * side[:, None])
        first = summed(weighted * ~side[:, None])
        again = likeness(normalize(second, dim=1)) > likeness(normalize(first, dim=1))
        count = torch.bincount(group[again], minlength=groups)
        again = torch.where(((count > 0) & (count < size))[group], again, side)
        if bool((again == side).all()):
            break
        side = again
    oldest = _first_least(torch.zeros_like(apart), group, groups)
    return (side ^ side[oldest][group]) & differ[group]


def _first_least(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Index of the minimum of ``values [n]`` in each group; ties go to the first."""
    least = values.new_zeros(groups).scatter_reduce_(0, group, values, "amin", include_self=False)
    number = torch.arange(len(values))
    last = torch.full((groups,), len(values))
    among = values == least[group]
    return last.scatter_reduce_(0, group[among], number[among], "amin")


_PENDING, _OWNER = "pending", "owner"
# No owner.
_NOBODY = 0
_COUNTERS = ("splits", "deferred", "founded", "groupings", "merged")


class Mosaic(Organiser):
    """A token joins the most similar cluster (cosine to its mean) of its partition, unless that would make it invalid.

    Clusters are per head (the paper: per layer). A cluster of ``n`` tokens is invalid when the variance of its keys,
    relative to their mean squared norm, which varies between layers, exceeds
    ``tau(n) = tau_large - (tau_large - tau_small) * exp(-n / kappa)``. The tokens of one call that prefer the same
    cluster are tested together:

    * members resident: all tokens join, and a cluster that becomes invalid is marked for an immediate split;
    * members offloaded: the tokens found valid clusters of their own, retrieved like any other, which record the
      cluster they were founded for. That one is marked; if it would have become invalid, its split is deferred.

    When the members of a marked cluster are loaded, the clusters founded for it are merged into it, and it is split by
    two-means if then invalid (algorithm 1). The paper keeps apart only tokens that would make a cluster invalid. Here a
    cluster is one block, and joining an offloaded one would fetch and rewrite it, so no token does.

    The paper states a stricter threshold for small clusters, yet intends them to split less readily. On keys of real
    clips the latter works better: it finds more of the true top keys with as many clusters.

    Args:
        width: of a key.
        tau_small, tau_large: thresholds of the smallest and of large clusters, shares of the squared norm.
        kappa: cluster size at which 63 % of the way between them is covered, positive.
        defer: if False, splits are never deferred and all members must be resident.

    Attributes:
        splits: clusters split. deferred: splits deferred. founded: clusters founded by new tokens. groupings: splits
            among new tokens only, which move no stored token. merged: clusters merged into those they were founded for.

    Raises:
        ConfigError: an option is out of range.
    """

    wants_partitions = True
    wants_values = True

    def __init__(
        self,
        width: int,
        *,
        tau_small: float = 0.2,
        tau_large: float = 0.1,
        kappa: float = 32.0,
        defer: bool = True,
    ) -> None:
        super().__init__(width)
        if not (0 <= tau_small <= 1 and 0 <= tau_large <= 1 and kappa > 0):
            raise ConfigError(
                f"mosaic's thresholds are shares between 0 and 1 and its kappa is positive, not {tau_small:g}, "
                f"{tau_large:g} and {kappa:g}"
            )
        self.tau_small, self.tau_large, self.kappa, self.defer = tau_small, tau_large, kappa, defer
        self.splits = self.deferred = self.founded = self.groupings = self.merged = 0
        self.table.columns[_PENDING] = torch.zeros(0, dtype=torch.bool)
        # Uid + 1 of the cluster it was founded for; 0 if none.
        self.table.columns[_OWNER] = torch.zeros(0, dtype=torch.int64)

    @property
    def pending(self) -> Tensor:
        return self.table.columns[_PENDING]

    def state(self) -> dict[str, Tensor]:
        return {name: torch.tensor(getattr(self, name)) for name in _COUNTERS}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        """See the class; ``ValueError`` if ``defer`` is off and the members of a cluster to be split are offloaded."""
        key, table = tokens.key.float(), self.table
        cluster = torch.full((len(key),), -1)
        marked: list[int] = []
        # Tokens that found clusters, and the owner of those.
        outside: list[tuple[Tensor, int]] = []
        for partition in torch.unique(tokens.partition).tolist():
            which = (tokens.partition == partition).nonzero()[:, 0]
            there = (table.partition == partition).nonzero()[:, 0]
            if not len(there):
                outside.append((which, _NOBODY))
                continue
            likeness = normalize(key[which], dim=1) @ normalize(table.mean[there], dim=1).mT
            wanted = there[likeness.argmax(1)]
            cluster[which] = wanted
            invalid = self._invalidated(key[which], wanted)
            joined = torch.unique(wanted)
            absent = joined[~at_hand(joined)].tolist()
            deferred = [number for number in absent if number in invalid]
            if deferred and not self.defer:
                raise ValueError(f"cluster {deferred[0]} must be split, but its members are not loaded")
            self.deferred += len(deferred)
            marked += invalid
            if self.defer:
                marked += absent
                outside += [(which[wanted == number], int(table.uid[number]) + 1) for number in absent]
        known = len(table)
        owner = self._found(key, cluster, outside)
        table.add(tokens, cluster)
        table.columns[_OWNER][known:] = owner
        table.columns[_PENDING][marked] = True
        self.founded += len(owner)
        return cluster

    def founded_for(self, cluster: int) -> Tensor:
        return (self.table.columns[_OWNER] == self.table.uid[cluster] + 1).nonzero()[:, 0]

    def merge(self, cluster: int, others: Tensor) -> None:
        owner, uid = self.table.columns[_OWNER], self.table.uid
        # Clusters founded for the merged ones now belong to this one.
        owner[torch.isin(owner, uid[others] + 1)] = uid[cluster] + 1
        super().merge(cluster, others)
        self.merged += len(others)

    def split(self, cluster: int, key: Tensor, value: Tensor, frame: Tensor) -> int | None:
        table, wide = self.table, key.float()
        self.pending[cluster] = False
        if not bool(self._invalid(table.variance[cluster], table.mean[cluster], table.count[cluster])):
            return None
        leave = two_means(wide, wide.new_ones(len(wide)), torch.zeros_like(wide[:, 0], dtype=torch.int64), 1)
        if not bool(leave.any()):
            return None
        new = table.split_cluster(cluster, leave, key, value, frame)
        self.splits += 1
        for part in (cluster, new):
            self.pending[part] = self._invalid(table.variance[part], table.mean[part], table.count[part])
        return new

    def _tau(self, count: Tensor) -> Tensor:
        return self.tau_large - (self.tau_large - self.tau_small) * torch.exp(-count / self.kappa)

    def _invalid(self, variance: Tensor, mean: Tensor, count: Tensor) -> Tensor:
        """Whether clusters with these statistics are invalid; the mean squared norm is variance plus squared mean."""
        return variance > self._tau(count) * (variance + mean.square().sum(-1))

    def _invalidated(self, key: Tensor, wanted: Tensor) -> list[int]:
        """Clusters that would become invalid if all of ``key [t, D]`` joined the clusters they prefer."""
        joined, group = torch.unique(wanted, return_inverse=True)
        apart = key - self.table.mean[wanted]
        summed = apart.new_zeros(len(joined), apart.shape[1]).index_add_(0, group, apart)
        squares = apart.new_zeros(len(joined)).index_add_(0, group, apart.square().sum(1))
        invalid: list[int] = joined[self._after(joined, torch.bincount(group), summed, squares)].tolist()
        return invalid

    def _after(self, clusters: Tensor, joining: Tensor, summed: Tensor, squares: Tensor) -> Tensor:
        """Whether ``clusters [m]`` would be invalid after ``joining [m]`` tokens joined, given the sums of the tokens'
        differences from the mean ``[m, D]`` and of the squared differences ``[m]``."""
        table = self.table
        total = table.count[clusters] + joining
        shift = summed / total[:, None]
        spread = (table.variance[clusters] * table.count[clusters] + squares) / total
        return self._invalid((spread - shift.square().sum(1)).clamp(min=0), table.mean[clusters] + shift, total)

    def _found(self, key: Tensor, cluster: Tensor, outside: list[tuple[Tensor, int]]) -> Tensor:
        """Put the tokens ``outside`` into new clusters, splitting each group until valid. Writes their indices to
        ``cluster [t]``; returns each new cluster's owner ``[f]``."""
        lots = [(these, owner) for these, owner in outside if len(these)]
        owner = torch.tensor([owner for _, owner in lots], dtype=torch.int64)
        if not lots:
            return owner
        these = torch.cat([these for these, _ in lots])
        points = key[these]
        part = torch.cat([torch.full_like(lot, number) for number, (lot, _) in enumerate(lots)])
        # Tokens in groups that may need a split.
        left = torch.arange(len(these))
        while len(left):
            numbers, group = torch.unique(part[left], return_inverse=True)
            left = left[self._wide(points[left], group, len(numbers))[group]]
            numbers, group = torch.unique(part[left], return_inverse=True)
            side = two_means(points[left], torch.ones_like(left), group, len(numbers))
            divided = torch.zeros_like(numbers, dtype=torch.bool)
            divided[group[side]] = True
            part[left[side]] = (divided.cumsum(0) - 1 + len(owner))[group[side]]
            owner = torch.cat([owner, owner[numbers[divided]]])
            self.groupings += int(divided.sum())
            left = left[divided[group]]
        cluster[these] = len(self.table) + part
        return owner

    def _wide(self, key: Tensor, group: Tensor, groups: int) -> Tensor:
        """Whether groups of points would be invalid clusters ``[groups]``."""
        count = torch.bincount(group, minlength=groups)
        mean = key.new_zeros(groups, key.shape[1]).index_add_(0, group, key) / count[:, None]
        squares = (key - mean[group]).square().sum(1)
        return self._invalid(key.new_zeros(groups).index_add_(0, group, squares) / count, mean, count)
