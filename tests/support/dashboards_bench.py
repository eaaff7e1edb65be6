"""Every panel of every dashboard against a running cluster and a real Prometheus, and series per camera.

A small cluster runs with its own cameras (two good ones, one that nobody answers for), a Redis server where there is
one, and a Prometheus that scrapes the gateway's page and Ray's. After a while each expression is evaluated through
Prometheus' HTTP API. A panel is dead when one of its expressions gives nothing.
"""

import argparse
import contextlib
import importlib
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.errors import ConfigError, SightlineError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.processes import RedisServer, free_port
from cluster.types import Answer, Question, StreamSpec, Timing, TokenCount
from cluster.wire.metrics_server import FederatedCollector, MetricsServer

SCRAPE_S = 5
PATIENCE_S = 60.0
"""A panel that gives nothing for so long is dead: a machine that is busy with other things misses scrapes."""

START_S = 180.0
NEEDS = {
    "dcgm": "no dcgm-exporter: there is no GPU here",
    "kubernetes": "its cameras come from a configuration, not from Kubernetes",
    "nvml": "no GPU, or no nvidia-ml-py, here",
    "ray": "Ray serves no metrics here",
    "redis": "no redis-server here",
    "tls": "its gateway serves without TLS",
}
# Series that come from there alone.
_MARKS = {
    "dcgm": "DCGM_",
    "kubernetes": "kube_|sightline_camera_resources|sightline_reconciler_",
    "nvml": "sightline_gpu_",
    "ray": r"\bray_",
    "redis": 'redis_|tier="redis"',
    "tls": "sightline_certificate_",
}
LOST = "rtsp://127.0.0.1:9/nobody"
FOLDER = Path("deploy/helm/sightline/dashboards")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long the cluster runs, how many cameras are registered."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long Prometheus scrapes")
    parser.add_argument("--cameras", type=int, default=1000, help="cameras whose series are counted")
    parser.add_argument("--questions", type=int, default=metrics.MAX_QUESTIONS, help="questions of each")


def run(args: argparse.Namespace) -> BenchResult:
    """See the module.

    Raises:
        ConfigError: Prometheus is not installed.
    """
    if shutil.which("prometheus") is None:
        raise ConfigError("there is no prometheus; install it (Debian: apt-get install prometheus)")
    grown = series_per_camera(args.cameras, args.questions)
    with tempfile.TemporaryDirectory(prefix="sightline-dashboards-") as folder:
        rows, most = watch_cluster(Path(folder), args.seconds)
    left_out = Counter(row["state"] for row in rows if row["state"] in NEEDS)
    dead = [row for row in rows if row["state"] == "dead"]
    figures = {
        "dashboards_panels": float(len(rows) - sum(left_out.values())),
        "dashboards_dead_panels": float(len(dead)),
        "dashboards_left_out_panels": float(sum(left_out.values())),
        "metrics_series_per_camera": grown,
        "metrics_series_per_camera_in_cluster": float(most),
    }
    notes = [f"{count} panels left out: {NEEDS[need]}" for need, count in left_out.items()]
    notes.append(f"series per camera: {args.cameras} cameras with {args.questions} questions each, gateway's page")
    return BenchResult(figures, rows, notes)


def series_per_camera(cameras: int, questions: int) -> float:
    """Series by which the gateway's page grows per camera, at decoder, replica and controller together; the real metric
    objects, served and federated over HTTP."""
    server = MetricsServer()
    gateway = CollectorRegistry()
    gateway.register(FederatedCollector(lambda: {"process-0": server.address}, timeout_s=20.0))
    asked = tuple(Question(f"question-{number}", "?") for number in range(questions))
    names = [f"camera-{number:05d}" for number in range(cameras)]
    replica, decoder = metrics.AnsweredCameras(), []
    fleet = metrics.FleetMetrics({})
    tokens, timing = TokenCount(1, 1, 0, 0, 1, 1, 1), Timing(latency_s=0.5)

    def answer_all(some: list[str]) -> None:
        for name in some:
            decoder.append(metrics.CameraMetrics(name))
            replica.open_camera(StreamSpec(name, asked))
            answers = [Answer(name, 0, 0, 1, each.id, 0.5, True, "", False, tokens, timing) for each in asked]
            metrics.record_window(answers[0])
            replica.record_window(answers)
        replica.set_memory_bytes(dict.fromkeys(some, 1))
        fleet.set_expected_cameras(names[: len(decoder)])

    try:
        # What comes with the first camera, as a histogram of all of them does, is not per camera.
        answer_all(names[:1])
        before = _series(gateway)
        answer_all(names[1:])
        return (_series(gateway) - before) / max(1, cameras - 1)
    finally:
        replica.retain_cameras([])
        fleet.set_expected_cameras([])
        for camera in decoder:
            camera.remove()
        server.close()


def _series(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


# -- a cluster, and who looks at it --------------------------------------------------------------
def watch_cluster(folder: Path, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Rows of all panels, and the most series that one camera has on the gateway's page."""
    runtime = importlib.import_module("actors.runtime")
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer()).url if shutil.which("redis-server") else None
        cluster = stack.enter_context(runtime.Cluster(_configuration(folder, redis), on_phase=lambda _: None))
        ray = _ray_metrics()
        prometheus = stack.enter_context(_prometheus(folder, {"sightline": [cluster.metrics_address], "ray": ray}))
        lacking = _lacking(redis=redis is not None, ray=bool(ray))
        began = time.monotonic()
        _until_answered(cluster.metrics_address)
        _ask(cluster.gateway_address)
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        rows = _rows(prometheus, lacking)
        deadline = time.monotonic() + PATIENCE_S
        while any(row["state"] == "dead" for row in rows) and time.monotonic() < deadline:
            time.sleep(1.0)
            rows = [
                now if row["state"] == "dead" else row
                for row, now in zip(rows, _rows(prometheus, lacking), strict=True)
            ]
        return rows, _most_series(_page(cluster.metrics_address))


def _configuration(folder: Path, redis: str | None) -> Any:
    from cluster.config import load_config
    from cluster.lab.scenes.street_clips import make_clip

    clip = folder / "street.mp4"
    make_clip("street", clip, seconds=24, size=(160, 96))
    playing = {"loop": True, "realtime": True}
    cameras: list[dict[str, Any]] = [
        {"name": name, "source": str(clip), "source_options": playing} for name in ("gate", "yard")
    ]
    cameras.append({"name": "lost", "source": LOST})
    return load_config(
        None,
        {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "gateway": {"port": 0, "http_port": 0},
            "sampling": {"anchor_interval_s": 4, "lazy_decode": "auto"},
            "window": {"length_s": 4, "stride_s": 2, "static_gate": False},
            "questions": [{"id": "person", "text": "Is there a person?", "threshold": 0.01}],
            "cameras": cameras,
            "tiers": {"redis_url": redis},
            "alerts": {"sinks": [{"name": "log", "kind": "log"}]},
            "cluster": {"decoders": 1, "start_timeout_s": 600, "log_dir": str(folder / "logs")},
        },
    )


@contextlib.contextmanager
def _prometheus(folder: Path, jobs: dict[str, list[str]]) -> Iterator[str]:
    """Address of a Prometheus that scrapes ``jobs`` and evaluates the chart's rules."""
    port = free_port()
    rules = sorted(Path("deploy/helm/sightline/rules").absolute().glob("*.yaml"))
    settings = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items() if targets
        ],
    }
    file = folder / "prometheus.json"
    # JSON is YAML.
    file.write_text(json.dumps(settings))
    listen = f"127.0.0.1:{port}"
    data = f"--storage.tsdb.path={folder / 'tsdb'}"
    with _process(["prometheus", f"--config.file={file}", data, f"--web.listen-address={listen}"]):
        deadline = time.monotonic() + START_S
        while not _answers(f"http://{listen}/-/ready"):
            if time.monotonic() > deadline:
                raise SightlineError(f"prometheus did not start within {START_S:g} s")
            time.sleep(0.1)
        yield listen


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ray_metrics() -> list[str]:
    ray = importlib.import_module("ray")
    there = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if all(_answers(f"http://{address}/metrics") for address in there):
            return there
        time.sleep(0.5)
    return []


def _lacking(*, redis: bool, ray: bool) -> set[str]:
    lacking = {"kubernetes", "tls"} | ({"nvml", "dcgm"} if metrics.gpu_collector() is None else set())
    return lacking | ({"redis"} if not redis else set()) | ({"ray"} if not ray else set())


def _until_answered(address: str) -> None:
    deadline = time.monotonic() + START_S
    while "sightline_camera_score{" not in _page(address):
        if time.monotonic() > deadline:
            raise SightlineError(f"no camera was answered within {START_S:g} s")
        time.sleep(0.5)


def _ask(address: str) -> None:
    """A free question, once there is something to ask about."""
    from cluster.client import GatewayClient

    deadline = time.monotonic() + START_S
    with GatewayClient(address) as client:
        while True:
            try:
                for _ in client.ask("gate", "What was there?", max_new_tokens=4):
                    pass
                return
            except SightlineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)


# -- panels --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Panel:
    """What the bench needs of a dashboard's panel: its expressions, in PromQL with Grafana's variables."""

    dashboard: str
    title: str
    expressions: tuple[str, ...]

    @property
    def needs(self) -> str:
        """What must be there besides Sightline itself, one of :data:`NEEDS`; empty for nothing."""
        found = (need for need, mark in _MARKS.items() if any(re.search(mark, each) for each in self.expressions))
        return next(found, "")


def panels(folder: Path) -> list[Panel]:
    """Every panel of the dashboards in ``folder``, rows left out."""
    bodies = [json.loads(path.read_text()) for path in sorted(folder.glob("sightline-*.json"))]
    return [
        Panel(body["title"], panel["title"], tuple(target["expr"] for target in panel["targets"]))
        for body in bodies
        for panel in body["panels"]
        if panel["type"] != "row"
    ]


def concrete(expression: str, interval: str = "5m") -> str:
    """The expression with Grafana's variables replaced, as Prometheus evaluates it for all values."""
    return re.sub(r"\$\{?[a-z]+\}?", ".*", expression.replace("$__rate_interval", interval))


# -- evaluating ----------------------------------------------------------------------------------
def _rows(prometheus: str, lacking: set[str]) -> list[dict[str, Any]]:
    return [_row(panel, prometheus, lacking) for panel in panels(FOLDER)]


def _row(panel: Panel, prometheus: str, lacking: set[str]) -> dict[str, Any]:
    """One panel: how many series its expressions give, and ``state``: alive, dead, or what it needs and is not here."""
    counts = [_evaluate(prometheus, expression) for expression in panel.expressions]
    state = panel.needs if panel.needs in lacking else "alive" if all(counts) else "dead"
    return {"dashboard": panel.dashboard, "panel": panel.title, "series": sum(counts), "state": state}


def _evaluate(prometheus: str, expression: str) -> int:
    """Series with a number that an expression gives now."""
    query = urllib.parse.urlencode({"query": concrete(expression, f"{10 * SCRAPE_S}s")})
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/query?{query}", timeout=10) as reply:
        result = json.load(reply)["data"]["result"]
    return sum(not math.isnan(float(series["value"][1])) for series in result)


def _most_series(page: str) -> int:
    """Of one camera."""
    families = text_string_to_metric_families(page)
    cameras = [sample.labels["camera"] for family in families for sample in family.samples if "camera" in sample.labels]
    return max(Counter(cameras).values(), default=0)


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
        return text


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
