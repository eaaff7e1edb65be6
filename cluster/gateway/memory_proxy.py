"""``Memory``, the gateway's side: every call goes to the replica that owns the camera, whoever that is now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
import grpc.aio
from sightline.v1 import memory_pb2, memory_pb2_grpc, pictures_pb2

from cluster.errors import CapacityError, UnavailableError
from cluster.wire.channel import ChannelPool
from cluster.wire.memory_wire import check_camera
from cluster.wire.status import RefusedError, abort, is_ours

Context: TypeAlias = grpc.aio.ServicerContext

Route = Callable[[str], Awaitable[str]]
"""Camera -> ``host:port`` of its replica; raises ``UnavailableError`` while there is none."""
ForgetKept = Callable[[str, float], Awaitable[pictures_pb2.ForgetFootageReply]]


class MemoryProxy(memory_pb2_grpc.MemoryServicer):
    """Hands messages on as they come; holds none. Conversations are the replica's: they end with it.

    Args:
        route: where a camera's replica is.
        channels: to replicas.
        max_calls: calls at once; one more is refused with ``CapacityError``.
        on_forget: forgets the rest that is kept of a camera (all of it, or with seconds what was kept before), once its
            memory is forgotten; raises ``SightlineError`` where something may still be there.
        ask_s, call_s: longest that an answer, and any other call, may take, whatever the client allows.
    """

    def __init__(
        self,
        route: Route,
        channels: ChannelPool,
        *,
        max_calls: int = 256,
        on_forget: ForgetKept | None = None,
        ask_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        self._route = route
        self._channels = channels
        self._max_calls, self._calls = max_calls, 0
        self._ask_s, self._call_s = ask_s, call_s
        self._on_forget = on_forget

    async def Ask(self, request: memory_pb2.AskRequest, context: Context) -> None:  # noqa: N802
        """See protos/sightline/v1/memory.proto."""
        async with self._forwarding(request.camera, context, self._ask_s) as (replica, limit_s):
            call = replica.Ask(request, timeout=limit_s)
            try:
                async for event in call:
                    await context.write(event)
            finally:
                call.cancel()

    async def Forget(  # noqa: N802
        self, request: memory_pb2.ForgetRequest, context: Context
    ) -> memory_pb2.ForgetResponse:
        """See protos/sightline/v1/memory.proto."""
        async with self._forwarding(request.camera, context, self._call_s) as (replica, limit_s):
            try:
                forgotten: memory_pb2.ForgetResponse = await replica.Forget(request, timeout=limit_s)
            except grpc.aio.AioRpcError as error:
                # Without a memory there is still what was kept of incidents.
                if self._on_forget is None or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                forgotten = memory_pb2.ForgetResponse()
            if self._on_forget is not None:
                kept = await self._on_forget(request.camera, request.before_s)
                forgotten.files, forgotten.file_bytes = kept.files, kept.bytes
                forgotten.incidents, forgotten.alerts = kept.incidents, kept.alerts
            return forgotten

    async def Describe(  # noqa: N802
        self, request: memory_pb2.DescribeRequest, context: Context
    ) -> memory_pb2.MemoryStatus:
        """See protos/sightline/v1/memory.proto."""
        async with self._forwarding(request.camera, context, self._call_s) as (replica, limit_s):
            status: memory_pb2.MemoryStatus = await replica.Describe(request, timeout=limit_s)
            return status

    @asynccontextmanager
    async def _forwarding(
        self, camera: str, context: Context, limit_s: float
    ) -> AsyncIterator[tuple[memory_pb2_grpc.MemoryStub, float]]:
        """A stub of the camera's replica and the seconds it has; ends the call with a status when that fails."""
        limit_s = min(limit_s, context.time_remaining() or limit_s)
        try:
            if self._calls >= self._max_calls:
                raise CapacityError(f"{self._max_calls} calls about memories are under way already; try again later")
            self._calls += 1
            try:
                async with asyncio.timeout(limit_s):
                    address = await self._route(check_camera(camera))
                    async with self._channels.lease(address) as channel:
                        yield memory_pb2_grpc.MemoryStub(channel), limit_s
            finally:
                self._calls -= 1
        except grpc.aio.AioRpcError as error:
            await abort(context, _as_told(error, camera, limit_s))
        except TimeoutError:
            await abort(context, _late(camera, limit_s))
        except Exception as error:
            await abort(context, error)


def _as_told(error: grpc.aio.AioRpcError, camera: str, limit_s: float) -> Exception:
    """The replica's own sentence as it is; what gRPC says of a replica in a sentence of ours."""
    if is_ours(error):
        return RefusedError(error.code(), error.details() or error.code().name)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _late(camera, limit_s)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UnavailableError(f"the replica of camera {camera!r} answers no questions about the past")
    return UnavailableError(
        f"the replica of camera {camera!r} does not answer; ask again in a moment ({error.details()})"
    )


def _late(camera: str, limit_s: float) -> TimeoutError:
    return TimeoutError(f"the replica of camera {camera!r} did not answer within {limit_s:.3g} s")
