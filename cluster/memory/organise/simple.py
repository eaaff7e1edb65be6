"""Trivial organisers: one cluster per frame (ReKV), one per token (InfiniGen-P)."""

import torch
from torch import Tensor

from cluster.memory.organise import AtHand, NewTokens, Organiser


class Frames(Organiser):
    """One cluster per frame, represented by its mean key."""

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        del at_hand
        numbers, index = torch.unique_consecutive(tokens.frame, return_inverse=True)
        # Frames arrive in order, so only the newest cluster can be of the same frame.
        continues = len(numbers) > 0 and len(self.table) > 0 and int(self.table.latest[-1]) == int(numbers[0])
        cluster: Tensor = index + len(self.table) - int(continues)
        self.table.add(tokens, cluster)
        return cluster


class Tokens(Organiser):
    """No clustering: one representative and one transfer per token."""

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        del at_hand
        cluster = torch.arange(len(tokens)) + len(self.table)
        self.table.add(tokens, cluster)
        return cluster
