"""Prometheus metrics of a process.

All families and recording functions are names of this package, as in ``metrics.windows``.
"""

from cluster.metrics.cameras import *  # noqa: F403
from cluster.metrics.families import *  # noqa: F403
from cluster.metrics.gpu import *  # noqa: F403
