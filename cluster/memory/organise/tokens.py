"""One cluster per token: the retrieval unit of InfiniGen-P."""

import torch
from torch import Tensor

from cluster.memory.organise import AtHand, NewTokens, Organiser


class Tokens(Organiser):
    """No clustering: one representative and one transfer per token."""

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        del at_hand
        cluster = torch.arange(len(tokens), device=self.table.device) + len(self.table)
        self.table.add(tokens, cluster)
        return cluster
