"""``none``: reuse everything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class Nothing(RefreshPolicy):
    """The lower bound of cost: naive reuse."""

    budgeted = False

    def select(self, context: RefreshContext) -> Selection:
        return Selection(np.zeros(len(context), dtype=bool))
