"""The bench of dashboards: a real Prometheus, and panels that are alive, dead, or left out."""

import shutil

import dashboards_bench as dashboards
import pytest
from dashboards_bench import Panel
from prometheus_client import CollectorRegistry, Gauge
from waiting import until

from cluster.wire.metrics_server import MetricsServer

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    registry = CollectorRegistry()
    Gauge("there", "Something.", ["camera"], registry=registry).labels("gate").set(1)
    server = MetricsServer(registry=registry)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dashboards, "SCRAPE_S", 1)
        with dashboards._prometheus(tmp_path_factory.mktemp("prometheus"), {"one": [server.address]}) as address:
            until(lambda: dashboards._evaluate(address, "there"), "a scrape")
            yield address
    server.close()


@pytest.mark.parametrize(
    ("queries", "needs", "state"),
    [
        (["there"], "", "alive"),
        (['there{camera=~"$camera"}', "count(there)"], "", "alive"),
        (["absent_metric"], "", "dead"),
        (["there", "absent_metric"], "", "dead"),
        (["there * NaN"], "", "dead"),
        (["there == 2"], "", "dead"),
        (["DCGM_FI_DEV_GPU_UTIL"], "dcgm", "dcgm"),
        (["ray_node_cpu_utilization"], "ray", "dead"),
        (['sum(sightline_tier_bytes{tier="redis"})'], "redis", "dead"),
        (["sum by (state) (sightline_camera_resources)"], "kubernetes", "dead"),
        (["sightline_gpu_busy_ratio"], "nvml", "dead"),
    ],
)
def test_a_panel_is_dead_when_one_of_its_expressions_gives_nothing(prometheus, queries, needs, state):
    panel = Panel("Board", "Panel", tuple(queries))
    assert panel.needs == needs
    assert dashboards._row(panel, prometheus, {"dcgm"})["state"] == state


def test_series_are_counted_by_camera():
    page = 'a{camera="gate"} 1\na{camera="yard"} 1\nb{camera="gate",question="x"} 2\nc 3\n'
    assert dashboards._most_series(page) == 2
    assert dashboards._most_series("c 3\n") == 0
