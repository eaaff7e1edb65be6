"""Compressors that rank tokens by the attention of the latest questions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, frame_sizes, frame_slots, rank_in_frame, top_tokens
from cluster.memory.head_memory import LayerKV


class AttentionCompressor(Compressor):
    """Ranks the tokens of a head by the attention of the latest question rows.

    Before any rows were observed, the keys of the newest ``stand_in`` tokens (SnapKV's observation window) serve as
    queries.

    Deviation from all papers ranked this way: keys are stored before rotary and their future positions are unknown, so
    attention ignores positions; keys that serve as queries also see later tokens.

    Args:
        columns: unused.
        stand_in: newest tokens whose keys serve as queries.
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
        """See :class:`Compressor`; ``ValueError`` where rows were observed of another number of layers, or of heads of
        another shape."""
        if self._queries and len(self._queries) != len(layers):
            raise ValueError(f"query rows of {len(self._queries)} layers were observed, the memory has {len(layers)}")
        return [
            all_tokens(layer)
            if budget >= layer.tokens
            else top_tokens(self.scores(layer, self._attention(index, layer), budget), budget)
            for index, layer in enumerate(layers)
        ]

    @abstractmethod
    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        """Scores ``[H, n]`` of which the ``budget`` highest stay; ``attention [H, n]``: mean of all rows, sum 1."""

    def _attention(self, index: int, layer: LayerKV) -> Tensor:
        asked = self._queries[index] if self._queries and self._queries[index].shape[1] else None
        return mean_attention(layer.key, layer.key[:, -self.stand_in :] if asked is None else asked)


def mean_attention(key: Tensor, queries: Tensor) -> Tensor:
    """Mean attention ``[H, n]`` of the rows ``queries [H, r, D]`` to the tokens ``key [H, n, D]``; ``ValueError`` where
    they do not fit."""
    heads, _, width = key.shape
    if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (heads, width):
        raise ValueError(f"query rows {tuple(queries.shape)} do not fit {heads} key heads of width {width}")
    scores: Tensor = queries.to(key.device).float() @ key.float().transpose(1, 2) * width**-0.5
    return scores.softmax(dim=2).mean(dim=1)


class SnapKV(AttentionCompressor):
    """SnapKV (papers: infinipot-v, D.1 and B.3): keeps the newest tokens (the observation window) and of the others
    those of the highest pooled attention.

    The rows that asked last stand for the queries of the window (see :class:`AttentionCompressor` for both deviations:
    who asks before any did, and attention without positions). Pooling runs over the tokens in time order, which is that
    of the cache; beyond the ends there is no attention, as in the published code.

    Args:
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


class InfiniPot(AttentionCompressor):
    """InfiniPot (papers: infinipot-v, B.3 and [21]): keeps the newest tokens and of the others those of the highest
    catalyst-prompt importance.

    The catalyst prompt of the paper ("Provide a detailed description of this video.") is appended at every compression
    and its attention to the cache is summed. Here the rows that asked last are the proxy prompt, which costs no pass
    through the model (see :class:`AttentionCompressor` for who asks before any did, and for the missing positions). Its
    second measure, how improbable the model found a token (NuC), is left out: visual tokens have no probability.

    Args:
        recent: share of the budget for the newest tokens (a reading: InfiniPot-V's share of recent frames).
    """

    def __init__(self, columns: int, *, recent: float = 0.125) -> None:
        super().__init__(columns)
        if not 0 <= recent <= 1:
            raise ValueError(f"recent must be between 0 and 1, not {recent}")
        self.recent = recent

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        newest = int(self.recent * budget)
        # An attention is at most 1.
        attention[:, layer.tokens - newest :] = 2.0
        return attention


class LiveVLM(AttentionCompressor):
    """LiveVLM (arXiv 2505.15269, named in papers: mosaic, v-rex): keeps the newest tokens densely and of every older
    frame about the same share, its most attended tokens.

    A reading, as only what other papers say of it is at hand: of each older frame the token of rank ``i`` among its
    ``t`` by attention stays if ``i / t`` is small enough. So every frame keeps one before any keeps a second; of more
    frames than fit, those with the most attended ones stay. Its retrieval for an answer is no part of this (see
    ``cluster.memory.retrieve``). Who asks, and the missing positions: see :class:`AttentionCompressor`.

    Args:
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


class StreamMem(AttentionCompressor):
    """StreamMem (arXiv 2508.15717, named in papers: cords): keeps of every frame its most salient token, of more frames
    than fit the most salient, and then what is salient.

    The paper's proxy queries are those of the chat template. Here they are the rows that asked last, template and
    standing questions alike, so that it is less blind to the question than published (see :class:`AttentionCompressor`
    for who asks before any did, and for the missing positions). The paper also merges what it drops of a frame into one
    prototype, weighted by attention, and near-identical frames before the model sees them. A compressor only names
    tokens that stay: the most salient token of a frame takes the prototype's place, with its own key and value, and
    frames are thinned by the pruner.
    """

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        del budget
        first = rank_in_frame(attention, frame_slots(layer.frame)) == 0
        salient = attention / attention.amax(dim=1, keepdim=True)
        return torch.where(first, salient + 1, salient)
