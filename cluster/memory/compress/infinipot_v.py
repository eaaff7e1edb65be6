"""InfiniPot-V (papers: algorithm 2): what is unlike the recent frames at its place, then what has large values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress.base import Compressor, best, compressors, every
from cluster.memory.layer import LayerKV

_POOLS = (7, 5, 3, 1)


@compressors.register("infinipot_v")
class InfiniPotV(Compressor):
    """TaR and VaN, per layer and head.

    With pruned frames a recent frame may have no token at a cell. That means that nothing changed since the last token
    there, so old tokens are compared with that one; and the last token of each cell stays, as it is what the camera
    shows there now.

    Args:
        columns: cells of one row.
        share: of the budget that TaR fills, recent frames included (alpha of the paper).
        recent: share of the frames that count as recent (r / f).
        steps: coefficients of variation of a layer's value norms at which the pool narrows from 7 to 5, 3 and 1 cells;
            they belong to a model (:func:`pool_steps`).
    """

    def __init__(
        self,
        columns: int,
        *,
        share: float = 0.5,
        recent: float = 0.125,
        steps: tuple[float, float, float] = (0.15, 0.25, 0.4),
    ) -> None:
        super().__init__(columns)
        if not 0 <= share <= 1 or not 0 < recent <= 1:
            raise ValueError(f"share and recent are shares, not {share} and {recent}")
        self.share, self.recent, self.steps = share, recent, steps

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        return [every(layer) if budget >= layer.tokens else self._select(layer, budget) for layer in layers]

    def _select(self, layer: LayerKV, budget: int) -> Tensor:
        heads = range(layer.heads)
        norms = layer.value.float().norm(dim=-1)
        pool = self._pool(norms)
        return torch.stack([self._of_head(layer, head, norms[head], pool, budget) for head in heads])

    def _of_head(self, layer: LayerKV, head: int, norms: Tensor, pool: int, budget: int) -> Tensor:
        frame, cell = layer.frame[head], layer.cell[head]
        first_recent = self.first_recent(frame)
        newest = frame >= first_recent
        scores = pooled_norms(norms, frame, cell, self.columns, pool)
        distinct = temporal_redundancy(layer.key[head], frame, cell, first_recent)
        wanted = int(self.share * budget) - int(newest.sum())
        top = best(distinct.masked_fill(newest, float("-inf"))[None], min(max(0, wanted), int((~newest).sum())))[0]
        high = float(scores.max())
        # The paper gives these the highest norm there is; half more, and none of them loses to an equal one.
        scores[top] = high + 0.5
        # What must stay ranks above all; of more than fits, the newest.
        must = newest | last_of_cell(cell)
        scores[must] = high + 1 + torch.arange(len(scores), device=scores.device)[must] / len(scores)
        return best(scores[None], budget)[0]

    def first_recent(self, frame: Tensor) -> int:
        """Number of the first recent frame of tokens ``frame [n]``."""
        numbers = torch.unique_consecutive(frame)
        count = max(1, round(self.recent * len(numbers)))
        return int(numbers[-count])

    def _pool(self, norms: Tensor) -> int:
        variation = float(norms.std(correction=0) / norms.mean().clamp(min=1e-12))
        return _POOLS[sum(variation >= step for step in self.steps)]


def temporal_redundancy(key: Tensor, frame: Tensor, cell: Tensor, first_recent: int) -> Tensor:
    """TaR ``[n]`` (eq. 4): minus the mean cosine of a key ``[n, D]`` with those of the recent frames at its cell.

    Recent frames are those from ``first_recent`` on; where one has no token at a cell, the last one before counts.
    """
    unit = F.normalize(key.float(), dim=-1)
    cells = int(cell.max()) + 1
    shown = unit.new_zeros(cells, unit.shape[1])
    known = torch.zeros(cells, dtype=torch.bool, device=key.device)
    _show(shown, known, unit, cell, frame < first_recent)
    total, count = torch.zeros_like(shown), unit.new_zeros(cells)
    for number in torch.unique_consecutive(frame[frame >= first_recent]).tolist():
        _show(shown, known, unit, cell, frame == number)
        total += shown * known[:, None]
        count += known
    mean = total / count.clamp(min=1)[:, None]
    return -(unit * mean[cell]).sum(-1)


def _show(shown: Tensor, known: Tensor, unit: Tensor, cell: Tensor, which: Tensor) -> None:
    """Update what each cell shows by the last of ``which`` tokens there."""
    tokens = which.nonzero()[:, 0]
    last = torch.full((len(shown),), -1, dtype=torch.int64, device=cell.device)
    last.scatter_reduce_(0, cell[tokens], tokens, "amax")
    there = last >= 0
    shown[there] = unit[last[there]]
    known |= there


def last_of_cell(cell: Tensor) -> Tensor:
    """``[n]`` bool: no later token has the same cell."""
    last = torch.full((int(cell.max()) + 1,), -1, dtype=torch.int64, device=cell.device)
    index = torch.arange(len(cell), device=cell.device)
    last.scatter_reduce_(0, cell, index, "amax")
    return last[cell] == index


def pooled_norms(norms: Tensor, frame: Tensor, cell: Tensor, columns: int, pool: int) -> Tensor:
    """VaN ``[n]``: of each token, the mean norm of the tokens of its frame within ``pool x pool`` cells around it."""
    if pool == 1:
        return norms.clone()
    numbers, slot = torch.unique_consecutive(frame, return_inverse=True)
    rows = int(cell.max()) // columns + 1
    grid = norms.new_zeros(len(numbers), 2, rows, columns)
    row, column = cell // columns, cell % columns
    grid[slot, 0, row, column] = norms
    grid[slot, 1, row, column] = 1.0
    around = F.avg_pool2d(grid, pool, stride=1, padding=pool // 2, divisor_override=1)
    return (around[:, 0] / around[:, 1].clamp(min=1))[slot, row, column]


def pool_steps(variations: Sequence[float]) -> tuple[float, float, float]:
    """``steps`` for a model: the quartiles of its layers' coefficients of variation."""
    if not variations:
        raise ValueError("a model has at least one layer")
    quartiles = torch.tensor(variations, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return float(quartiles[0]), float(quartiles[1]), float(quartiles[2])
