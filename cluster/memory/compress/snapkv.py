"""SnapKV (papers: infinipot-v, eq. 1-2 and B.3): pooled attention of the latest question rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import AttentionCompressor
from cluster.memory.head_memory import LayerKV


class SnapKV(AttentionCompressor):
    """Keeps the newest tokens (the observation window) and of the others those of the highest pooled attention.

    The rows that asked last stand for the queries of the window (see :class:`AttentionCompressor` for both deviations:
    who asks before any did, and attention without positions). Pooling runs over the tokens in time order, which is that
    of the cache; beyond the ends there is no attention, as in the published code.

    Args:
        columns: cells of one row; unused.
        window: newest tokens that always stay.
        kernel: tokens of the pool, an odd number; ``pool``: ``"mean"`` as published, or ``"max"``.
    """

    def __init__(self, columns: int, *, window: int = 32, kernel: int = 7, pool: str = "mean") -> None:
        super().__init__(columns, stand_in=max(1, window))
        if window < 0 or kernel < 1 or kernel % 2 == 0 or pool not in ("mean", "max"):
            raise ValueError(f"no window of {window} tokens with a {pool} pool of {kernel}: an odd pool, mean or max")
        self.window, self.kernel, self.pool = window, kernel, pool

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        window = min(self.window, budget)
        older = attention[:, : layer.tokens - window]
        pool = F.avg_pool1d if self.pool == "mean" else F.max_pool1d
        pooled = pool(older, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat([pooled, pooled.new_full((layer.heads, window), torch.inf)], dim=1)
