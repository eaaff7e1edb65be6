"""Refresh policies. To add one: a file with a ``RefreshPolicy`` filed in ``refresh_policies``, named here; the
conformance matrix and the window bench then run it."""

from __future__ import annotations

from cluster.engine.native.refresh import (
    all as all,
)
from cluster.engine.native.refresh import (
    anchors as anchors,
)
from cluster.engine.native.refresh import (
    anchors_last as anchors_last,
)
from cluster.engine.native.refresh import (
    budget as budget,
)
from cluster.engine.native.refresh import (
    budget_last as budget_last,
)
from cluster.engine.native.refresh import (
    first_n as first_n,
)
from cluster.engine.native.refresh import (
    first_percent as first_percent,
)
from cluster.engine.native.refresh import (
    none as none,
)
from cluster.engine.native.refresh import (
    random as random,
)
from cluster.engine.native.refresh import (
    shifted as shifted,
)
from cluster.engine.native.refresh import (
    topk_deviation as topk_deviation,
)
from cluster.engine.native.refresh.base import RefreshContext as RefreshContext
from cluster.engine.native.refresh.base import RefreshPolicy as RefreshPolicy
from cluster.engine.native.refresh.base import Selection as Selection
from cluster.engine.native.refresh.base import refresh_policies as refresh_policies

__all__ = ["RefreshContext", "RefreshPolicy", "Selection", "refresh_policies"]
