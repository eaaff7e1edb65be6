"""Compressors that rank tokens by the attention they receive from the latest questions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_sizes, frame_slots, rank_in_frame, top_tokens
from cluster.memory.head_memory import LayerKV


class AttentionCompressor(Compressor):
    """Ranks a head's tokens by the attention of the latest question rows.

    Until rows are observed, the keys of the newest ``stand_in`` tokens (SnapKV's observation window) serve as queries.

    Deviations from all papers below: keys are stored before rotary and their future positions are unknown, so attention
    ignores positions, and keys that serve as queries also see later tokens.

    Args:
        columns: unused.
        stand_in: number of newest tokens whose keys serve as queries.
    """

    wants_queries: ClassVar[bool] = True

    def __init__(self, columns: int, *, stand_in: int = 32) -> None:
        super().__init__(columns)
        if stand_in < 1:
            raise ValueError(f"stand_in must be at least 1, not {stand_in}")
        self.stand_in = stand_in
        self._queries: list[Tensor] = []

    def observe(self, queries: Sequence[Tensor]) -> None:
        self._queries = list(queries)

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        return [
            all_tokens(layer)
            if budget >= layer.tokens
            else top_tokens(self.scores(layer, self._attention(index, layer), budget), budget)
            for index, layer in enumerate(layers)
        ]

    @abstractmethod
    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        """Scores ``[H, n]``, of which the ``budget`` highest stay; ``attention [H, n]``: mean over all rows, sums to
        1."""

    def _attention(self, index: int, layer: LayerKV) -> Tensor:
        asked = self._queries[index] if self._queries and self._queries[index].shape[1] else None
        return mean_attention(layer.key, layer.key[:, -self.stand_in :] if asked is None else asked)


def mean_attention(key: Tensor, queries: Tensor) -> Tensor:
    """Mean attention ``[H, n]`` of the rows ``queries [H, r, D]`` to the tokens ``key [H, n, D]``."""
    scores: Tensor = queries.to(key.device).float() @ key.float().transpose(1, 2) * key.shape[2] ** -0.5
    return scores.softmax(dim=2).mean(dim=1)


class SnapKV(AttentionCompressor):
    """SnapKV (papers: infinipot-v, D.1 and B.3): keeps the newest tokens (the observation window), and of the others
    those with the highest pooled attention.

    The latest question rows replace the window's queries (for further deviations see :class:`AttentionCompressor`).
    Pooling runs over the tokens in time order, as in the cache, with zero padding, as in the published code.

    Args:
        window: number of newest tokens that are always kept.
        kernel: pool width in tokens, odd.
        pool: ``"mean"`` as published, or ``"max"``.
    """

    def __init__(self, columns: int, *, window: int = 32, kernel: int = 7, pool: str = "mean") -> None:
        super().__init__(columns, stand_in=max(1, window))
        if window < 0 or kernel < 1 or kernel % 2 == 0 or pool not in ("mean", "max"):
            raise ValueError(f"window must be 0 or more, kernel odd, pool mean or max, not {window}, {kernel}, {pool}")
        self.window, self.kernel, self.pool = window, kernel, pool

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        window = min(self.window, budget)
        older = attention[:, : layer.tokens - window]
        pool = F.avg_pool1d if self.pool == "mean" else F.max_pool1d
        pooled = pool(older, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat([pooled, pooled.new_full((layer.heads, window), torch.inf)], dim=1)


class InfiniPot(AttentionCompressor):
    """InfiniPot (papers: infinipot-v, B.3 and [21]): keeps the newest tokens, and of the others those with the highest
    catalyst-prompt importance.

    The paper appends a catalyst prompt ("Provide a detailed description of this video.") at every compression and sums
    its attention to the cache. Here the latest question rows are the proxy prompt, which saves that pass through the
    model (for further deviations see :class:`AttentionCompressor`). The paper's second measure, the improbability of a
    token (NuC), is omitted: visual tokens have no probability.

    Args:
        recent: share of the budget for the newest tokens (our reading: InfiniPot-V's share of recent frames).
    """

    def __init__(self, columns: int, *, recent: float = 0.125) -> None:
        super().__init__(columns)
        if not 0 <= recent <= 1:
            raise ValueError(f"recent must be between 0 and 1, not {recent}")
        self.recent = recent

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        newest = int(self.recent * budget)
        # Above any attention, which is at most 1.
        attention[:, layer.tokens - newest :] = 2.0
        return attention


class LiveVLM(AttentionCompressor):
    """LiveVLM (arXiv 2505.15269, cited in papers: mosaic, v-rex): keeps all of the newest tokens, and of every older
    frame about the same share, its most attended tokens.

    Our reading, based only on other papers' descriptions: in each older frame, the token of rank ``i`` of ``t`` by
    attention is kept if ``i / t`` is small enough. So every frame keeps one token before any keeps a second; if there
    are too many frames, those with the most attended tokens stay. Its retrieval is not part of this (see
    ``cluster.memory.retrieve``). For further deviations see :class:`AttentionCompressor`.

    Args:
        short: share of the budget for the newest tokens.
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
        # The newest part may cut a frame, whose share is then that of its older part.
        share = -rank / frame_sizes(slot).gather(1, slot)
        long = torch.where(rank == 0, attention[:, :older], share)
        # Above any attention, which is at most 1.
        return torch.cat([long, attention.new_full((layer.heads, layer.tokens - older), 2.0)], dim=1)


class StreamMem(AttentionCompressor):
    """StreamMem (arXiv 2508.15717, cited in papers: cords): keeps every frame's most salient token (the most salient
    of these if there are too many frames), then the most salient others.

    The paper's proxy queries come from the chat template. Here they are the latest question rows, template and standing
    questions alike, so it is less question-agnostic than published (for further deviations see
    :class:`AttentionCompressor`). The paper also merges a frame's dropped tokens into an attention-weighted prototype,
    and near-identical frames before the model sees them. A compressor can only select tokens: a frame's most salient
    token replaces the prototype, with its own key and value, and the pruner thins frames.
    """

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        del budget
        first = rank_in_frame(attention, frame_slots(layer.frame)) == 0
        salient = attention / attention.amax(dim=1, keepdim=True)
        return torch.where(first, salient + 1, salient)
