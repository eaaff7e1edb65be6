"""Gateway side of gRPC ``Memory``: forwards each call to the replica that currently owns the camera, deletions to all
replicas (``MemoryProxy``)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from sightline.v1 import memory_pb2 as pb
from sightline.v1 import memory_pb2_grpc, pictures_pb2

from cluster.errors import UnavailableError
from cluster.gateway.ask_all import AskAll, ListCameras, ListIncidents
from cluster.gateway.forwarding import Forwarding, relay
from cluster.types import CameraStatus
from cluster.wire.channel import ChannelPool
from cluster.wire.memory_wire import check_camera
from cluster.wire.status import upstream_error

Context: TypeAlias = grpc.aio.ServicerContext

Route = Callable[[str], Awaitable[str]]
"""Camera -> ``host:port`` of its replica; raises ``UnavailableError`` while there is none."""


async def _no_cameras() -> list[CameraStatus]:
    return []


ListReplicas = Callable[[], Awaitable[Collection[str]]]
"""``host:port`` of every replica."""
ForgetKept = Callable[[str, float], Awaitable[pictures_pb2.ForgetFootageReply]]


class MemoryProxy(memory_pb2_grpc.MemoryServicer):
    """See protos/sightline/v1/memory.proto. Stateless; conversations live and end with the replica.

    Args:
        route: see :data:`Route`.
        channels: channels to replicas.
        max_calls: concurrent calls; more are refused with ``CapacityError``.
        replicas: lists all replicas; None: only the camera's is asked to delete.
        on_forget: deletes a camera's footage and incident records older than some seconds (0: all), after its memory;
            raises ``SightlineError`` if something may remain.
        cameras, incidents: see :class:`~cluster.gateway.ask_all.AskAll`.
        ask_s, call_s: timeouts of answers and of other calls, in seconds, whatever the client allows.
    """

    def __init__(
        self,
        route: Route,
        channels: ChannelPool,
        *,
        max_calls: int = 256,
        on_forget: ForgetKept | None = None,
        replicas: ListReplicas | None = None,
        cameras: ListCameras = _no_cameras,
        incidents: ListIncidents | None = None,
        ask_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        self._route = route
        self._replicas = Forwarding(channels, "calls about memories", max_calls=max_calls)
        self._ask_s, self._call_s = ask_s, call_s
        self._on_forget, self._list_replicas = on_forget, replicas
        self._all = AskAll(self._ask_one, cameras, incidents)

    async def Ask(self, request: pb.AskRequest, context: Context) -> None:
        async with self._forwarding(request.camera, context, self._ask_s) as (replica, limit_s):
            await relay(replica.Ask(request, timeout=limit_s), context)

    async def Replay(self, request: pb.ReplayRequest, context: Context) -> None:
        async with self._forwarding(request.camera, context, self._ask_s) as (replica, limit_s):
            await relay(replica.Replay(request, timeout=limit_s), context)

    async def AskAll(self, request: pb.AskAllRequest, context: Context) -> None:
        async with aclosing(self._all.answers(request, context.time_remaining())) as events:
            async for event in events:
                await context.write(event)

    async def _ask_one(self, request: pb.AskRequest, limit_s: float) -> pb.AskResult:
        async with self._replicas.channels.lease(await self._find(request.camera)) as channel:
            call = memory_pb2_grpc.MemoryStub(channel).Ask(request, timeout=limit_s)
            try:
                async for event in call:
                    if event.WhichOneof("event") == "result":
                        return event.result
            finally:
                call.cancel()
        raise UnavailableError("the answer ended without a result")

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        async with self._forwarding(request.camera, context, self._call_s) as (replica, limit_s):
            request.only_here = False
            async with asyncio.timeout(limit_s):
                elsewhere = await self._forget_elsewhere(request)
                try:
                    forgotten: pb.ForgetResponse = await replica.Forget(request, timeout=limit_s)
                except grpc.aio.AioRpcError as error:
                    # The camera has no memory, but may have footage and incidents.
                    if self._on_forget is None or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                        raise
                    forgotten = pb.ForgetResponse()
            forgotten.frames += sum(each.frames for each in elsewhere)
            forgotten.bytes += sum(each.bytes for each in elsewhere)
            if self._on_forget is not None:
                kept = await self._on_forget(request.camera, request.before_s)
                forgotten.files, forgotten.file_bytes = kept.files, kept.bytes
                forgotten.incidents, forgotten.alerts = kept.incidents, kept.alerts
            return forgotten

    async def _forget_elsewhere(self, request: pb.ForgetRequest) -> Sequence[pb.ForgetResponse]:
        """Delete at the other replicas first, which may still serve the camera or be writing its memory."""
        if self._list_replicas is None:
            return ()
        only_here = pb.ForgetRequest(camera=request.camera, before_s=request.before_s, only_here=True)
        others = {*await self._list_replicas()} - {await self._find(request.camera)}
        return await asyncio.gather(*(self._forget_at(each, only_here) for each in others))

    async def _forget_at(self, address: str, request: pb.ForgetRequest) -> pb.ForgetResponse:
        async with self._replicas.channels.lease(address) as channel:
            try:
                # Half the timeout: the camera's own replica is asked afterwards.
                return await memory_pb2_grpc.MemoryStub(channel).Forget(request, timeout=self._call_s / 2)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return pb.ForgetResponse()
                raise upstream_error(error, f"a replica that may hold data of camera {request.camera!r}") from None

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.MemoryStatus:
        async with self._forwarding(request.camera, context, self._call_s) as (replica, limit_s):
            return await replica.Describe(request, timeout=limit_s)

    @asynccontextmanager
    async def _forwarding(
        self, camera: str, context: Context, limit_s: float
    ) -> AsyncIterator[tuple[memory_pb2_grpc.MemoryStub, float]]:
        """Stub of the camera's replica, and the call's timeout in seconds."""
        limit_s = min(limit_s, context.time_remaining() or limit_s)
        who = f"the replica of camera {camera!r}"
        unserved = f"{who} answers no questions about the past"
        route = partial(self._find, camera)
        async with self._replicas.to(who, route, limit_s, unserved=unserved) as channel:
            yield memory_pb2_grpc.MemoryStub(channel), limit_s

    async def _find(self, camera: str) -> str:
        return await self._route(check_camera(camera))
