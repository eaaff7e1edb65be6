"""InfiniPot-V (papers: algorithm 2): temporal redundancy (TaR), then value norm (VaN)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.memory.compress import Compressor, all_tokens, concatenate, frame_slots, group_layers, top_mask, top_tokens
from cluster.memory.head_memory import LayerKV

Pools = Literal["depth", "quartiles", "thresholds"]

_PART = 4096
"""Number of tokens whose keys are compared at a time."""


class InfiniPotV(Compressor):
    """TaR and VaN per layer and head, on keys before rotary (as in the paper's streaming setting, B.4).

    With pruned frames, a recent frame may have no token at a cell. That means nothing changed there since the last
    token, so older tokens are compared with that one; a cell's only token is kept, as nothing else shows what was
    there. The newest tokens are always kept, as many as the recent frames would have at the mean frame size (with too
    few frames for a recent one, the share ``recent`` of all tokens). A cell's last token, if older, competes by score:
    keeping all of these would leave a memory of few frames with only the present. Pools skip cells without a token.

    On whole frames none of these rules has an effect: ``InfiniPotVPaper`` then keeps what the published code keeps at
    its first compression, except that ties go to the earliest (there to the undefined order of ``torch.topk``). Later
    the published code treats what it holds as whole frames again, while tokens here keep their frame and cell.

    Args:
        columns: cells per row of the grid.
        share: of the budget that TaR fills, including recent tokens (alpha of the paper).
        recent: share of the frames that count as recent (r / f).
        pools: how a layer's norms are averaged. ``depth``: by its quarter of the model, over 7 x 7 cells of 7 frames,
            5 x 5 of a frame, 3 in a row, or none, zero-padded (published code). ``thresholds``: over 7 x 7, 5 x 5,
            3 x 3 or 1 cell of a frame, narrower at each of ``steps`` (the paper's text, which gives no values and no
            padding: none here). ``quartiles``: the same at the quartiles of the compressed layers
            (:func:`pool_steps`).
        steps: model-specific coefficients of variation of a layer's value norms, for ``thresholds``.
    """

    def __init__(
        self,
        columns: int,
        *,
        share: float = 0.9,
        recent: float = 0.0625,
        pools: Pools = "quartiles",
        steps: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__(columns)
        if not 0 <= share <= 1 or not 0 < recent <= 1:
            raise ValueError(f"share and recent must be between 0 and 1, not {share} and {recent}")
        if (pools == "thresholds") != (steps is not None):
            raise ValueError(f"pools by thresholds take steps, others do not: pools {pools}, steps {steps}")
        self.share, self.recent, self.pools, self.steps = share, recent, pools, steps

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        if not any(layer.tokens > budget for layer in layers):
            return [all_tokens(layer) for layer in layers]
        norms = [layer.value.norm(dim=-1, dtype=torch.float32) for layer in layers]
        reach = self._reach(norms)
        chosen: list[Tensor] = []
        for group in group_layers(layers):
            if budget >= group[0].tokens:
                chosen += [all_tokens(layer) for layer in group]
            else:
                here = slice(len(chosen), len(chosen) + len(group))
                chosen += torch.split(self._select(group, norms[here], reach[here], budget), group[0].heads)
        return chosen

    def _select(self, group: Sequence[LayerKV], norms: Sequence[Tensor], reach: Tensor, budget: int) -> Tensor:
        """Select ``[layers * H, budget]`` for layers of one shape, with their heads stacked. ``norms``: of each layer's
        values, ``[H, n]``; ``reach`` ``[layers]``: see :meth:`_reach`."""
        key, frame, cell = (concatenate([getattr(layer, name) for layer in group]) for name in ("key", "frame", "cell"))
        slot = frame_slots(frame)
        recent = (self.recent * (slot[:, -1] + 1).double()).long()
        distinct, only = temporal_redundancy(key, slot, cell, slot[:, -1] + 1 - recent.clamp(min=1))
        heads, tokens = group[0].heads, slot.shape[1]
        if self.pools == "depth":
            parts = zip(norms, torch.split(slot, heads), torch.split(cell, heads), reach.tolist(), strict=True)
            pooled = concatenate([padded_pool(*part[:3], self.columns, part[3]) for part in parts])
        else:
            pooled = pooled_norms(concatenate(norms), slot, cell, self.columns, reach.repeat_interleave(heads))

        newest = torch.where(recent > 0, recent * tokens // (slot[:, -1] + 1), int(self.recent * tokens)).clamp(min=1)
        order = torch.arange(tokens, device=slot.device)
        stays = only | (order >= tokens - newest[:, None])
        # If these exceed the budget, keep the newest of them.
        stays &= top_mask(torch.where(stays, order.float(), -1), budget)
        # Kept tokens count towards TaR's share and rank first.
        taken = top_mask(distinct.masked_fill(stays, torch.inf), budget - round((1 - self.share) * budget))
        return top_tokens(pooled.masked_fill(taken | stays, torch.inf), budget)

    def _reach(self, norms: Sequence[Tensor]) -> Tensor:
        """Radius of each layer's pool in cells, ``[layers]``; for ``depth`` also its number of dimensions."""
        if self.pools == "depth":
            return (3 - torch.arange(len(norms)) // max(1, len(norms) // 4)).clamp(min=0)
        varied = torch.stack([variation(each) for each in norms])
        steps = pool_steps(varied.tolist()) if self.steps is None else self.steps
        return 3 - (varied[:, None] >= varied.new_tensor(steps)).sum(dim=1)


class InfiniPotVPaper(InfiniPotV):
    """:class:`InfiniPotV` with the paper's settings and the published code's pools."""

    def __init__(
        self,
        columns: int,
        *,
        share: float = 0.5,
        recent: float = 0.125,
        pools: Pools = "depth",
        steps: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__(columns, share=share, recent=recent, pools=pools, steps=steps)


def variation(norms: Tensor) -> Tensor:
    """Coefficient of variation of norms ``[H, n]`` over all heads; 0 if there are none."""
    if not norms.numel():
        return norms.new_zeros(())
    spread, mean = torch.std_mean(norms, correction=0)
    return spread / mean.clamp(min=1e-12)


def temporal_redundancy(key: Tensor, slot: Tensor, cell: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """TaR ``[H, n]`` (eq. 4): minus the mean cosine of a key ``[H, n, D]`` with those of the recent frames at its cell.

    Recent frames are those from ``first [H]`` on; one without a token at a cell counts with the last token before it.
    Also returns whether a token is the only one of its cell, ``[H, n]`` bool.
    """
    heads = len(slot)
    cells = int(cell.max()) + 1
    # Sorted by cell, then time: a token is shown from its frame until the next token of its cell.
    ordered, order = cell.sort(dim=1, stable=True)
    since = slot.gather(1, order)
    final = F.pad(ordered[:, 1:] != ordered[:, :-1], (0, 1), value=True)
    until = torch.where(final, slot[:, -1:] + 1, since.roll(-1, dims=1))
    # A token's weight is the number of recent frames that show it; only the few with a weight are summed.
    shown = (until - torch.maximum(since, first[:, None])).clamp_(min=0)
    weight = torch.empty_like(shown).scatter_(1, order, shown).view(-1)
    only = torch.empty_like(final).scatter_(1, order, final & final.roll(1, dims=1))
    some = weight.nonzero()[:, 0]
    weights = weight[some].float()
    flat, length = key.flatten(0, 1), key.norm(dim=-1, dtype=torch.float32).view(-1).clamp_(min=1e-12)
    place = (torch.arange(0, heads * cells, cells, device=slot.device)[:, None] + cell).view(-1)
    there = place[some]
    total = length.new_zeros(heads * cells, key.shape[2])
    total.index_add_(0, there, flat[some].float() * (weights / length[some])[:, None])
    shows = length.new_zeros(heads * cells).index_add_(0, there, weights)
    mean = total / shows.clamp_(min=1)[:, None]
    # In parts, so that gathered rows stay in the CPU cache.
    parts = zip(torch.split(place, _PART), torch.split(flat, _PART), strict=True)
    cosine = concatenate([mean.index_select(0, where).mul_(part).sum(dim=-1) for where, part in parts])
    return (cosine / -length).view(slot.shape), only


def pooled_norms(norms: Tensor, slot: Tensor, cell: Tensor, columns: int, reach: Tensor) -> Tensor:
    """VaN ``[H, n]``: mean norm of the tokens of the same frame (``slot``) at most ``reach [H]`` rows and columns away,
    a pool of width ``2 reach + 1``."""
    heads, frames, rows = len(norms), int(slot.max()) + 1, int(cell.max()) // columns + 1
    row, column = cell // columns, cell % columns
    # Grids of norms and of token counts, pooled by one band matrix per direction.
    index = torch.arange(max(rows, columns), device=reach.device)
    band = ((index[:, None] - index).abs_() <= reach[:, None, None]).float()
    grid = norms.new_zeros(heads, 2, frames * rows * columns)
    place = ((slot * rows + row) * columns + column)[:, None].expand(-1, 2, -1)
    grid.scatter_(2, place, torch.stack([norms, torch.ones_like(norms)], dim=1))
    across = (grid.view(heads, -1, columns) @ band[:, :columns, :columns]).view(heads, -1, rows, columns)
    around = across.transpose(2, 3).reshape(heads, -1, rows) @ band[:, :rows, :rows]
    place = ((slot * columns + column) * rows + row)[:, None].expand(-1, 2, -1)
    total, count = around.view(heads, 2, -1).gather(2, place).unbind(dim=1)
    return total / count


def padded_pool(norms: Tensor, slot: Tensor, cell: Tensor, columns: int, reach: int) -> Tensor:
    """VaN ``[H, n]`` of one layer as published: zero-padded means of width ``2 reach + 1`` in each of ``reach``
    dimensions: the time-ordered sequence, a frame, or consecutive frames. In two and three dimensions the width is
    limited to the number of frames, rows and columns. Cells without a token are not counted."""
    frames, rows = int(slot.max()) + 1, int(cell.max()) // columns + 1
    width = 2 * reach + 1
    if reach > 1:
        width = min(width, frames, rows, columns)
        width -= 1 - width % 2
    if width == 1:
        return norms
    place = slot * (rows * columns) + cell
    grid = norms.new_zeros(len(norms), frames * rows * columns)
    absent = (torch.arange(grid.shape[1], device=slot.device) < (slot[:, -1:] + 1) * rows * columns).float()
    shape = (-1,) if reach == 1 else (frames, rows, columns)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[reach - 1]
    total, missing = (
        pool(each.view(len(norms), *shape), width, stride=1, padding=width // 2).flatten(1).gather(1, place)
        for each in (grid.scatter_(1, place, norms), absent.scatter_(1, place, 0.0))
    )
    return total / (1 - missing)


def pool_steps(variations: Sequence[float]) -> tuple[float, float, float]:
    """``steps`` for a model: the quartiles of its layers' coefficients of variation."""
    quartiles = torch.tensor(variations, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return float(quartiles[0]), float(quartiles[1]), float(quartiles[2])
