"""What the generator sees of its machine and of a metrics page; it is never early, and knows when it is late."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path

import pytest
from certificates import Authority
from prometheus_client.metrics_core import GaugeMetricFamily
from waiting import until_async

from cluster.config import load_config
from cluster.types import EncodedPacket
from cluster.wire.tls import ClientCredentials, TlsFiles
from loadtest.fleet import Pacer
from loadtest.machine import Machine, fetch, gpu_shares, grown, level, parse
from loadtest.profile import Due
from loadtest.target import Target


def test_cores_are_those_of_the_processes_and_roles_are_added_up() -> None:
    # They end by themselves, should this process not get round to it.
    spin = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        processes = {"decoder-0": spinning[0].pid, "decoder-1": spinning[1].pid, "gone-0": 2**22 - 1}
        machine = Machine()
        machine.look(processes)
        before, begun = [sum(os.times()[:4]), *(_seconds(p.pid) for p in spinning)], time.monotonic()
        time.sleep(0.6)
        use = machine.look(processes)
        passed = time.monotonic() - begun
        used = sum(_seconds(p.pid) for p in spinning) - sum(before[1:])
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert use.cores["decoder"] == pytest.approx(used / passed, abs=0.1)
    assert set(use.cores) == {"decoder", "generator"}
    assert use.memory_bytes["decoder"] > 2 * 2**20
    assert 0 < use.busy <= 1.01
    assert use.others >= 0


def _seconds(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_what_gpus_do_is_read_from_the_clusters_own_metrics_of_them() -> None:
    busy = GaugeMetricFamily("sightline_gpu_busy_ratio", "", labels=["gpu"])
    decoder = GaugeMetricFamily("sightline_gpu_decoder_busy_ratio", "", labels=["gpu"])
    memory = GaugeMetricFamily("sightline_gpu_memory_bytes", "", labels=["gpu", "kind"])
    for gpu, share in (("0", 0.87), ("1", 0.03)):
        busy.add_metric([gpu], share)
    # The other does not say how much it decodes.
    decoder.add_metric(["0"], 0.12)
    memory.add_metric(["0", "used"], 2**30)
    found = gpu_shares((busy, decoder, memory))
    assert found == {"GPU 0 computing": 0.87, "GPU 1 computing": 0.03, "GPU 0 decoding": 0.12}
    assert gpu_shares(()) == {}


PAGE = """# TYPE sightline_windows_total counter
sightline_windows_total{result="done",reason="",process="replica-0"} %d
sightline_windows_total{result="dropped",reason="late",process="replica-0"} %d
sightline_windows_total{result="dropped",reason="late",process="replica-1"} %d
# TYPE sightline_queue_depth gauge
sightline_queue_depth{queue="windows",process="replica-0"} 3
sightline_queue_depth{queue="windows",process="replica-1"} 4
"""


def test_counters_grow_over_restarts() -> None:
    before, after = parse(PAGE % (100, 7, 2)), parse(PAGE % (150, 4, 2))
    # replica-0 began anew: the four it shows are all since then.
    assert grown(before, after, "sightline_windows_total", "reason", {"result": "dropped"}) == Counter(late=4)
    assert grown(before, after, "sightline_windows_total", "result", {"result": "done"}) == Counter(done=50)
    assert grown(before, after, "sightline_nothing_total", "result") == Counter()
    assert grown({}, after, "sightline_windows_total", "result") == Counter(), "the page could not be read"
    assert level(after, "sightline_queue_depth", "queue") == {"windows": 7}


def test_a_page_that_nobody_serves_is_empty() -> None:
    assert fetch("127.0.0.1:1") == {}


class MetricsHandler(BaseHTTPRequestHandler):
    """A page for who brings the token."""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer sl_x"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.wfile.write((PAGE % (1, 2, 3)).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def metrics_page(tls: ssl.SSLContext | None = None):
    with HTTPServer(("127.0.0.1", 0), MetricsHandler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_page_is_asked_for_with_token_and_tls(tmp_path) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    server = TlsFiles(*authority.issue(tmp_path, "gateway"))
    with metrics_page() as address:
        assert fetch(address, ClientCredentials("sl_x"))
        assert fetch(address) == {}
        assert Target(address, address, load_config()).metrics_trouble() == "Unauthorized"
        assert Target(address, address, load_config(), credentials=ClientCredentials("sl_x")).metrics_trouble() == ""
    with metrics_page(server.context()) as address:
        assert fetch(address, ClientCredentials("sl_x", tls=True, authority=ca))
        assert fetch(address, ClientCredentials("sl_x", tls=True)) == {}
        assert fetch(address, ClientCredentials("sl_x")) == {}


def test_why_the_page_cannot_be_read() -> None:
    def trouble(metrics: str | None, **credentials) -> str:
        return Target(
            "127.0.0.1:1", metrics, load_config(), credentials=ClientCredentials(**credentials)
        ).metrics_trouble()

    assert trouble(None) == ""
    assert "refused" in trouble("127.0.0.1:1")
    assert "not an address" in trouble("somewhere")
    assert "without TLS" in trouble("10.0.0.5:9464", token="sl_x")
    assert "SIGHTLINE_CA" in trouble("127.0.0.1:1", tls=True, authority=Path("/nothing.pem"))


def stream(every_s: float):
    return (Due(number * every_s, EncodedPacket("h264", b"x", 0, 0, True, number), False) for number in count())


async def test_packets_leave_when_they_are_due_and_not_before() -> None:
    pacer, sent, now = Pacer(), [], time.monotonic()
    for began_s in (now + 0.1, now + 0.125):
        pacer.add(began_s, stream(0.05), lambda due, b=began_s: sent.append((b + due.at_s, time.monotonic())))
    ticket = pacer.add(now + 0.1, stream(0.01), lambda _: sent.append((0.0, 0.0)))
    pacer.remove(ticket)
    await asyncio.sleep(0.55)
    assert len(sent) >= 10
    assert all(at >= due > 0 for due, at in sent), "nothing of the removed camera, and nothing early"
    assert [due for due, _ in sent] == sorted(due for due, _ in sent)
    late = pacer.take_lateness()
    assert len(late) == len(sent)
    assert len(pacer.take_lateness()) == 0


async def test_a_pacer_that_was_held_up_says_by_how_much() -> None:
    pacer, sent = Pacer(), []
    ticket = pacer.add(time.monotonic(), stream(0.05), sent.append)
    # What a machine without time for the generator does to it.
    time.sleep(0.2)  # noqa: ASYNC251
    await until_async(lambda: len(sent) >= 4)
    pacer.remove(ticket)
    late = pacer.take_lateness()
    assert len(late) == len(sent)
    assert late[0] >= 0.19
