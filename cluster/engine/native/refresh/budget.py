"""``budget``: ours: spend the tokens where drift is expected, from what is known without computing anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.native.refresh.base import RefreshContext, RefreshPolicy, Selection, refresh_policies


@refresh_policies.register("budget")
@dataclass(frozen=True, slots=True)
class Budget(RefreshPolicy):
    """placeholder"""

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        drift = context.lost / np.maximum(context.context, 1)
        order = np.lexsort((np.arange(len(context)), -drift))
        return Selection(context.mask(order[:wanted]))
