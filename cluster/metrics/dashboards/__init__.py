"""The Grafana dashboards of the chart; ``python -m cluster.metrics.dashboards FOLDER`` writes their files."""

from cluster.metrics.dashboards.attention import ALERTS, CAMERAS
from cluster.metrics.dashboards.engineers import ENGINE, MACHINES
from cluster.metrics.dashboards.fleet import FLEET
from cluster.metrics.dashboards.grafana import Dashboard, Panel, concrete

DASHBOARDS: tuple[Dashboard, ...] = (FLEET, CAMERAS, ALERTS, ENGINE, MACHINES)

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "concrete"]
