"""ReSV clusters (V-Rex, section IV-B): keys whose hash is within a Hamming distance of a founder's."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import ConfigError
from cluster.memory.organise import AtHand, NewTokens, Organiser

_BITS = "bits"


class ReSV(Organiser):
    """A token joins the nearest cluster within a Hamming distance, or else founds one with its own hash bits.

    Keys are hashed before rotary, so the same thing at the same place hashes alike at any time; the paper hashes
    rotated keys, which drift apart over time. Raw keys of a head lie in a cone, so that hashes relative to their mean
    tell more of them apart (``centred``). A cluster keeps its founder's bits for life. Clustering is limited to the
    recent KV (section V-C): an offloaded cluster takes no more tokens, so its block is never read or rewritten for new
    ones.

    Args:
        width: of a key.
        bits: number of hyperplanes, at least 1.
        threshold: largest distance at which a token still joins, not negative (the paper: below 7).
        centred: whether the mean of the first tokens is subtracted from keys before they are hashed.
        tokens: size at which a cluster takes no more tokens, at least 1. Each token that joins rewrites the block, so
            large clusters of static content would fill the upper tiers with copies.
        seed: of the hyperplanes' random directions.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self, width: int, *, bits: int = 32, threshold: int = 7, centred: bool = False, tokens: int = 512, seed: int = 0
    ) -> None:
        super().__init__(width)
        if bits < 1 or threshold < 0 or tokens < 1:
            raise ConfigError(
                f"bits and tokens must be at least 1 and threshold not negative, not {bits}, {tokens} and {threshold}"
            )
        self.threshold, self.centred, self.tokens = threshold, centred, tokens
        self._centre = torch.zeros(width)
        rng = torch.Generator().manual_seed(seed)
        self._planes = torch.randn(width, bits, generator=rng)
        self.table.columns[_BITS] = torch.zeros(0, -(-bits // 8), dtype=torch.uint8)

    def hash(self, key: Tensor) -> Tensor:
        """``key [t, D]`` -> ``[t, bits]`` of +1 and -1."""
        return torch.where((key.float() - self._centre) @ self._planes > 0, 1.0, -1.0)

    def state(self) -> dict[str, Tensor]:
        return {"centre": self._centre} if self.centred else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if self.centred:
            self._centre = state["centre"]

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        if self.centred and not self.table.next_uid:
            # Values that are not finite would make all later hashes equal.
            self._centre = tokens.key.float().nanmean(0).nan_to_num(posinf=0.0, neginf=0.0)
        signs, known = self.hash(tokens.key), len(self.table)
        apart = _hamming(signs, self._signs(self.table.columns[_BITS]))
        apart[:, self.table.count >= self.tokens] = self._planes.shape[1] + 1
        apart = self._exclude_offloaded(apart, at_hand)
        # Only tokens that no existing cluster accepts can found one.
        alone = (apart > self.threshold).all(1).nonzero()[:, 0]
        founders = alone[self._founders(signs[alone])]
        among = _hamming(signs, signs[founders])
        # A cluster exists from its founder on.
        later = founders > torch.arange(len(signs))[:, None]
        among[later] = signs.shape[1] + 1
        distance = torch.cat([apart, among], dim=1)
        cluster = _nearest(distance)
        cluster, first = self._divided(cluster, known + len(founders))
        self.table.add(tokens, cluster)
        self.table.columns[_BITS][known:] = _packed(signs[torch.cat([founders, first])])
        return cluster

    def _divided(self, cluster: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
        """``cluster [t]`` with full clusters divided: whenever one of ``clusters`` is full, the next token founds
        another that takes those after it. Also returns the founding tokens, in the order of the new clusters."""
        order = cluster.argsort(stable=True)
        count = torch.bincount(cluster, minlength=clusters)
        held = F.pad(self.table.count, (0, clusters - len(self.table)))
        rank = torch.arange(len(cluster)) - (count.cumsum(0) - count)[cluster[order]]
        part = torch.empty_like(cluster)
        part[order] = (held[cluster[order]] + rank) // self.tokens
        pair = torch.stack([cluster, part], dim=1)[part > 0]
        if not len(pair):
            return cluster, pair[:, 0]
        places, number = torch.unique(pair, dim=0, return_inverse=True)
        later = (part > 0).nonzero()[:, 0]
        first = torch.full((len(places),), len(cluster)).scatter_reduce_(0, number, later, "amin")
        cluster = cluster.clone()
        cluster[later] = clusters + number
        return cluster, first

    def _exclude_offloaded(self, apart: Tensor, at_hand: AtHand) -> Tensor:
        """Set the distances ``[t, c]`` to offloaded clusters out of reach."""
        asked = torch.zeros(apart.shape[1], dtype=torch.bool)
        # Checks only clusters that tokens would join, which are loaded anyway.
        while apart.shape[1]:
            wanted = torch.unique(_nearest(apart)[apart.amin(1) <= self.threshold])
            wanted = wanted[~asked[wanted]]
            if not len(wanted):
                break
            asked[wanted] = True
            apart[:, wanted[~at_hand(wanted)]] = self._planes.shape[1] + 1
        return apart

    def _signs(self, packed: Tensor) -> Tensor:
        """Inverse of :func:`_packed`."""
        bits = np.unpackbits(packed.numpy(), axis=1, count=self._planes.shape[1], bitorder="little")
        return torch.from_numpy(bits).float() * 2 - 1

    def _founders(self, signs: Tensor) -> Tensor:
        """Indices of the rows that found a cluster: those too far from all previous founders."""
        far = (_hamming(signs, signs) > self.threshold).numpy()
        founders: list[int] = []
        left = np.ones(len(far), dtype=bool)
        while left.any():
            founders.append(int(left.argmax()))
            left &= far[founders[-1]]
        return torch.tensor(founders, dtype=torch.int64)


class KVMU(ReSV):
    """ReSV clusters in write-once blocks (V-Rex, section V-C, KV cache management unit).

    Clustering is limited to the frames clustered together (``memory.block_frames``): a written block takes no more
    tokens, and compression drops it whole or leaves it unchanged. The paper has no cap and never compresses offloaded
    KV; the choice of blocks to drop is ours (:func:`~cluster.memory.eviction.whole_clusters`).
    """

    written_once: ClassVar[bool] = True

    def _exclude_offloaded(self, apart: Tensor, at_hand: AtHand) -> Tensor:
        del at_hand
        return torch.full_like(apart, self._planes.shape[1] + 1)


def _nearest(distance: Tensor) -> Tensor:
    """Index of the minimum of each row of ``distance [t, c]``; ties go to the older cluster, which ``Tensor.min`` does
    not guarantee."""
    clusters = distance.shape[1]
    if not clusters:
        return torch.zeros(len(distance), dtype=torch.int64)
    rank = distance.to(torch.int64) * clusters + torch.arange(clusters)
    return rank.amin(1) % clusters


def _packed(signs: Tensor) -> Tensor:
    """``[n, bits]`` of +1 and -1 -> ``[n, bytes]`` uint8."""
    return torch.from_numpy(np.packbits(signs.numpy() > 0, axis=1, bitorder="little"))


def _hamming(a: Tensor, b: Tensor) -> Tensor:
    """Hamming distances ``[n, m]`` between ``[n, bits]`` and ``[m, bits]`` of +1 and -1."""
    return (a.shape[1] - a @ b.mT) / 2
