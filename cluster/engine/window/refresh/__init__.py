"""Refresh policies, one per file: which tokens of the overlap are computed again."""

from cluster.engine.window.refresh.base import RefreshContext, RefreshPolicy, Selection

__all__ = ["RefreshContext", "RefreshPolicy", "Selection"]
