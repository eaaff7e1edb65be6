"""``shifted``: a control for ``anchors``: as many tokens, taken halfway between anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class Shifted(RefreshPolicy):
    """Recompute the frames farthest from any anchor, as many tokens as the anchors have.

    Frames between anchors are pruned and smaller: more of them are taken, from the middle outwards.
    """

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        anchors = np.unique(context.frame[context.anchor])
        if not len(anchors):
            return Selection(context.mask(np.arange(wanted)))
        # The stretch before the first and after the last anchor ends nowhere: distance to the one anchor it has.
        distance = np.abs(context.frame[:, None] - anchors).min(axis=1)
        order = np.lexsort((context.offset, context.frame, -distance))
        return Selection(context.mask(order[:wanted]))
