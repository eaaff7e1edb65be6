"""``first_n``: the first frames of the overlap, as the code published with CodecSight does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class FirstN(RefreshPolicy):
    """Recompute the oldest ``frames`` frames that have tokens; with a budget, the oldest tokens."""

    frames: int = 3

    def select(self, context: RefreshContext) -> Selection:
        leading = np.unique(context.frame)[: self.frames]
        wanted = context.tokens(int(np.isin(context.frame, leading).sum()))
        return Selection(context.mask(np.arange(wanted)))
