"""``budget`` (ours): recompute the tokens with the largest expected drift, from counters only."""

from dataclasses import dataclass

import numpy as np

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection


@dataclass(frozen=True, slots=True)
class Budget(RefreshPolicy):
    """Recompute the tokens expected to have drifted most; as many as the anchors have, or the budget.

    What a token's KV holds above the first layer is an attention-weighted mean over its context. Take the ``c`` tokens
    of that context (the system prompt among them) as independent: when ``l`` of them leave, the mean over ``c`` becomes
    one over ``c − l``, and the expected squared difference of the two is, up to a constant, ::

        drift = 1 / (c − l) − 1 / c

    This is largest for tokens left with little context, is 0 for a token computed since its context last lost anything
    (so the budget moves on through the window by itself), and grows with every window a token is passed over.

    Measured on two real clips (random weights, the window's KV against a full computation): the relative deviation
    ``‖ΔKV‖² / ‖KV‖²`` grows as ``(l / c)^1.0``, rank correlation 0.82-0.86 within a window. At 25 % of the overlap the
    logits' relative error is 0.17 for this policy, 0.24 for anchors, 0.26-0.27 for random and 0.35 for none. Weighting
    the drift by anchors, by codec activity or by recency made it worse (0.18-0.20), so none of them is in the formula.
    """

    def select(self, context: RefreshContext) -> Selection:
        wanted = context.tokens(int(context.anchor.sum()))
        before = context.context + context.system
        drift = 1 / np.maximum(1, before - context.lost) - 1 / np.maximum(1, before)
        # Equal drift (a frame's tokens, nearly): the older first, which keeps runs long.
        order = np.argsort(-drift, kind="stable")
        return Selection(context.mask(order[:wanted]))
