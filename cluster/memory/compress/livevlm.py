"""LiveVLM (arXiv 2505.15269, named in papers: mosaic, v-rex): short-term memory whole, long-term memory thinned."""

import torch
from torch import Tensor

from cluster.memory.compress import AttentionCompressor, frame_sizes, frame_slots, rank_in_frame
from cluster.memory.head_memory import LayerKV


class LiveVLM(AttentionCompressor):
    """Keeps the newest tokens densely and of every older frame about the same share, its most attended tokens.

    A reading, as only what other papers say of it is at hand: of each older frame the token of rank ``i`` among its
    ``t`` by attention stays if ``i / t`` is small enough. So every frame keeps one before any keeps a second; of more
    frames than fit, those with the most attended ones stay. Its retrieval for an answer is no part of this (see
    ``cluster.memory.retrieve``). Who asks, and the missing positions: see :class:`AttentionCompressor`.

    Args:
        columns: cells of one row; unused.
        short: share of the budget that the newest tokens fill.
    """

    def __init__(self, columns: int, *, short: float = 0.5) -> None:
        super().__init__(columns)
        if not 0 <= short <= 1:
            raise ValueError(f"short must be between 0 and 1, not {short}")
        self.short = short

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        older = layer.tokens - int(self.short * budget)
        slot = frame_slots(layer.frame[:, :older])
        rank = rank_in_frame(attention[:, :older], slot)
        # The short-term part may cut a frame: the share is that of what is older.
        share = -rank / frame_sizes(slot).gather(1, slot)
        long = torch.where(rank == 0, attention[:, :older], share)
        # An attention is at most 1.
        return torch.cat([long, attention.new_full((layer.heads, layer.tokens - older), 2.0)], dim=1)
