"""Exposition, naming and federation, over real HTTP."""

import errno
import re
import socket
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.errors import SightlineError
from cluster.types import Answer, Timing, TokenCount
from cluster.wire.metrics_server import FederatedCollector, MetricsServer, serve_metrics

UNITS = ("_seconds", "_bytes", "_ratio")


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


def value(family, **labels):
    found = [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def server():
    server = MetricsServer()
    yield server
    server.close()


def answer(*, gated=False):
    counts = TokenCount(full=100, kept=40, reused=25, refreshed=10, new=5, query=7, encoded=5)
    return Answer("cam", 0, 0, 1, "q", 0.6, True, "", gated, counts, Timing(0.1, 0.2, 0.01, 0.3, 0.61))


def test_a_window_is_counted_once_with_its_tokens_and_stages(server):
    before = scrape(server.address)

    def grown(name, **labels):
        def read(page):
            samples = [s for s in page[name].samples if labels.items() <= s.labels.items()] if name in page else []
            return sum(s.value for s in samples if s.name.endswith(("_total", "_count")))

        return read(scrape(server.address)) - read(before)

    metrics.record_window(answer(), late=True)
    metrics.record_window(answer(gated=True))
    metrics.drop_window("slow_replica", 3)
    metrics.lose_window()
    assert grown("sightline_windows", result="done") == 1
    assert grown("sightline_windows", result="gated") == 1
    assert grown("sightline_windows", result="late") == 1
    assert grown("sightline_windows", result="dropped", reason="slow_replica") == 3
    assert grown("sightline_windows", result="lost") == 1
    assert grown("sightline_tokens", kind="full") == 200
    assert grown("sightline_tokens", kind="refreshed") == 20
    assert grown("sightline_stage_seconds", stage="llm") == 1  # a gated window has no stages
    assert grown("sightline_stage_seconds", stage="total") == 2


def test_camera_series_come_and_go_together(server):
    now = [100.0]
    camera = metrics.CameraMetrics("gate-7", clock=lambda: now[0])
    assert value(scrape(server.address)["sightline_camera_last_frame_age_seconds"], camera="gate-7") == float("inf")
    camera.set_state("running")
    camera.frame_decoded()
    now[0] = 103.5
    camera.gaps.inc()
    camera.count_lazy_events({"missed": 2, "overflow": 0})
    page = scrape(server.address)
    assert value(page["sightline_camera_last_frame_age_seconds"], camera="gate-7") == 3.5
    assert value(page["sightline_camera_state"], camera="gate-7", state="running") == 1
    assert value(page["sightline_camera_state"], camera="gate-7", state="waiting") == 0
    assert value(page["sightline_stream_gaps"], camera="gate-7") == 1
    assert value(page["sightline_lazy_events"], camera="gate-7", event="missed") == 2
    assert value(page["sightline_lazy_events"], camera="gate-7", event="overflow") == 0
    with pytest.raises(ValueError, match="unknown camera state 'runing'"):
        camera.set_state("runing")
    camera.remove()
    left = [
        s for family in scrape(server.address).values() for s in family.samples if s.labels.get("camera") == "gate-7"
    ]
    assert left == []


def test_names_follow_the_conventions_and_histograms_know_no_camera(server):
    camera = metrics.CameraMetrics("any")
    metrics.record_window(answer())
    page = {name: family for name, family in scrape(server.address).items() if name.startswith("sightline_")}
    camera.remove()
    assert len(page) >= 15
    for name, family in page.items():
        assert re.fullmatch(r"sightline_[a-z]+(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert not name.removesuffix("build_info").endswith(("_count", "_sum", "_bucket", "_info", "_total"))
        if re.search(r"(age|latency|duration|stage)", name):
            assert name.endswith(UNITS)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            if family.type == "histogram":
                assert "camera" not in sample.labels


def registry_with(name, count, **labels):
    registry = CollectorRegistry()
    counter = Counter(name, "Something.", list(labels), registry=registry)
    (counter.labels(*labels.values()) if labels else counter).inc(count)
    return registry


def test_federation_merges_processes_and_says_who_is_down():
    first = MetricsServer(registry=registry_with("sightline_things", 2, kind="a"))
    second = MetricsServer(registry=registry_with("sightline_things", 5, kind="a"))
    gone = MetricsServer(registry=CollectorRegistry())
    gone.close()
    addresses = {"decoder-0": first.address, "replica-0": second.address, "decoder-1": gone.address, "alerting": ""}
    gateway = CollectorRegistry()
    own = {"gateway": registry_with("sightline_things", 1, kind="b")}
    gateway.register(
        FederatedCollector(lambda: addresses, lambda: own, lambda: {"gateway-1": True, "gateway-2": False})
    )
    shown = MetricsServer(registry=gateway)
    try:
        page = scrape(shown.address)
    finally:
        for server in (first, second, shown):
            server.close()
    things = page["sightline_things"]
    assert things.type == "counter"
    assert value(things, process="decoder-0", kind="a") == 2
    assert value(things, process="replica-0", kind="a") == 5
    assert value(things, process="gateway", kind="b") == 1
    up = {sample.labels["process"]: sample.value for sample in page["sightline_process_up"].samples}
    assert up == {"decoder-0": 1, "replica-0": 1, "decoder-1": 0, "alerting": 0, "gateway-1": 1, "gateway-2": 0}


def test_histograms_survive_federation():
    metrics.stage_seconds.labels("plan").observe(0.02)
    server = MetricsServer()
    try:
        collected = list(FederatedCollector(lambda: {"replica-0": server.address}).collect())
    finally:
        server.close()
    stages = next(family for family in collected if family.name == "sightline_stage_seconds")
    assert stages.type == "histogram"
    buckets = [s for s in stages.samples if s.name.endswith("_bucket") and s.labels["stage"] == "plan"]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert buckets[-1].labels == {"stage": "plan", "le": "+Inf", "process": "replica-0"}


def test_out_of_file_descriptors_it_waits_for_some(monkeypatch):
    """It would otherwise use up a core, for as long as a client waits to be accepted."""
    tried = []

    def accept(_):
        tried.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    server = MetricsServer(registry=registry_with("sightline_things", 3))
    try:
        with monkeypatch.context() as full:
            full.setattr(socket.socket, "accept", accept)
            host, port = server.address.split(":")
            with socket.create_connection((host, int(port))):
                time.sleep(1.5)
            assert 1 <= len(tried) <= 3
        assert value(scrape(server.address)["sightline_things"]) == 3
    finally:
        server.close()


def test_a_silent_or_babbling_process_delays_nobody():
    silent = socket.create_server(("127.0.0.1", 0))
    babbler = socket.create_server(("127.0.0.1", 0))

    def babble():
        peer, _ = babbler.accept()
        peer.recv(4096)
        peer.sendall(b"HTTP/1.0 200 OK\r\n\r\nthis is { not = metrics\n")
        peer.close()

    thread = threading.Thread(target=babble, daemon=True)
    thread.start()
    alive = MetricsServer(registry=registry_with("sightline_things", 1))
    where = {
        "silent": f"127.0.0.1:{silent.getsockname()[1]}",
        "babbler": f"127.0.0.1:{babbler.getsockname()[1]}",
        "alive": alive.address,
    }
    try:
        families = {f.name: f for f in FederatedCollector(lambda: where, timeout_s=0.3).collect()}
    finally:
        alive.close()
        silent.close()
        babbler.close()
    thread.join(5)
    up = {sample.labels["process"]: sample.value for sample in families["sightline_process_up"].samples}
    assert up == {"silent": 0, "babbler": 0, "alive": 1}
    assert value(families["sightline_things"], process="alive") == 1


def test_a_taken_port_is_one_clear_sentence_and_the_next_one_is_taken_if_there_is_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SightlineError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another"):
            serve_metrics("127.0.0.1", [port], str)
        page = serve_metrics("127.0.0.1", [port, 0], lambda: "decoder-7")
    try:
        samples = [each for family in scrape(page.address).values() for each in family.samples]
    finally:
        page.close()
    assert {each.labels["process"] for each in samples} == {"decoder-7"}
