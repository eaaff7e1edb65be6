"""Every server of ours: health, reflection, ports, limits, a stop that keeps its deadline."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lossy_link import LossyLink
from rpc_serving import serving
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.errors import ConfigError
from cluster.wire import channel
from cluster.wire import server as wire_server
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.channel import ChannelPool, open_channel, split_address
from cluster.wire.server import RpcServer


def results_server(hub=None):
    server = RpcServer()
    server.add(ResultsServicer(hub or AnswerHub()))
    return server


async def test_health_and_reflection():
    async with serving(ResultsServicer(AnswerHub())) as address, open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "sightline.v1.Results"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await health.Check(health_pb2.HealthCheckRequest(service="sightline.v1.Nothing"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND

        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=30.0)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed == {"sightline.v1.Results", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="sightline.v1.Results"))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()


async def test_a_stopping_server_says_not_serving():
    server = results_server()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="sightline.v1.Results"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(1.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await stopping


async def test_stop_cancels_what_does_not_end(until):
    hub = AnswerHub()
    server = results_server(hub)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest())
        await call.initial_metadata()
        before = time.monotonic()
        await server.stop(0.1)
        assert time.monotonic() - before < 6.0, "its own deadline"
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await until(lambda: not hub._subscriptions, "the cancelled call ends")


@pytest.mark.parametrize("end", ["client", "server"])
async def test_a_connection_whose_other_end_is_silent_is_ended(monkeypatch, until, end):
    """The link loses everything and closes nothing: 20 s to a ping and 10 s for its reply, here of a twentieth."""
    quick = [(name, value // 20 if name.endswith("_ms") else value) for name, value in channel.KEEPALIVE]
    monkeypatch.setattr(channel if end == "client" else wire_server, "KEEPALIVE", quick)
    hub = AnswerHub()
    async with (
        serving(ResultsServicer(hub)) as address,
        LossyLink(address) as link,
        open_channel(link.address) as to_link,
    ):
        call = results_pb2_grpc.ResultsStub(to_link).Watch(results_pb2.WatchRequest())
        await call.initial_metadata()
        link.cut()
        before = time.monotonic()
        if end == "client":
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await asyncio.wait_for(call.read(), 20.0)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            await until(lambda: not hub._subscriptions, "the call ends", 20.0)
        assert time.monotonic() - before < 20.0, "30 s / 20, and a busy machine"
        call.cancel()


async def test_a_slow_link_is_given_time_to_connect():
    # As three round trips of 0.9 s take, of TCP and TLS; an attempt's pause grows to 2.4 s.
    async with (
        serving(ResultsServicer(AnswerHub())) as address,
        LossyLink(address, delay_s=2.7) as link,
        open_channel(link.address) as to_link,
    ):
        await asyncio.wait_for(to_link.channel_ready(), 20.0)


async def test_port_in_use():
    first = RpcServer()
    port = first.bind("127.0.0.1", 0)
    await first.start()
    with pytest.raises(ConfigError, match=f"port {port} is in use on 127.0.0.1; choose another with --port"):
        RpcServer().bind("127.0.0.1", port, setting="--port")
    await first.stop(0.0)


async def test_an_address_that_is_not_ours():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0 .* choose another .* gateway\.host"):
        RpcServer().bind("203.0.113.1", 0)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:5", ("127.0.0.1", 5)), ("[::1]:50051", ("::1", 50051)), ("gate.local:65535", ("gate.local", 65535))],
)
def test_split_address(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "localhost", ":50051", "host:", "host:http", "host:0", "host:65536"])
def test_not_an_address(address):
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        split_address(address)


async def test_channels_are_shared_and_given_back():
    pool = ChannelPool()
    async with pool.lease("127.0.0.1:1") as one:
        async with pool.lease("127.0.0.1:1") as two, pool.lease("127.0.0.1:2"):
            assert one is two
            assert len(pool._channels) == 2
        assert len(pool._channels) == 1
    assert len(pool._channels) == 0
