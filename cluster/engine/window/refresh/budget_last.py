"""``budget_last``: the tokens of ``budget``, in the order that engines with a prefix cache alone force."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.window.refresh.budget import Budget


@dataclass(frozen=True, slots=True)
class BudgetLast(Budget):
    """Recompute what is expected to have drifted most, behind everything that is reused.

    Ours for ``engine: vllm``: see :mod:`~cluster.engine.window.refresh.anchors_last` for the order and what it costs.
    Anchors are half of a pruned window; a quarter of it chosen by drift leaves more of the saving.
    """

    reused_first = True
