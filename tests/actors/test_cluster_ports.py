"""Every port of a running cluster: for this machine alone, or behind TLS and a token."""

import asyncio
import contextlib
import ssl
import urllib.error
import urllib.request

import psutil
import pytest
from certificates import Authority
from cluster_parts import QUESTION, until

from actors.runtime import Cluster
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.errors import UnauthenticatedError, UnavailableError
from cluster.hosts import is_loopback
from cluster.security.roles import Role
from cluster.security.tokens import make_token, write_tokens
from cluster.wire.server import is_serving
from cluster.wire.tls import ClientCredentials

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def secured(clip, tmp_path_factory):
    """``(cluster, secret, authority)``: open to every network, TLS outside, mutual TLS inside."""
    folder = tmp_path_factory.mktemp("secured")
    outside, inside = Authority("outside"), Authority("inside")
    secret, token = make_token("viewer", [Role.VIEW])
    write_tokens(folder / "tokens.json", [token])
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
            "cluster": {"heartbeat_s": 0.25, "heartbeat_timeout_s": 8, "decoders": 1, "start_timeout_s": 200},
            "security": {
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
        yield cluster, secret, outside.write(folder / "outside.crt")


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
    cluster, secret, ca = secured
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
    cluster, _, _ = secured
    doors = {port_of(cluster.gateway_address), port_of(cluster.metrics_address)}
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
    cluster, _, _ = secured
    for member in (*cluster.readiness().decoders.values(), *cluster.readiness().replicas.values()):
        assert not asyncio.run(is_serving(member.address))
        with pytest.raises(OSError, match=r"\S"):
            urllib.request.urlopen(f"http://{member.metrics_address}/metrics", timeout=3)


def test_a_plain_client_is_told_nothing(secured):
    cluster, _, _ = secured
    address = f"127.0.0.1:{port_of(cluster.gateway_address)}"
    with GatewayClient(address, deadline_s=3.0) as client, pytest.raises(UnavailableError):
        client.cameras_list()
