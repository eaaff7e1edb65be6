"""Prometheus metrics of a process and its ``/metrics``, and the gateway's page with those of all processes.

All families and what records them are names of this package, as in ``metrics.windows``.
"""

from cluster.metrics.cameras import *  # noqa: F403
from cluster.metrics.families import *  # noqa: F403
from cluster.metrics.gpu import *  # noqa: F403
