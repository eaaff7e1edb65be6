"""``anchors``: CodecSight's selective refresh (section 3.4.1)."""

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.planner import spread_evenly
from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class Anchors(RefreshPolicy):
    """Recompute the overlap's anchor frames, the first of which is its first frame.

    A budget below that omits anchor tokens evenly; above it, other tokens are added evenly.
    """

    def select(self, context: RefreshContext) -> Selection:
        anchors = np.flatnonzero(context.anchor)
        wanted = context.tokens(len(anchors))
        if wanted <= len(anchors):
            return Selection(context.mask(anchors[spread_evenly(len(anchors), wanted)]))
        others = np.flatnonzero(~context.anchor)
        added = others[spread_evenly(len(others), wanted - len(anchors))]
        return Selection(context.mask(np.concatenate((anchors, added))))
