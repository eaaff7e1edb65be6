"""WiCSum (V-Rex, section IV-C): the top clusters that together hold a share of the expected attention."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retriever

# Number of equal score intervals between a row's lowest and highest score (V-Rex, WiCSum threshold unit).
_BUCKETS = 2**11
# Up to _FEW clusters a full sort is cheaper than buckets, and so it is if more than 1 in _WORTH scores need sorting.
# _SCORES: maximum number of scores per batch of groups.
_FEW, _WORTH, _SCORES = 1024, 8, 2**24


class WiCSum(Retriever):
    """Selects the clusters that hold more than a share of the expected attention.

    Args:
        ratio: the share, 0 to 1; at 1 everything is selected.
        tokens: maximum read per head, as a share of a growing memory takes ever longer. Beyond it, the clusters whose
            tokens are expected to get the most attention of all rows are read, at least one. None: no limit, as in the
            paper. ``ConfigError`` for a ratio out of range, or fewer than one token.
    """

    def __init__(self, *, ratio: float = 0.3, tokens: int | None = 2048) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"the ratio of attention to retrieve is between 0 and 1, not {ratio:g}")
        if tokens is not None and tokens < 1:
            raise ConfigError(f"the maximum number of tokens to retrieve is 1 or more, not {tokens}")
        self.ratio, self.tokens = ratio, tokens

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        groups = self.select_groups(query, [query.shape[1]], tables)
        return [of_head[0].nonzero()[:, 0] for of_head in groups]

    def select_groups(self, query: Tensor, sizes: Sequence[int], tables: Sequence[ClusterTable]) -> list[Tensor]:
        """See :class:`Retriever`; batches all heads, and groups up to :data:`_SCORES` scores."""
        mean = pad_sequence([table.mean for table in tables], batch_first=True)
        count = pad_sequence([table.count for table in tables], batch_first=True)
        groups: list[Tensor] = []
        at = 0
        while at < len(sizes):
            rows = list(accumulate(sizes[at:]))
            few = max(1, bisect_right(rows, _SCORES // max(1, count.numel())))
            part = query[:, sum(sizes[:at]) :][:, : rows[few - 1]]
            by_group = (
                torch.split(each, list(sizes[at : at + few]), dim=1) for each in _chosen(part, mean, count, self.ratio)
            )
            # A group reads the union of what its rows select.
            groups += [self._bounded(of.any(1), score, count) for of, score in zip(*by_group, strict=True)]
            at += few
        whole = torch.stack(groups, dim=1)
        return [of_head[:, : len(table)] for of_head, table in zip(whole, tables, strict=True)]

    def _bounded(self, chosen: Tensor, score: Tensor, count: Tensor) -> Tensor:
        """Limit one group's clusters ``chosen [H, c]`` to ``tokens`` per head, by the attention that all rows
        are expected to give one of their tokens; ``score [H, r, c]``: see :func:`_chosen`."""
        if self.tokens is None or self.ratio == 1:
            return chosen
        over = ((chosen * count).sum(1) > self.tokens).nonzero()[:, 0].tolist()
        if over:
            chosen = chosen.clone()
        for head in over:
            taken = chosen[head].nonzero()[:, 0]
            weight = score[head].exp()
            attention = (weight / (weight @ count[head].float())[:, None]).sum(0)
            order = attention[taken].argsort(descending=True, stable=True)
            held = count[head][taken[order]].cumsum(0)
            kept = max(1, int((held <= self.tokens).sum()))
            chosen[head] = False
            chosen[head, taken[order[:kept]]] = True
        return chosen

    def for_prediction(self) -> WiCSum:
        """With twice the share and twice the limit."""
        return WiCSum(ratio=min(1.0, 2 * self.ratio), tokens=None if self.tokens is None else 2 * self.tokens)


def _chosen(query: Tensor, mean: Tensor, count: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Which row selects which cluster ``[H, r, c]`` bool, and the scores. The clusters selected hold more than
    ``ratio`` of the row's expected attention; at 1 all are selected.

    A cluster's score for a row is ``exp(q . mean / sqrt(D) - max)`` (our reading: the paper's may be negative, which
    leaves no share to take), its weight ``count`` times that (eq. 1). Each row selects by descending score until the
    weights exceed its share (eq. 2 and 3); ties go to the lower index. With many clusters, weights are summed in
    buckets by score, and only the bucket in which a row's sum exceeds its share is sorted.

    ``query`` ``[H, r, D]`` must be rotated or raw like the representatives ``mean`` ``[H, c, D]``; ``count``
    ``[H, c]``: tokens of each, 0 for padding.
    """
    heads, rows, width = query.shape
    there, clusters = count > 0, mean.shape[1]
    if not clusters or not rows or ratio == 1:
        everything = there[:, None].expand(-1, rows, -1)
        return everything, everything.float()
    scores = query.float() @ mean.float().mT / math.sqrt(width)
    scores = scores.masked_fill_(~there[:, None], -torch.inf).view(-1, clusters)
    # A head may have no clusters.
    scores -= scores.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight = scores.exp() * count.repeat_interleave(rows, dim=0)
    shape = heads, rows, clusters
    if clusters > _FEW:
        # Below -104 a float32 weight is 0.
        lowest = scores.masked_fill(scores == -torch.inf, 0.0).amin(1, keepdim=True).clamp(-104.0, -1e-30)
        top = _BUCKETS - 1
        bucket = torch.fmax((scores * (-top / lowest)).add_(top), torch.zeros(())).int()
        first = torch.arange(len(scores), dtype=torch.int32)[:, None] * _BUCKETS
        held = torch.bincount((bucket + first).flatten(), weight.double().flatten(), minlength=len(scores) * _BUCKETS)
        # Weight of each bucket and all above it; 0 above the last.
        downwards = F.pad(held.view(-1, _BUCKETS).flip(1).cumsum(1).flip(1), (0, 1))
        wanted = ratio * downwards[:, :1]
        last = (downwards > wanted).sum(1, keepdim=True) - 1
        among = bucket == last
        if among.sum() * _WORTH <= among.numel():
            chosen = bucket > last
            row, number, running = _sorted(scores, weight, among, downwards.gather(1, last + 1)[:, 0])
            # The last cluster selected is the one that exceeds the share.
            taken = running <= wanted[row, 0]
            chosen[row[taken], number[taken]] = True
            return chosen.view(shape) & there[:, None], scores.view(shape)
    order = scores.argsort(dim=1, descending=True, stable=True)
    running = F.pad(weight.gather(1, order).double().cumsum(1), (1, 0))
    taken = running[:, :-1] <= ratio * running[:, -1:]
    chosen = torch.zeros_like(taken).scatter_(1, order, taken)
    return chosen.view(shape) & there[:, None], scores.view(shape)


def _sorted(scores: Tensor, weight: Tensor, among: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the entries ``among [r, c]`` by row, then descending ``scores``, ties by index. Returns their rows, indices
    and the ``weight`` accumulated before each, starting from ``above [r]``."""
    row, number = among.nonzero(as_tuple=True)
    order = scores[row, number].argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    row, number = row[order], number[order]
    mass = weight[row, number].double()
    before = mass.cumsum(0) - mass
    first = torch.searchsorted(row, torch.arange(len(above)))
    return row, number, before - before[first[row]] + above[row]
