"""Policies that narrow their selection between layers: ``first_percent`` (VLCache), ``topk_deviation`` (CacheBlend)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.planner import IntArray
from cluster.engine.window.refresh.base import KVChange, Narrowing, RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class FirstPercent(RefreshPolicy):
    """VLCache: at layer ``l``, recompute the leading share ``x_l`` of every frame's tokens.

    ``x_l = x (1 + a (p_l − 1))``: its mean over layers is ``x`` (``share``, or the budget's share), with ``a ≤ 1`` such
    that ``x_0 ≤ 1``. ``p`` is the model's measured profile (``sightline eval profile``); without one, ``p`` falls
    linearly from ``1 + slope`` to ``1 − slope``.
    """

    share: float = 0.1
    slope: float = 0.5

    def select(self, context: RefreshContext) -> Selection:
        count = len(context)
        wanted = context.tokens(round(self.share * count))
        if wanted in (0, count):
            return Selection(np.full(count, wanted > 0))
        # Order by relative position within the frame: any prefix of it is "the first x % of each frame".
        order = np.lexsort((context.frame, (context.offset + 0.5) / context.frame_tokens))
        rank = np.empty(count, np.int64)
        rank[order] = np.arange(count)
        amounts = self._amounts(wanted, context)
        mask = rank < amounts[0]
        return Selection(mask, Leading(rank[mask], amounts))

    def _amounts(self, wanted: int, context: RefreshContext) -> tuple[int, ...]:
        """Tokens per layer, non-increasing, with sum ``wanted * layers``."""
        count, layers = len(context), context.layers
        profile = np.array(context.profile or 1 + self.slope * np.linspace(1, -1, layers))
        above = profile / profile.mean() - 1
        fall = min(1.0, (count / wanted - 1) / max(above[0], 1e-9))
        bounds = np.round(np.cumsum(wanted * (1 + fall * above))).astype(np.int64)
        return tuple(sorted(np.diff(bounds, prepend=0).clip(0, count).tolist(), reverse=True))


class Leading(Narrowing):
    """Before each layer, keep the tokens whose ``rank`` is within its amount."""

    compares: ClassVar[bool] = False

    def __init__(self, rank: IntArray, amounts: tuple[int, ...]) -> None:
        self.rank = rank
        self.amounts = amounts

    def before(self, layer: int) -> bool:
        return self.amounts[layer] < self.amounts[layer - 1]

    def select_kept(self, layer: int, change: KVChange | None) -> Tensor:
        del change
        stays = self.rank < self.amounts[layer]
        self.rank = self.rank[stays]
        return torch.from_numpy(stays)


@dataclass(frozen=True, slots=True)
class TopKDeviation(RefreshPolicy):
    """CacheBlend (Yao et al. 2025): compute the layers below ``probe`` for every overlap token, then continue with
    those of largest ``‖K_new − K_old‖² + ‖V_new − V_old‖²`` at the probe layer: ``share`` of them, or the budget.

    As in the published code, the probe layer only projects the other tokens to keys and values. The first layer cannot
    be the probe, as its KV does not depend on other tokens. As in the paper, the budget counts only the tokens that
    continue. The paper narrows a little at every layer, not once.
    """

    share: float = 0.15
    probe: int = 1

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(round(self.share * len(context)))
        everything = np.ones(len(context), dtype=bool)
        narrowing = Deviation(layer=min(self.probe, context.layers - 1), tokens=wanted)
        return Selection(everything, narrowing if wanted < len(context) else None)


@dataclass(frozen=True, slots=True)
class Deviation(Narrowing):
    """Before ``layer``, keep the ``tokens`` with the largest deviation there."""

    layer: int
    tokens: int

    compares: ClassVar[bool] = True

    def before(self, layer: int) -> bool:
        return layer == self.layer

    def select_kept(self, layer: int, change: KVChange | None) -> Tensor:
        del layer
        assert change is not None
        deviation = _square(change.k_new, change.k_old) + _square(change.v_new, change.v_old)
        keep = torch.zeros_like(deviation, dtype=torch.bool)
        keep[deviation.topk(min(self.tokens, len(deviation))).indices] = True
        return keep


def _square(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum(dim=(1, 2))
