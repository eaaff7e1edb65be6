"""Clusters that need no search: one per frame (ReKV), one per token (InfiniGen-P)."""

import torch
from torch import Tensor

from cluster.memory.organise import AtHand, NewTokens, Organiser


class Frames(Organiser):
    """A frame's tokens are one block; its representative is their mean key."""

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        del at_hand
        numbers, index = torch.unique_consecutive(tokens.frame, return_inverse=True)
        # Frames arrive in order: only the newest cluster can be of the same frame.
        goes_on = len(numbers) > 0 and len(self.table) > 0 and int(self.table.latest[-1]) == int(numbers[0])
        cluster: Tensor = index + len(self.table) - int(goes_on)
        self.table.add(tokens, cluster)
        return cluster


class Tokens(Organiser):
    """No clustering: one representative and one transfer per token."""

    def add(self, tokens: NewTokens, at_hand: AtHand) -> Tensor:
        del at_hand
        cluster = torch.arange(len(tokens)) + len(self.table)
        self.table.add(tokens, cluster)
        return cluster
