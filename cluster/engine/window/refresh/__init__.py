"""Refresh policies. To add one: a file with a ``RefreshPolicy`` filed in ``refresh_policies``, named here; the
conformance matrix and the window bench then run it."""

from __future__ import annotations

from cluster.engine.window.refresh import (  # noqa: F401
    all,
    anchors,
    anchors_last,
    budget,
    budget_last,
    first_n,
    first_percent,
    none,
    random,
    shifted,
    topk_deviation,
)
from cluster.engine.window.refresh.base import RefreshContext as RefreshContext
from cluster.engine.window.refresh.base import RefreshPolicy as RefreshPolicy
from cluster.engine.window.refresh.base import Selection as Selection
from cluster.engine.window.refresh.base import refresh_policies as refresh_policies

__all__ = ["RefreshContext", "RefreshPolicy", "Selection", "refresh_policies"]
