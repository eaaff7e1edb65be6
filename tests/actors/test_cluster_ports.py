"""Every port of a running cluster: for this machine alone, or behind TLS and a token. Two gateways: sessions, cameras
and deletions are the same at both, and only one of them dies."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import ray
from certificates import Authority
from cluster_parts import QUESTION, until

from actors.remote import NAMESPACE, gateway_names
from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.errors import UnauthenticatedError, UnavailableError
from cluster.hosts import is_loopback
from cluster.security.roles import Role
from cluster.security.sessions import KEPT_S
from cluster.security.tokens import make_token, write_tokens
from cluster.wire.server import is_serving
from cluster.wire.tls import ClientCredentials

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

FIRST, SECOND = gateway_names(2)
HOST = "cctv.city.example"
"""One Service is in front of both."""


class Secured(NamedTuple):
    """``secret`` may view, ``admin`` everything; ``authority``: file with the outer certificate's; ``logs``: folder."""

    cluster: Cluster
    secret: str
    authority: Path
    admin: str
    logs: Path


@pytest.fixture(scope="module")
def secured(clip, tmp_path_factory):
    """Open to every network, TLS outside, mutual TLS inside."""
    folder = tmp_path_factory.mktemp("secured")
    outside, inside = Authority("outside"), Authority("inside")
    secret, token = make_token("viewer", [Role.VIEW])
    admin, known = make_token("room", [Role.ADMIN], ["*"])
    write_tokens(folder / "tokens.json", [token, known])
    certificate, key = outside.issue(folder, "gateway")
    inner, inner_key = inside.issue(folder, "inner", host="sightline")
    config = load_config(
        None,
        {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "gateway": {"host": "0.0.0.0", "port": 0, "http_port": 0},
            "sampling": {"anchor_interval_s": 4},
            "window": {"length_s": 4, "stride_s": 2, "static_gate": False},
            "questions": [QUESTION],
            "cameras": [
                {
                    "name": "gate",
                    "source": str(clip),
                    "source_options": {"loop": True, "realtime": True, "speed": 4},
                    "privacy_masks": ["0,0 0.5,0 0.5,0.5 0,0.5"],
                }
            ],
            "cluster": {
                "heartbeat_s": 0.25,
                "heartbeat_timeout_s": 8,
                "decoders": 1,
                "gateways": 2,
                "start_timeout_s": 300,
                "log_dir": str(folder / "logs"),
            },
            "security": {
                "file_roots": [tempfile.gettempdir()],
                "tokens_file": str(folder / "tokens.json"),
                "tls": {"certificate": str(certificate), "key": str(key)},
                "internal_tls": {
                    "certificate": str(inner),
                    "key": str(inner_key),
                    "ca": str(inside.write(folder / "inside.crt")),
                },
            },
        },
    )
    with Cluster(config) as cluster:
        yield Secured(cluster, secret, outside.write(folder / "outside.crt"), admin, folder / "logs")


def port_of(address):
    return int(address.rpartition(":")[2])


def listening():
    """``{port: whether other machines reach it}`` of every process of the cluster."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    port, outside = connection.laddr.port, not is_loopback(connection.laddr.ip)
                    found[port] = found.get(port, False) or outside
    return found


def test_answers_come_with_everything_encrypted(secured):
    """Frames, answers, the tier, health and metrics all travel between the processes for that."""
    cluster, secret, ca, *_ = secured
    credentials = ClientCredentials(secret, tls=True, authority=ca)
    address = f"127.0.0.1:{port_of(cluster.gateway_address)}"
    with GatewayClient(address, credentials=credentials) as client:
        status = until("a window of gate", lambda: (s := client.camera_get("gate")).windows_done and s)
        assert status.state == "running"
    nobody = ClientCredentials("", tls=True, authority=ca)
    with GatewayClient(address, credentials=nobody) as client, pytest.raises(UnauthenticatedError):
        client.cameras_list()
    context = ssl.create_default_context(cafile=ca)
    page = f"https://127.0.0.1:{port_of(cluster.metrics_address)}/metrics"
    asked = urllib.request.Request(page, headers={"Authorization": f"Bearer {secret}"})
    with urllib.request.urlopen(asked, timeout=20, context=context) as reply:
        lines = reply.read().decode().splitlines()
    up = [line for line in lines if line.startswith("sightline_process_up{")]
    assert len(up) >= 3
    assert all(line.endswith(" 1.0") for line in up), up
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(page, timeout=20, context=context)


def test_every_port_is_closed_to_strangers(secured):
    cluster = secured.cluster
    doors = {port_of(address) for gateway in cluster.gateways for address in (gateway.rpc, gateway.metrics)}
    assert len(doors) == 4
    readiness = cluster.readiness()
    members = [*readiness.decoders.values(), *readiness.replicas.values()]
    inner = {port_of(address) for member in members for address in (member.address, member.metrics_address)}
    ports = listening()
    assert doors | inner <= ports.keys()
    # Ray's own as well.
    assert {port for port, outside in ports.items() if outside} == doors
    # Ray's ask for Ray's token: nothing of ours answers there.
    for port in ports:
        assert not speaks(port), port


def speaks(port):
    """Whether a stranger gets a page of ours there, with TLS or without; gRPC health is no sign, Ray has it too."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    for scheme in ("http", "https"):
        with contextlib.suppress(OSError, ValueError, Exception):
            asked = f"{scheme}://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(asked, timeout=1.0, context=trusting) as reply:
                if b"sightline_" in reply.read(2**20):
                    return True
    return False


def test_who_has_no_certificate_of_the_cluster_is_refused(secured):
    cluster = secured.cluster
    for member in (*cluster.readiness().decoders.values(), *cluster.readiness().replicas.values()):
        assert not asyncio.run(is_serving(member.address))
        with pytest.raises(OSError, match=r"\S"):
            urllib.request.urlopen(f"http://{member.metrics_address}/metrics", timeout=3)


def test_a_plain_client_is_told_nothing(secured):
    cluster = secured.cluster
    address = f"127.0.0.1:{port_of(cluster.gateway_address)}"
    with GatewayClient(address, deadline_s=3.0) as client, pytest.raises(UnavailableError):
        client.cameras_list()


def handle(name: str):
    return ray.get_actor(name, namespace=NAMESPACE)


def ask(secured: Secured, gateway: str, method: str, path: str, body=None, *, host: str = HOST, **headers: str):
    """``(status, JSON or text, cookie)`` of a gateway, wherever it listens now."""
    port = port_of(ray.get(handle(gateway).ready.remote(), timeout=60).metrics)
    context = ssl.create_default_context(cafile=secured.authority)
    connection = HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    data = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, data, {"Host": host, "Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status == 503:
            raise UnavailableError(text)
        cookie = (reply.headers.get("Set-Cookie") or "").partition(";")[0]
        return reply.status, json.loads(text) if text.startswith(("{", "[")) else text, cookie
    except (OSError, HTTPException) as error:
        raise UnavailableError(str(error)) from None
    finally:
        connection.close()


def test_a_session_counts_at_every_gateway_and_ends_at_every_gateway(secured) -> None:
    status, who, cookie = ask(secured, FIRST, "POST", "/v1/session", {"token": secured.admin})
    assert (status, who["name"]) == (200, "room")
    for gateway in (FIRST, SECOND):
        assert ask(secured, gateway, "GET", "/v1/me", Cookie=cookie)[:2] == (200, who)
    assert ask(secured, SECOND, "GET", "/v1/me", host="elsewhere.example", Cookie=cookie)[0] == 401
    assert ask(secured, SECOND, "DELETE", "/v1/session", Cookie=cookie)[0] == 200
    assert ask(secured, SECOND, "GET", "/v1/me", Cookie=cookie)[0] == 401
    time.sleep(KEPT_S)
    assert ask(secured, FIRST, "GET", "/v1/me", Cookie=cookie)[0] == 401


def test_a_camera_of_one_is_at_the_other_and_its_scores_are_deleted_at_both(secured, clip) -> None:
    known = {"Authorization": f"Bearer {secured.admin}"}
    status, _, _ = ask(secured, FIRST, "POST", "/v1/cameras", {"name": "archive", "source": str(clip)}, **known)
    assert status == 200

    def ended() -> bool:
        listed = ask(secured, SECOND, "GET", "/v1/cameras", **known)[1]["cameras"]
        found = [(each["name"], each["state"], each["windows_done"]) for each in listed if each["name"] != "gate"]
        return found == [("archive", "ended", 12)]

    def scores(gateway: str) -> int:
        found = ask(secured, gateway, "GET", "/v1/cameras/archive/history", **known)[1]
        return len(found["scores"].get("person", []))

    until("all its windows", ended)
    for gateway in (FIRST, SECOND):
        until(f"scores at {gateway}", lambda gateway=gateway: scores(gateway) == 12)
    assert ask(secured, FIRST, "POST", "/v1/forget", {"camera": "archive", "before_s": 0}, **known)[0] == 200
    assert [scores(gateway) for gateway in (FIRST, SECOND)] == [0, 0]


def test_every_series_is_on_one_page(secured) -> None:
    known = {"Authorization": f"Bearer {secured.admin}"}
    up = f'sightline_process_up{{process="{SECOND}"}} 1.0'
    until("the first one to see the second", lambda: up in ask(secured, FIRST, "GET", "/metrics", **known)[1])
    pages = [ask(secured, gateway, "GET", "/metrics", **known)[1] for gateway in (FIRST, SECOND)]
    shown = [{line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")} for page in pages]
    assert not shown[0] & shown[1]
    assert all(f'process="{SECOND}"' in series for series in shown[1])
    for process in (FIRST, "controller", "decoder-0", "replica-0", "alerting"):
        assert f'process="{process}"' in pages[0]


def test_a_killed_gateway_ends_no_session(secured) -> None:
    who = ask(secured, FIRST, "POST", "/v1/session", {"token": secured.admin})
    before = ray.get(handle(FIRST).process_id.remote())
    os.kill(before, signal.SIGKILL)
    assert ask(secured, SECOND, "GET", "/v1/me", Cookie=who[2])[0] == 200

    def back() -> bool:
        try:
            return ray.get(handle(FIRST).process_id.remote(), timeout=5) != before
        except ray.exceptions.RayError as error:
            raise UnavailableError(str(error)) from None

    until("the first one", back)
    # One that has just started may be too slow to ask the controller in time.
    assert until("an answer", lambda: ask(secured, FIRST, "GET", "/v1/me", Cookie=who[2]))[:2] == (200, who[1])
    assert len({each.metrics for each in secured.cluster.gateways}) == 2
    written = "".join(path.read_text() for path in secured.logs.iterdir())
    assert secured.admin not in written
    assert who[2].partition("=")[2] not in written
