"""What strangers can hold of a gRPC server: calls that nobody finishes, watches, connections, messages of any size."""

import asyncio
import contextlib
import gzip
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2_attacks import PREFACE, SETTINGS, Http2, Target, frame, message, name_request
from sightline.v1 import results_pb2, results_pb2_grpc
from waiting import until_async

from cluster.errors import UnauthenticatedError
from cluster.gateway.guard import Guard
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.channel import open_blocking_channel, open_channel
from cluster.wire.server import MOST_READING, MOST_WATCHING, RpcServer, host_of
from cluster.wire.status import ErrorInterceptor, to_error

Status = health_pb2.HealthCheckResponse
CHECK, WATCH, RESULTS = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/sightline.v1.Results/Watch"


def nobody(secret):
    raise UnauthenticatedError("this token is not known here; ask for a new one")


@contextlib.asynccontextmanager
async def serving(max_connections=100):
    """A server that strangers reach, and nobody is known to."""
    server = RpcServer(guard=Guard(nobody), max_message_bytes=2**20, max_connections=max_connections)
    server.add(ResultsServicer(AnswerHub()))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield server, Target(port, 0), health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(0.0)


async def test_a_call_without_a_token_is_refused_before_its_message_is_there():
    async with serving() as (_, target, _):
        connection = await Http2.open(target)
        stream = connection.begin(RESULTS)
        await connection.send(stream, message(2**20, b"x"))
        await until_async(lambda: target.seen["status 16"])
        assert stream not in connection._windows, "the stream is over"


async def test_a_known_caller_has_a_deadline_for_the_rest_of_its_message():
    server = grpc.aio.server(interceptors=[ErrorInterceptor(read_s=0.2)])
    results_pb2_grpc.add_ResultsServicer_to_server(ResultsServicer(AnswerHub()), server)
    target = Target(server.add_insecure_port("127.0.0.1:0"), 0)
    await server.start()
    connection = await Http2.open(target)
    await connection.send(connection.begin(RESULTS), message(2**20, b"x"))
    await until_async(lambda: target.seen["status 4"])
    await server.stop(0.0)


async def test_probes_are_answered_however_many_never_finish_theirs():
    async with serving() as (_, target, health):
        connections = [await Http2.open(target) for _ in range(20)]
        for connection in connections:
            for _ in range(5):
                await connection.send(connection.begin(CHECK), message(2**19, b"x"))
        for _ in range(20):
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status == Status.SERVING
        # The newest are held; each connection tells the first of its refusals in full.
        await until_async(lambda: target.seen["status 8"] >= 20 - MOST_READING)


async def test_an_unknown_name_is_not_kept():
    async with serving() as (server, target, health):
        watch = health.Watch(health_pb2.HealthCheckRequest(service="sightline.v1.Nothing"), timeout=30)
        assert [reply.status async for reply in watch] == [Status.SERVICE_UNKNOWN]
        assert await watch.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await health.Check(health_pb2.HealthCheckRequest(service="x" * 10_000), timeout=30)
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        assert "xxx" not in failure.value.details()
        connection = await Http2.open(target)
        await connection.send(connection.begin(CHECK), message(2**21, name_request(2**21 - 5)))
        await until_async(lambda: target.seen["status 8"])
        assert len(server._health._watching._held) == 0


async def test_the_newest_watches_are_kept():
    async with serving() as (server, _, health):
        watches = []
        for _ in range(MOST_WATCHING + 3):
            watches.append(health.Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == Status.SERVING
        await until_async(lambda: sum(watch.done() for watch in watches) == 3)
        assert len(server._health._watching._held) == MOST_WATCHING
        assert {await watch.code() for watch in watches if watch.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for watch in watches:
            watch.cancel()
        await until_async(lambda: not len(server._health._watching._held))


async def test_what_is_packed_is_not_unpacked():
    """Nor is anything that is no message of it taken for one."""
    async with serving() as (_, target, _):
        bomb = gzip.compress(bytes(2**24))
        connection = await Http2.open(target)
        sent = message(len(bomb), bomb, compressed=True)
        await connection.send(connection.begin(CHECK, grpc_encoding="gzip"), sent)
        await until_async(lambda: target.seen["status 3"])


async def test_connections_that_come_when_as_many_as_may_be_are_there():
    """They are closed at once; the others go on."""
    async with serving(max_connections=3) as (_, target, health):
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status == Status.SERVING
        async with contextlib.AsyncExitStack() as stack:
            ends = []
            for _ in range(10):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.rpc)
                stack.callback(writer.close)
                ends.append(asyncio.create_task(reader.read()))
            await until_async(lambda: sum(end.done() for end in ends) >= 8)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status == Status.SERVING
            assert sum(end.done() for end in ends) == 8
            for end in ends:
                end.cancel()


async def test_calls_that_a_server_has_no_time_to_look_at_are_refused_with_a_sentence():
    def flood(address):
        with contextlib.ExitStack() as stack:
            channels = [stack.enter_context(open_blocking_channel(address)) for _ in range(4)]
            stubs = [results_pb2_grpc.ResultsStub(channel) for channel in channels]
            calls = [stubs[number % 4].Watch(results_pb2.WatchRequest(), timeout=30) for number in range(800)]
            return {str(to_error(call.exception())) for call in calls}

    async with serving() as (_, target, _):
        flooding = asyncio.create_task(asyncio.to_thread(flood, f"127.0.0.1:{target.rpc}"))
        await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251
        assert await flooding == {
            "this gateway requires a token; set SIGHTLINE_TOKEN or send a bearer token",
            "the server has too many pending calls; try again in a moment",
        }


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0", PREFACE])
async def test_a_connection_that_does_not_get_on_with_it_is_closed(said, monkeypatch):
    """With and without HTTP/2's first words; what has settings is idle, and has longer."""
    monkeypatch.setattr("cluster.wire.server.HANDSHAKE_MS", 300)
    async with serving() as (_, target, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.rpc)
        writer.write(said)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        assert time.monotonic() - began < 20
        writer.close()
        idle, writer = await asyncio.open_connection("127.0.0.1", target.rpc)
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        reading = asyncio.create_task(idle.read())
        await asyncio.wait([reading], timeout=0.6)
        assert not reading.done()
        reading.cancel()
        writer.close()


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.0.0.7:4711", "ipv4:10.0.0.7"), ("ipv6:%5B::1%5D:4711", "ipv6:%5B::1%5D"), ("", "")]
)
def test_host_of(peer, host):
    assert host_of(peer) == host
