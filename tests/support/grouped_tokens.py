"""Tokens for organisers, and all that was given to one of them beside it, to compute its statistics anew."""

import torch

from cluster.memory.organise import NewTokens, Organiser


def tokens(key: torch.Tensor, frame: int = 0, *, value: torch.Tensor | None = None, partition: int = 0) -> NewTokens:
    count = len(key)
    return NewTokens(
        key,
        key.clone() if value is None else value,
        torch.full((count,), frame),
        torch.full((count,), partition),
    )


class Everything:
    """All tokens of a head in time order, beside the organiser that groups them."""

    def __init__(self, organiser: Organiser, *, at_hand: bool = True) -> None:
        self.organiser, self.at_hand = organiser, at_hand
        width = organiser.table.mean.shape[1]
        self.key, self.value = torch.zeros(0, width), torch.zeros(0, width)
        self.frame = torch.zeros(0, dtype=torch.int64)

    def add(self, new: NewTokens) -> torch.Tensor:
        joined = self.organiser.add(new, lambda clusters: torch.full((len(clusters),), self.at_hand))
        for name in ("key", "value", "frame"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        return joined

    def split(self, cluster: int) -> int | None:
        """Merge what was founded for a cluster into it and split it."""
        around = self.organiser.founded_for(cluster)
        if len(around):
            self.organiser.merge(cluster, around)
        of = self.organiser.table.members(cluster)
        return self.organiser.split(cluster, self.key[of], self.value[of], self.frame[of])

    def keep(self, kept: torch.Tensor) -> torch.Tensor:
        for name in ("key", "value", "frame"):
            setattr(self, name, getattr(self, name)[kept])
        return self.organiser.table.keep_tokens(kept, self.key, self.value, self.frame)

    def check(self) -> None:
        """Every statistic, computed anew from the members."""
        table = self.organiser.table
        assert table.tokens == len(self.key)
        assert len(table.uid.unique()) == len(table)
        assert bool((table.uid < table.next_uid).all())
        for cluster in range(len(table)):
            of = table.members(cluster)
            assert len(of) == int(table.count[cluster]) > 0
            key = self.key[of]
            close(table.mean[cluster], key.mean(0), **HALF)
            close(table.variance[cluster], (key - key.mean(0)).square().sum(1).mean(), **HALF)
            if self.organiser.wants_values:
                close(table.value_mean[cluster], self.value[of].mean(0), **HALF)
            assert int(table.latest[cluster]) == int(self.frame[of].max())


HALF = {"atol": 2e-3, "rtol": 2e-3}
"""Of means that float16 rounds again with every token that joins."""


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)
