"""``all``: compute every overlap token again; equals a full computation of the window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class All(RefreshPolicy):
    """The upper bound of cost and of exactness."""

    budgeted = False

    def select(self, context: RefreshContext) -> Selection:
        return Selection(np.ones(len(context), dtype=bool))
