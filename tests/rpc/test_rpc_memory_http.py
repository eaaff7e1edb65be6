"""The gateway's HTTP as a client sees it: answers line by line, every status, and /metrics beside it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from memory_parts import MOMENTS, STATUS, Replica, result
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app
from sightline.v1 import memory_pb2_grpc

from cluster.errors import CapacityError, ConfigError, NotReadyError, SightlineError
from cluster.rpc.http_server import HttpServer
from cluster.rpc.loop import EventLoopThread
from cluster.rpc.memory import SERVICE, MemoryServicer
from cluster.rpc.memory_client import MemoryClient
from cluster.rpc.memory_http import MAX_BODY_BYTES, MemoryApi
from cluster.rpc.server import RpcServer

JSON = {"Content-Type": "application/json"}


class Http:
    """One request per connection, as HTTP/1.0 has it."""

    def __init__(self, address):
        self.host, port = address.rsplit(":", 1)
        self.port = int(port)

    @contextlib.contextmanager
    def open(self, method, path, body=None, headers=JSON):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, data, headers)
        with contextlib.closing(connection):
            yield connection.getresponse()

    def __call__(self, *arguments, **more):
        """``(status, body)``."""
        with self.open(*arguments, **more) as reply:
            data = reply.read()
        return reply.status, json.loads(data)

    def ask(self, text="Who?", camera="gate", **more):
        with self.open("POST", "/v1/ask", {"camera": camera, "text": text, **more}) as reply:
            return reply.status, [json.loads(line) for line in reply.read().splitlines()]


@pytest.fixture
def replica():
    """The scripted replica; ``replica.address`` of its server and ``replica.run`` to touch its events."""

    async def start():
        handler, server = Replica(), RpcServer()
        server.add(SERVICE, memory_pb2_grpc.add_MemoryServicer_to_server, MemoryServicer(handler))
        handler.address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        return server, handler

    with EventLoopThread() as thread:
        server, handler = thread.run(start(), 10.0)
        handler.release = lambda: thread.loop.call_soon_threadsafe(handler.go.set)
        yield handler
        thread.run(server.stop(0.0), 10.0)


@contextlib.contextmanager
def served(replica, *, max_asks=32, **options):
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    with MemoryClient(replica.address, internal=True) as client:
        api = MemoryApi(client, make_wsgi_app(registry), max_asks=max_asks)
        server = HttpServer("127.0.0.1", 0, api, **options)
        try:
            yield Http(server.address), server
        finally:
            server.close()


@pytest.fixture
def http_client(replica):
    with served(replica) as (client, _):
        yield client


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_answer_line_by_line(replica, http_client):
    replica.words = ["çé ", "words"]
    status, lines = http_client.ask(since_s=90, max_new_tokens=5, with_pictures=True)
    assert status == 200
    assert lines[:-1] == [{"text": "çé "}, {"text": "words"}]
    told = lines[-1]["result"]
    assert told["text"] == "çé words"
    assert told["camera"] == "gate"
    assert told["tokens_read"] == result("").tokens_read
    first, second = told["moments"]
    assert first == {
        "start": MOMENTS[0].start,
        "end": MOMENTS[0].end,
        "weight": 0.5,
        "ago_s": 723.0,
        "picture": base64.b64encode(b"\xff\xd8one").decode(),
    }
    assert "picture" not in second
    http_client.ask("Sure?", conversation=told["conversation"])
    assert [(spec.since_s, spec.max_new_tokens, spec.turns) for spec in replica.asked] == [
        (90.0, 5, ()),
        (None, 48, (("Who?", "çé words"),)),
    ]


def test_a_piece_is_there_before_the_next_one(replica, http_client):
    replica.stuck_at = 1
    with http_client.open("POST", "/v1/ask", {"camera": "gate", "text": "Who?"}) as reply:
        assert reply.getheader("Content-Type") == "application/x-ndjson"
        assert json.loads(reply.readline()) == {"text": "two "}
        assert replica.under_way == 1
        replica.release()
        assert json.loads(reply.readline()) == {"text": "words"}


def test_a_client_that_leaves_ends_the_answer(replica, http_client):
    replica.words, replica.stuck_at = ["x"] * 100_000, 1
    with http_client.open("POST", "/v1/ask", {"camera": "gate", "text": "Who?"}) as reply:
        reply.readline()
        reply.close()
    replica.release()
    eventually(lambda: replica.ended == 1)
    assert replica.under_way == 0


def test_forget_and_memory(replica, http_client):
    assert http_client("POST", "/v1/forget", {"camera": "gate", "before_s": 7200}) == (
        200,
        {"frames": 7, "bytes": 2**40},
    )
    assert http_client("POST", "/v1/forget", {"camera": "gate", "before_s": 0})[0] == 200
    assert replica.forgotten == [("gate", 7200.0), ("gate", None)]
    status, body = http_client("GET", "/v1/memory/gate")
    assert status == 200
    assert body["tier_bytes"] == STATUS.tier_bytes
    assert body["tier_states"] == STATUS.tier_states


ASK = {"camera": "gate", "text": "Who?"}
WRONG = {
    "no such path": ("GET", "/v1/asc", None, JSON, 404, "there is no /v1/asc; there are: POST /v1/ask"),
    "no camera": ("GET", "/v1/memory/", None, JSON, 404, "GET /v1/memory/CAMERA"),
    "a get": ("GET", "/v1/ask", None, JSON, 405, "GET is not for this path; use POST"),
    "a put": ("PUT", "/v1/memory/gate", "", JSON, 405, "use GET"),
    "not json": ("POST", "/v1/ask", "{", JSON, 400, "the request is not JSON"),
    "deep json": ("POST", "/v1/ask", "[" * 60_000, JSON, 400, "the request is not JSON"),
    "a list": ("POST", "/v1/ask", "[]", JSON, 400, "must be a JSON object, not list"),
    "a form": ("POST", "/v1/ask", ASK, {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
    "a page": ("POST", "/v1/ask", ASK, {**JSON, "Origin": "http://evil"}, 403, "from web pages are not answered"),
    "too large": ("POST", "/v1/ask", "x" * (MAX_BODY_BYTES + 1), JSON, 413, "larger than 65536 bytes"),
    "no length": ("POST", "/v1/ask", iter([]), JSON, 411, "must have a Content-Length"),
    "no text": ("POST", "/v1/ask", {"camera": "gate"}, JSON, 400, "text is missing"),
    "unknown key": ("POST", "/v1/ask", {**ASK, "txt": ""}, JSON, 400, "unknown key 'txt'; there are: camera, text"),
    "wrong type": ("POST", "/v1/ask", {**ASK, "since_s": "1h"}, JSON, 400, 'since_s is "1h", which is not a number'),
    "no whole number": ("POST", "/v1/ask", {**ASK, "max_new_tokens": 1.5}, JSON, 400, "which is not a whole number"),
    "a truth": ("POST", "/v1/ask", {**ASK, "since_s": True}, JSON, 400, "since_s is true, which is not a number"),
    "negative": ("POST", "/v1/ask", {**ASK, "since_s": -1}, JSON, 400, "since_s is out of range"),
    "huge": ("POST", "/v1/ask", {**ASK, "max_new_tokens": 10**400}, JSON, 400, "max_new_tokens is out of range"),
    "not a number": ("POST", "/v1/ask", {**ASK, "since_s": float("nan")}, JSON, 400, "since_s is out of range"),
    "half a character": ("POST", "/v1/ask", {**ASK, "text": "\ud800"}, JSON, 400, "character 1 is U+D800"),
    "half a name": ("POST", "/v1/ask", {**ASK, "camera": "\ud800"}, JSON, 400, "the camera's name"),
    "empty": ("POST", "/v1/ask", {**ASK, "text": " "}, JSON, 400, "the question is empty"),
    "unknown": ("POST", "/v1/ask", {**ASK, "camera": "no"}, JSON, 404, "there is no camera 'no'"),
    "unknown too": ("GET", "/v1/memory/%C3%A9", None, JSON, 404, "there is no camera 'é'"),
    "nothing yet": ("POST", "/v1/ask", {**ASK, "camera": "dark"}, JSON, 409, "has seen nothing yet"),
    "everything by chance": ("POST", "/v1/forget", {"camera": "gate"}, JSON, 400, "missing; 0 forgets everything"),
}


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_has_a_status_and_a_sentence(replica, http_client, method, path, body, headers, status, sentence):
    found, reply = http_client(method, path, body=body, headers=headers)
    assert found == status, reply
    assert sentence in reply["error"]
    assert replica.forgotten == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("full"), 429), (ConfigError("too long"), 400), (NotReadyError("away"), 409), (KeyError("x"), 500)],
)
def test_an_error_before_the_first_piece_has_a_status_and_one_after_it_a_line(replica, http_client, error, status):
    replica.error = error
    found, lines = http_client.ask()
    assert found == status
    assert str(error) in lines[0]["error"]
    replica.error_at = 2
    found, lines = http_client.ask()
    assert found == 200
    assert lines[0] == {"text": "two "}
    assert str(error) in lines[1]["error"]
    assert len(lines) == 2


def test_metrics_are_still_there(http_client):
    with http_client.open("GET", "/metrics") as reply:
        assert reply.status == 200
        assert b"things_total 3.0" in reply.read()


def test_questions_leave_room_for_metrics(replica):
    replica.stuck_at = 0
    with served(replica, max_asks=1) as (client, _):
        waiting = threading.Thread(target=client.ask)
        waiting.start()
        eventually(lambda: replica.under_way == 1)
        status, (body,) = client.ask()
        assert (status, "1 questions are being answered" in body["error"]) == (429, True)
        with client.open("GET", "/metrics") as reply:
            assert reply.status == 200
        replica.release()
        waiting.join(10)
        replica.stuck_at = None
        assert client.ask()[0] == 200, "an answered question makes room"
        assert client.ask("")[0] == 400
        assert client.ask()[0] == 200, "a refused one too"


def test_more_requests_than_threads(replica):
    with served(replica, max_requests=1) as (client, server), socket.create_connection((client.host, client.port)):
        eventually(lambda: refused(client))
        assert server.refused >= 1
    with served(replica, max_requests=1) as (client, server):
        for _ in range(3):
            eventually(lambda: not refused(client))


def refused(client):
    try:
        with client.open("GET", "/metrics") as reply:
            return reply.status == 503
    except ConnectionError:
        # What was sent to a socket that is closed unread may come back before the reply is read.
        return True


def test_a_client_that_sends_nothing_loses_its_connection(replica):
    with (
        served(replica, stall_s=0.1) as (client, _),
        socket.create_connection((client.host, client.port), timeout=10) as silent,
    ):
        assert silent.recv(1) == b""


def test_a_client_that_stops_in_mid_request(replica):
    head = b"POST /v1/ask HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with (
        served(replica, stall_s=0.1) as (client, _),
        socket.create_connection((client.host, client.port), timeout=10) as slow,
    ):
        slow.sendall(head)
        reply = b"".join(iter(lambda: slow.recv(4096), b""))
        assert b" 408 Request Timeout" in reply
        assert b"ended before its Content-Length" in reply


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SightlineError, match=rf"cannot serve HTTP on 127\.0\.0\.1:{port}: .* gateway\.metrics_port"
        ):
            HttpServer("127.0.0.1", port, lambda environ, start_response: [])


def test_ipv6():
    def application(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"here"]

    server = HttpServer("::1", 0, application)
    try:
        port = int(server.address.rpartition(":")[2])
        connection = http.client.HTTPConnection("::1", port, timeout=10)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"here"
        connection.close()
    finally:
        server.close()
