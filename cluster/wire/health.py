"""gRPC's health service, which anybody may ask: what callers hold of it is bounded, and names are the server's own.

The servicer of ``grpcio-health-checking`` keeps every name that is watched, for as long as its caller likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import CapacityError, ConfigError
from cluster.security.limits import StrangerPool
from cluster.wire.channel import open_channel
from cluster.wire.status import abort
from cluster.wire.tls import PeerTls

SERVICE = "grpc.health.v1.Health"
READ_S = 5.0
MOST_READING = 3
"""Requests that are being read at once: each may be as large as the server's largest message."""
MOST_WATCHING = 64

Context: TypeAlias = grpc.aio.ServicerContext
Status = health_pb2.HealthCheckResponse


class HealthServicer:
    """``Check`` and ``Watch`` of the services ``names`` and of the server as a whole: SERVING until :meth:`shut_down`.

    An unknown name gets NOT_FOUND from ``Check``; ``Watch`` says SERVICE_UNKNOWN and ends. Of calls that hold
    something, one more than may be ends the oldest of the peer that has most with RESOURCE_EXHAUSTED: a probe sends all
    of its request at once and is answered however many others do not.
    """

    def __init__(self) -> None:
        self.names: Iterable[str] = ()
        self._reading: StrangerPool[asyncio.Timeout] = StrangerPool(MOST_READING)
        self._watching: StrangerPool[asyncio.Timeout] = StrangerPool(MOST_WATCHING)
        self._over = asyncio.Event()

    @property
    def watching(self) -> int:
        """Calls of ``Watch`` that are open."""
        return len(self._watching)

    def register(self, server: grpc.aio.Server) -> None:
        """Serve it, as methods whose requests gRPC does not read by itself."""
        types = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, *types),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, *types),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def shut_down(self) -> None:
        """Say NOT_SERVING from here on, and end every ``Watch`` with it."""
        self._over.set()

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        if name and name not in self.names:
            return Status(status=Status.SERVICE_UNKNOWN)
        return Status(status=Status.NOT_SERVING if self._over.is_set() else Status.SERVING)

    async def _check(self, _requests: Any, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._status(await self._name(context))
        if status.status == Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of that name")
        return status

    async def _watch(self, _requests: Any, context: Context) -> None:
        status = self._status(await self._name(context))
        await context.write(status)
        if status.status == Status.SERVING:
            async with self._held(self._watching, context, None):
                await self._over.wait()
            await context.write(Status(status=Status.NOT_SERVING))

    async def _name(self, context: Context) -> str:
        async with self._held(self._reading, context, READ_S):
            request = await context.read()
        if request is grpc.aio.EOF:
            await abort(context, ConfigError("the call ended before its request"))
        return str(request.service)

    @asynccontextmanager
    async def _held(
        self, pool: StrangerPool[asyncio.Timeout], context: Context, limit_s: float | None
    ) -> AsyncIterator[None]:
        """Room for what is done inside, until a newer call takes it."""
        try:
            async with asyncio.timeout(limit_s) as deadline:
                evicted = pool.add(deadline, host_of(context.peer()))
                if evicted is not None and not evicted.expired():
                    evicted.reschedule(0.0)
                try:
                    yield
                finally:
                    pool.discard(deadline)
        except TimeoutError:
            await abort(context, CapacityError("this took too long, or others came; ask again"))
        except ConfigError as error:
            await abort(context, error)


def host_of(peer: str) -> str:
    """The address without the port of ``ServicerContext.peer()``, as in ``ipv4:10.0.0.7:4711``."""
    return peer.rpartition(":")[0]


async def is_serving(address: str, *, timeout_s: float = 1.0, tls: PeerTls | None = None) -> bool:
    """Whether the server at ``host:port`` says SERVING within ``timeout_s``."""
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s, wait_for_ready=False)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
