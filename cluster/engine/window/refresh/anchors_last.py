"""``anchors_last``: the tokens of ``anchors``, in the order that engines with a prefix cache alone force."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.window.refresh.anchors import Anchors


@dataclass(frozen=True, slots=True)
class AnchorsLast(Anchors):
    """Recompute the overlap's anchor frames behind everything that is reused.

    Engines like vLLM take KV from outside as a prefix alone, so a window must be laid out as
    ``[system | reused | refreshed, new | question]``. Positions stay true, and new tokens see what they saw before; but
    a refreshed token sees the reused tokens that come later in time as well, which causal attention would hide from it.
    """

    reused_first = True
