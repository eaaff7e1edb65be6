"""The port itself: slow and silent clients, too many of them, taken ports, and metrics that hold up nobody."""

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from asyncio.sslproto import SSLProtocol

import pytest
from certificates import Authority
from fastapi import FastAPI, Response
from gateway_parts import Replica, serving
from http_parts import Client, answering, bare_application, dropped, listening
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from sightline.v1 import replicas_pb2
from waiting import until_async

from cluster.errors import SightlineError
from cluster.gateway.http import fleet
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.wire.answers import AnswerHub
from cluster.wire.tls import TlsFiles


@contextlib.asynccontextmanager
async def connected(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_client_that_sends_nothing_loses_its_connection():
    async with listening(bare_application(), header_s=0.2) as (url, _), connected(url) as (reader, _):
        assert await reader.read() == b""


async def test_a_client_that_drips_its_request_loses_its_connection():
    """However often it sends a byte."""
    async with listening(bare_application(), header_s=0.3) as (url, _), connected(url) as (reader, writer):

        async def drip():
            for letter in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000:
                writer.write(bytes([letter]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert not dripping.done() or dripping.exception() is not None
        dripping.cancel()


@pytest.mark.parametrize("asked", [b"GET /v1/cameras", b"PATCH /v1/cameras", b"GET /nowhere"])
async def test_an_expectation_that_is_no_text_is_refused(asked):
    """Also where there is nothing, or not for this method: found by the fuzzer."""
    async with listening(bare_application()) as (url, _), connected(url) as (reader, writer):
        writer.write(asked + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: \xff\r\n\r\n")
        assert b" 417 " in await reader.readline()


async def test_a_client_that_stops_in_mid_request():
    head = b"POST /v1/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    async with answering(Replica(), stall_s=0.2) as (client, _), connected(client.url) as (reader, writer):
        writer.write(head)
        reply = await reader.read()
        assert b" 408 Request Timeout" in reply
        assert b"ended before its Content-Length" in reply


async def test_a_client_that_takes_nothing_loses_its_connection():
    application = FastAPI()

    @application.get("/")
    async def huge() -> Response:
        return Response(b"x" * 2**24)

    before = dropped("cut")
    async with listening(application, stall_s=0.3) as (url, _), connected(url) as (_, writer):
        writer.transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until_async(lambda: dropped("cut") > before)


async def asks(reader, writer, path):
    """The status of one request; the connection stays open."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return int(head.split()[1])


async def test_a_stranger_more_than_may_be_takes_the_place_of_the_oldest():
    """So that a probe is answered however many connections do nothing."""
    before = dropped("evicted")
    async with listening(bare_application(), max_anonymous=2) as (url, _):
        async with connected(url) as (oldest, _), connected(url) as (newer, writer), connected(url) as (newest, asking):
            assert await oldest.read() == b""
            assert await asks(newest, asking, "/healthz") == 200
            assert await asks(newer, writer, "/healthz") == 200
        assert dropped("evicted") - before == 1


async def test_a_thousand_silent_connections_keep_no_probe_out():
    async with listening(bare_application(), max_anonymous=16) as (url, _), contextlib.AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(connected(url))
        async with Client(url) as client:
            assert (await client("GET", "/healthz"))[0] == 200


async def test_who_may_ask_is_no_stranger_and_keeps_the_connection(tmp_path):
    """Nor do strangers get in the way of those who come with a token; without one it is a stranger's request."""
    async with serving(tmp_path, cameras=1, tokens=True) as served, connected(served.url) as (reader, writer):
        connections = served.gateway._http
        secret = served.secrets["view"].encode()
        writer.write(b"GET /v1/cameras HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret + b"\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        async with contextlib.AsyncExitStack() as stack:
            strangers = [await stack.enter_async_context(connected(served.url)) for _ in range(400)]
            for stranger, asking in strangers[-3:]:
                assert await asks(stranger, asking, "/v1/cameras") == 401
            assert len(connections._admitted) == 1
            assert len(connections._anonymous._held) == 128
            assert not writer.transport.is_closing()
            assert not reader.at_eof()


async def test_one_connection_more_than_may_be_of_those_who_may_ask():
    """A probe is still answered, over a connection of its own or over that one."""
    before = dropped("refused")
    async with listening(bare_application(replicas()), max_connections=2) as (url, _), connected(url) as one:
        async with connected(url) as two, connected(url) as three:
            assert await asks(*one, "/v1/replicas") == 200
            assert await asks(*two, "/v1/replicas") == 200
            assert await asks(*one, "/v1/replicas") == 200
            assert await asks(*three, "/v1/replicas") == 503
            assert await asks(*three, "/healthz") == 200
            assert dropped("refused") - before == 1
        async with asyncio.timeout(30), Client(url) as client:
            while (await client("GET", "/v1/replicas"))[0] != 200:
                pass


def replicas():
    class Replicas:
        async def List(self, request, context):
            return replicas_pb2.ListReplicasResponse()

    return {"sightline.v1.Replicas": Replicas()}


async def test_a_connection_that_is_kept_serves_many_requests():
    async with listening(bare_application()) as (url, server), Client(url) as client:
        for _ in range(5):
            assert (await client("GET", "/healthz"))[0] == 200
        assert len(server._open) == 1


async def test_requests_sent_ahead_wait_as_bytes(monkeypatch):
    """Each is answered, in order; one is in hand, and those behind it cost what a read does."""
    monkeypatch.setattr("cluster.gateway.http.server.AHEAD_S", 0.001)
    async with listening(bare_application()) as (url, server), connected(url) as (reader, writer):
        paths = ["/healthz", "/nowhere", "/readyz"] * 20
        writer.write(b"".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths))
        statuses = []
        for _ in paths:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]))
            statuses.append(int(head.split()[1]))
            assert len(server.state.tasks) <= 1
        assert statuses == [200, 404, 503] * 20


async def test_a_reply_does_not_wait_for_its_head_to_arrive():
    """Head and body are written one after the other: Nagle would hold the body for 40 ms."""
    async with listening(bare_application()) as (url, server), connected(url) as (reader, writer):
        assert await asks(reader, writer, "/healthz") == 200
        (connection,) = server._open
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("rest", [b"zz\r\nx", b"2\r\n{}\r\n0\r\n\r\nno request\r\n\r\n"])
async def test_what_breaks_off_is_no_mistake_of_ours(rest, caplog):
    """A chunk that is none, and what follows a last request, with the request that they belong to: by the fuzzer."""
    head = b"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(bare_application()) as (url, _):
        for pieces in ([head + rest], [head, rest]):
            async with connected(url) as (reader, writer):
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.05)
                assert b" 4" in await reader.readline()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_heads_that_are_no_heads():
    wrong = [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    ]
    wrong.append(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n")
    async with listening(bare_application()) as (url, _):
        for head in wrong:
            async with connected(url) as (reader, writer):
                writer.write(head)
                with contextlib.suppress(ConnectionError):
                    assert b" 400 Bad Request" in await reader.readline()
        async with Client(url) as client:
            assert (await client("GET", "/healthz"))[0] == 200


async def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(bare_application())
        with pytest.raises(SightlineError, match=rf"cannot serve HTTP on 127\.0\.0\.1:{port}: .* gateway\.http_port"):
            await server.start("127.0.0.1", port)
        await server.stop()


async def test_ipv6():
    server = HttpServer(bare_application())
    try:
        port = int((await server.start("::1", 0)).rpartition(":")[2])
        async with Client(f"http://[::1]:{port}") as client:
            assert (await client("GET", "/healthz"))[0] == 200
    finally:
        await server.stop()


async def test_a_server_that_accepts_nobody_any_more_says_so(monkeypatch):
    """Its process is then restarted."""

    def fail(_):
        raise MemoryError

    server = HttpServer(bare_application())
    try:
        address = await server.start("127.0.0.1", 0)
        monkeypatch.setattr("cluster.gateway.http.server.Connection", fail)
        async with connected(f"http://{address}"):
            with pytest.raises(MemoryError):
                await asyncio.wait_for(server.run(), 10)
    finally:
        await server.stop()


async def test_a_stopped_server_frees_its_port():
    server = HttpServer(bare_application())
    port = int((await server.start("127.0.0.1", 0)).rpartition(":")[2])
    await server.stop()
    socket.create_server(("127.0.0.1", port)).close()


async def test_a_slow_scrape_holds_up_nobody():
    class Slow(Collector):
        def __init__(self):
            self.began, self.go = threading.Event(), threading.Event()

        def describe(self):
            return []

        def collect(self):
            self.began.set()
            self.go.wait(30)
            return []

    slow, registry = Slow(), CollectorRegistry()
    registry.register(slow)
    application = make_application({}, Live(None, AnswerHub(), InProcessCalls({})), registry)
    async with listening(application) as (url, _), Client(url) as client:
        scrape = asyncio.create_task(client("GET", "/healthz"))
        slow_one = asyncio.create_task(status(client, "/metrics"))
        await asyncio.to_thread(slow.began.wait, 10)
        assert (await scrape)[0] == 200
        assert (await client("GET", "/healthz"))[0] == 200
        assert not slow_one.done()
        slow.go.set()
        assert await slow_one == 200


async def status(client, path):
    async with client.open("GET", path) as reply:
        return reply.status


async def test_what_is_our_own_mistake_names_the_request_in_the_log(caplog):
    class Broken:
        async def List(self, request, context):
            raise RuntimeError("the wires are crossed")

    async with listening(bare_application({"sightline.v1.Replicas": Broken()})) as (url, _), Client(url) as client:
        found, body = await client("GET", "/v1/replicas", headers={"X-Request-Id": "r-7"})
        assert found == 500
        assert body["error"] == "the wires are crossed; see request r-7 in the gateway's log"
    (told,) = [each for each in caplog.records if "request r-7 GET /v1/replicas failed" in each.getMessage()]
    assert "RuntimeError: the wires are crossed" in logging.Formatter().format(told)
    assert [each for each in caplog.records if each.exc_info] == [told]


async def test_a_value_that_we_cannot_use_is_our_own_mistake_too(caplog, monkeypatch):
    """Unlike one that a service refuses as the client's."""

    class Service:
        async def List(self, request, context):
            if not broken:
                raise ValueError("the client's")
            return replicas_pb2.ListReplicasResponse(replicas=[replicas_pb2.ReplicaStatus()])

    def unread(kind, message):
        raise ValueError("ours")

    monkeypatch.setattr(fleet, "from_message", unread)
    async with listening(bare_application({"sightline.v1.Replicas": Service()})) as (url, _), Client(url) as client:
        for broken in (False, True):
            found, _ = await client("GET", "/v1/replicas", headers={"X-Request-Id": f"r-{int(broken)}"})
            assert found == 400
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert errors == ["request r-1 GET /v1/replicas failed"]


async def test_a_client_that_does_not_shake_hands_loses_its_connection(tmp_path):
    certificate, key = Authority().issue(tmp_path, "gateway")
    before = dropped("evicted")
    server = HttpServer(bare_application(), stall_s=0.2, max_anonymous=1, tls=TlsFiles(certificate, key))
    try:
        address = await server.start("127.0.0.1", 0)
        async with connected(f"http://{address}") as (first, _), connected(f"http://{address}") as (second, _):
            assert await first.read() == b""
            assert dropped("evicted") - before == 1, "those that shake hands count"
            assert await second.read() == b"", "and late is late without anybody behind it"
        assert dropped("evicted") - before == 1
    finally:
        await server.stop()


async def test_a_handshake_that_fails_leaves_nothing(tmp_path):
    """asyncio gives each 256 KiB, which would stay until Python looks for cycles."""
    certificate, key = Authority().issue(tmp_path, "gateway")
    before = dropped("evicted")
    server = HttpServer(bare_application(), max_anonymous=2, tls=TlsFiles(certificate, key))
    gc.collect()
    gc.disable()
    try:
        address = await server.start("127.0.0.1", 0)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(connected(f"http://{address}"))
            await until_async(lambda: dropped("evicted") - before >= 6)
            await asyncio.sleep(0.05)
            assert sum(type(each) is SSLProtocol for each in gc.get_objects()) == 2
    finally:
        gc.enable()
        await server.stop()
