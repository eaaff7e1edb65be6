"""Questions through a gateway to the replica that owns the camera: passed on whole, refusals with their words."""

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from memory_parts import STATUS, replica, result
from rpc_serving import serving
from sightline.v1 import memory_pb2, memory_pb2_grpc, pictures_pb2

from cluster.client import GatewayClient
from cluster.errors import (
    CapacityError,
    ConfigError,
    NotReadyError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.wire.channel import ChannelPool, open_channel
from cluster.wire.memory_wire import AskOutcome, ForgottenCamera


class Routes(dict):
    """Camera -> address."""

    async def of(self, camera):
        if camera not in self:
            raise UnknownCameraError(f"there is no camera {camera!r}")
        if self[camera] is None:
            raise UnavailableError(f"no replica is ready for camera {camera!r} yet")
        return self[camera]


async def in_thread(call):
    """A blocking client's call, or the error it raised."""
    try:
        return await asyncio.to_thread(call)
    except Exception as error:
        return error


async def test_everything_through_the_gateway():
    async with replica() as (handler, address):
        pool = ChannelPool()
        routes = Routes(gate=address)
        async with serving(MemoryProxy(routes.of, pool)) as gateway:
            with GatewayClient(gateway) as client:
                *pieces, told = await in_thread(
                    lambda: list(client.ask("gate", "Who?", since_s=60, max_new_tokens=9, with_pictures=True))
                )
                assert pieces == ["two ", "words"]
                assert told == AskOutcome(result("two words"), told.conversation, (b"\xff\xd8one", b""))
                await in_thread(lambda: list(client.ask("gate", "Sure?", conversation=told.conversation)))
                assert (handler.asked[0].since_s, handler.asked[0].max_new_tokens) == (60.0, 9)
                assert handler.asked[1].turns == (("Who?", "two words"),)
                assert await in_thread(lambda: client.memory("gate")) == STATUS
                assert await in_thread(lambda: client.forget("gate", 5.0)) == ForgottenCamera(7, 2**40)
                assert handler.forgotten == [("gate", 5.0)]
        assert len(pool._channels) == 0, "channels are given back"


async def test_errors_keep_their_kind_and_sentence():
    async with replica() as (handler, address):
        routes = Routes(gate=address, dark=address, lost=None, gone="127.0.0.1:1")
        async with serving(MemoryProxy(routes.of, ChannelPool())) as gateway:
            with GatewayClient(gateway) as client:

                async def refused(camera, text="Who?", **more):
                    return await in_thread(lambda: list(client.ask(camera, text, **more)))

                cases = {
                    UnknownCameraError("there is no camera 'nobody'"): refused("nobody"),
                    NotReadyError("camera 'dark' has seen nothing yet"): refused("dark"),
                    UnavailableError("no replica is ready for camera 'lost' yet"): refused("lost"),
                    UnavailableError("the replica of camera 'gone' does not answer; try again"): refused("gone"),
                    ConfigError("since_s is -1"): refused("gate", since_s=-1),
                    ConfigError("the question is empty"): refused("gate", " "),
                    ConfigError("character 1 is U+D800"): refused("gate", "\ud800"),
                    ConfigError("the camera's name"): refused("\ud800"),
                    ConfigError("no camera is named"): in_thread(lambda: client.memory("")),
                    UnknownCameraError("there is no camera 'no'"): in_thread(lambda: client.forget("no")),
                }
                for wanted, call in cases.items():
                    error = await call
                    assert type(error) is type(wanted), error
                    assert str(wanted) in str(error)
                handler.error, handler.error_at = CapacityError("9 questions wait"), 2
                error = await refused("gate")
                assert (type(error), str(error)) == (CapacityError, "9 questions wait")


async def test_a_client_that_leaves_ends_the_answer_at_the_replica(until):
    async with replica() as (handler, address):
        handler.stuck_at = 1
        pool = ChannelPool()
        async with serving(MemoryProxy(Routes(gate=address).of, pool)) as gateway:
            with GatewayClient(gateway) as client:

                def leave():
                    answer = client.ask("gate", "Who?")
                    first = next(answer)
                    answer.close()
                    return first

                assert await in_thread(leave) == "two "
                await until(lambda: handler.ended == 1 and handler.under_way == 0)
                await until(lambda: len(pool._channels) == 0)


async def test_a_client_that_has_no_more_time():
    async with replica() as (handler, address):
        handler.stuck_at = 1
        async with serving(MemoryProxy(Routes(gate=address).of, ChannelPool())) as gateway:
            with GatewayClient(gateway) as client:
                error = await in_thread(lambda: list(client.ask("gate", "Who?", timeout_s=0.2)))
                assert type(error) is UnavailableError
                # Whose clock strikes first is open: the client's, the gateway's or the replica's.
                assert "0.2 s" in str(error) or "did not answer within" in str(error)


async def test_a_replica_that_does_not_answer_in_time():
    async with replica() as (handler, address):
        handler.stuck_at = 0
        async with (
            serving(MemoryProxy(Routes(gate=address).of, ChannelPool(), ask_s=0.2, call_s=0.2)) as gateway,
            open_channel(gateway) as channel,
        ):
            stub = memory_pb2_grpc.MemoryStub(channel)
            for call in (
                stub.Ask(memory_pb2.AskRequest(camera="gate", text="Who?")).read(),
                stub.Describe(memory_pb2.DescribeRequest(camera="gate")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call
                assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "camera 'gate' did not answer within 0.2 s" in failure.value.details()


async def test_another_replica_that_does_not_answer_a_deletion_is_not_taken_for_the_cameras():
    class Hangs(memory_pb2_grpc.MemoryServicer):
        async def Forget(self, request, context):
            await asyncio.Event().wait()

    async with replica() as (handler, address), serving(Hangs()) as other:
        routes = Routes(gate=address)

        async def replicas():
            return [address, other]

        proxy = MemoryProxy(routes.of, ChannelPool(), replicas=replicas, call_s=0.6)
        async with serving(proxy) as gateway:
            with GatewayClient(gateway) as client:
                error = await in_thread(lambda: client.forget("gate"))
        assert type(error) is UnavailableError
        assert "a replica that may hold data of camera 'gate' does not answer" in str(error)
        assert handler.forgotten == []


async def test_a_replica_that_dies_while_it_answers(until):
    routes = Routes()
    async with serving(MemoryProxy(routes.of, ChannelPool())) as gateway:
        with GatewayClient(gateway) as client:
            got = threading.Event()

            def listen():
                for _ in client.ask("gate", "Who?"):
                    got.set()

            async with replica() as (handler, address):
                handler.stuck_at = 1
                routes["gate"] = address
                listening = asyncio.create_task(in_thread(listen))
                await until(got.is_set)
            error = await listening
            assert type(error) is UnavailableError
            assert "the replica of camera 'gate' does not answer; try again in a moment" in str(error)
            async with replica() as (handler, address):
                routes["gate"] = address
                assert len(await in_thread(lambda: list(client.ask("gate", "Who?")))) == 3


async def test_more_calls_than_the_gateway_takes(until):
    async with replica() as (handler, address):
        handler.stuck_at = 0
        async with serving(MemoryProxy(Routes(gate=address).of, ChannelPool(), max_calls=1)) as gateway:
            with GatewayClient(gateway) as client:
                first = asyncio.create_task(in_thread(lambda: list(client.ask("gate", "Who?"))))
                await until(lambda: handler.under_way == 1)
                error = await in_thread(lambda: client.memory("gate"))
                assert type(error) is CapacityError
                assert "1 calls about memories are under way already" in str(error)
                handler.go.set()
                assert len(await first) == 3


async def test_a_replica_without_memory():
    async with serving() as plain, serving(MemoryProxy(Routes(gate=plain).of, ChannelPool())) as gateway:
        with GatewayClient(gateway) as client:
            error = await in_thread(lambda: client.memory("gate"))
            assert type(error) is UnavailableError
            assert str(error) == "the replica of camera 'gate' answers no questions about the past"


async def test_nobody_there():
    with GatewayClient("127.0.0.1:1", deadline_s=0.5) as client:
        error = await in_thread(lambda: list(client.ask("gate", "Who?")))
        assert "no Sightline gateway answers at 127.0.0.1:1" in str(error)


async def test_more_is_forgotten_along_with_a_memory():
    """Its clips, for one; where that fails, the caller must not believe that all is gone."""
    told = []

    async def also(camera, before_s):
        told.append((camera, before_s))
        if len(told) == 2:
            raise UnavailableError("alerting does not answer")
        return pictures_pb2.ForgetFootageReply(files=3, bytes=1000, incidents=2, alerts=5)

    routes = Routes()
    async with replica() as (_, address), serving(MemoryProxy(routes.of, ChannelPool(), on_forget=also)) as gateway:
        routes["gate"] = address
        with GatewayClient(gateway) as client:
            assert await in_thread(lambda: client.forget("gate", 5.0)) == ForgottenCamera(7, 2**40, 3, 1000, 2, 5)
            error = await in_thread(lambda: client.forget("gate"))
    assert told == [("gate", 5.0), ("gate", 0.0)]
    assert isinstance(error, UnavailableError)
    assert str(error) == "alerting does not answer"


async def test_without_a_memory_the_rest_is_forgotten_all_the_same():
    """An engine that remembers nothing still had its incidents and their clips."""

    async def also(camera, before_s):
        return pictures_pb2.ForgetFootageReply(files=2)

    async def nothing(camera, ago_s, **_):
        raise NotReadyError("this engine keeps no memory")

    async with replica() as (handler, address):
        handler.delete_memory = nothing
        async with serving(MemoryProxy(Routes(gate=address).of, ChannelPool(), on_forget=also)) as gateway:
            with GatewayClient(gateway) as client:
                assert await in_thread(lambda: client.forget("gate")) == ForgottenCamera(0, 0, files=2)
