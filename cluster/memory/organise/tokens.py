"""Every token a cluster of its own: what InfiniGen-P retrieves over."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.memory.organise import Members, NewTokens, Organiser


class Tokens(Organiser):
    """No grouping: as many representatives as tokens, and as many transfers as tokens are wanted."""

    def add(self, tokens: NewTokens, members: Members) -> Tensor:
        del members
        cluster = torch.arange(len(tokens), device=self.table.device) + len(self.table)
        self.table.add(tokens, cluster)
        return cluster
