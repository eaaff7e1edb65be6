"""The gateway actor's own ports, without Ray: questions over gRPC and HTTP reach the replica that owns the camera."""

import asyncio
import http.client
import json

import pytest
from memory_parts import replica

from actors import gateway
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.control.camera_record import Route
from cluster.errors import SightlineError, UnavailableError, UnknownCameraError


class Directory:
    """What the controller says, in a dictionary."""

    def __init__(self, config):
        self.routes = {}
        self.sessions = None
        self.controller = self

    async def where(self, name):
        if name not in self.routes:
            raise UnknownCameraError(f"there is no camera {name!r}")
        return Route(None, None, None, self.routes[name])

    # No test asks for these.
    tested_source = any_decoder = where

    async def replicas(self, known, timeout_s):
        raise UnavailableError("not asked in this test")

    async def metrics_addresses(self):
        return {}

    async def gateways(self, but):
        return {}

    async def list_cameras(self):
        raise UnavailableError("not asked in this test")

    alerting = list_cameras


def http_request(address, method, path, body=None):
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, data


@pytest.fixture
def one_directory(monkeypatch):
    directory = Directory(None)
    monkeypatch.setattr(gateway, "ControllerDirectory", lambda: directory)
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    return directory


def configuration(**gateway_keys):
    open_door = {"allow_unauthenticated": True}
    return load_config(None, {"gateway": {"port": 0, "http_port": 0, **gateway_keys}, "security": open_door})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_both_ports_lead_to_the_replica(one_directory, host):
    running = gateway.Gateway(configuration(host=host))
    try:
        addresses = await running.ready()
        pages = addresses.metrics.replace("0.0.0.0", "127.0.0.1")
        async with replica() as (handler, address):
            one_directory.routes = {"gate": address, "yard": None}
            with GatewayClient(addresses.rpc.replace("0.0.0.0", "127.0.0.1")) as client:
                *pieces, _ = await asyncio.to_thread(lambda: list(client.ask("gate", "Who?")))
                assert pieces == ["two ", "words"]
                with pytest.raises(UnavailableError, match="no replica is ready for camera 'yard' yet"):
                    await asyncio.to_thread(lambda: client.memory("yard"))
                with pytest.raises(UnknownCameraError, match="there is no camera 'gatr'"):
                    await asyncio.to_thread(lambda: client.forget("gatr"))
            question = json.dumps({"camera": "gate", "text": "Who?"})
            status, data = await asyncio.to_thread(http_request, pages, "POST", "/v1/ask", question)
            assert status == 200
            assert [list(json.loads(line)) for line in data.splitlines()] == [["text"], ["text"], ["result"]]
            assert [spec.text for spec in handler.asked] == ["Who?", "Who?"]
        status, data = await asyncio.to_thread(http_request, pages, "GET", "/metrics")
        assert status == 200
        assert b'process="gateway"' in data
    finally:
        await running.stop()
    with pytest.raises(OSError):
        await asyncio.to_thread(http_request, pages, "GET", "/metrics")


async def test_a_port_for_http_that_is_taken(one_directory):
    first = gateway.Gateway(configuration())
    taken = int((await first.ready()).metrics.rpartition(":")[2])
    second = gateway.Gateway(configuration(http_port=taken))
    try:
        with pytest.raises(SightlineError, match=rf"127.0.0.1:{taken}: Address already in use; .*gateway.http_port"):
            await second.ready()
    finally:
        await first.stop()
        await second.stop()
