"""``topk_deviation``: CacheBlend (Yao et al. 2025): recompute the tokens whose KV turns out to have drifted most."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.refresh.base import KVChange, Narrowing, RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class TopKDeviation(RefreshPolicy):
    """Compute layers ``0..probe`` for every overlap token, then go on with those of largest
    ``‖K_new − K_old‖² + ‖V_new − V_old‖²`` at the probe layer: ``share`` of them, or the budget.

    The probe costs ``probe + 1`` layers of everything; the budget counts what goes on, as in the paper.
    """

    share: float = 0.15
    probe: int = 1

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(round(self.share * len(context)))
        everything = np.ones(len(context), dtype=bool)
        # A model of two layers is probed at its first: at its last there would be nothing left to save.
        narrowing = Deviation(layer=min(self.probe, context.layers - 2), tokens=wanted)
        return Selection(everything, narrowing if wanted < len(context) else None)


@dataclass(frozen=True, slots=True)
class Deviation(Narrowing):
    """After ``layer``, keep the ``tokens`` with the largest deviation."""

    layer: int
    tokens: int

    def after(self, layer: int) -> bool:
        return layer == self.layer

    def select_kept(self, change: KVChange) -> Tensor:
        deviation = _square(change.k_new, change.k_old) + _square(change.v_new, change.v_old)
        keep = torch.zeros_like(deviation, dtype=torch.bool)
        keep[deviation.topk(min(self.tokens, len(deviation))).indices] = True
        return keep


def _square(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum(dim=(1, 2))
