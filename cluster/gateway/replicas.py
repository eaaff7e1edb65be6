"""``Replicas``: look at the replicas, and take the cameras off one, over whatever places them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

import grpc.aio
from sightline.v1 import replicas_pb2, replicas_pb2_grpc

from cluster.errors import ConfigError, ForbiddenError, SightlineError, UnavailableError
from cluster.security.roles import current_principal
from cluster.types.reports import ReplicaStatus
from cluster.wire.convert import replica_to_proto
from cluster.wire.status import abort

SERVICE = "sightline.v1.Replicas"
T = TypeVar("T")


class ReplicaDirectory(Protocol):
    """Who places cameras: the controller, seen from the gateway.

    Raises ``ConfigError`` (no such replica), ``NotReadyError`` (nobody would take its cameras) or ``UnavailableError``.
    """

    async def list_replicas(self) -> Sequence[ReplicaStatus]: ...

    async def drain(self, name: str, undo: bool) -> ReplicaStatus: ...


class ReplicasServicer(replicas_pb2_grpc.ReplicasServicer):
    """Every call gets ``deadline_s``; a directory that does not answer in time is UNAVAILABLE."""

    def __init__(self, directory: ReplicaDirectory, *, deadline_s: float = 30.0) -> None:
        self._directory = directory
        self._deadline_s = deadline_s

    async def List(  # noqa: N802
        self, _request: replicas_pb2.ListReplicasRequest, context: grpc.aio.ServicerContext
    ) -> replicas_pb2.ListReplicasResponse:
        """See protos/sightline/v1/replicas.proto."""
        try:
            found = await self._in_time(self._directory.list_replicas())
            return replicas_pb2.ListReplicasResponse(replicas=[replica_to_proto(status) for status in found])
        except SightlineError as error:
            await abort(context, error)

    async def Drain(  # noqa: N802
        self, request: replicas_pb2.DrainReplicaRequest, context: grpc.aio.ServicerContext
    ) -> replicas_pb2.ReplicaStatus:
        """See protos/sightline/v1/replicas.proto."""
        try:
            if not request.name:
                raise ConfigError("name the replica, as `sightline replicas list` shows it")
            if not current_principal().sees_all:
                who = current_principal().name
                raise ForbiddenError(f"draining moves everybody's cameras: it needs a token for all; {who!r} has some")
            return replica_to_proto(await self._in_time(self._directory.drain(request.name, request.undo)))
        except SightlineError as error:
            await abort(context, error)

    async def _in_time(self, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError:
            raise UnavailableError(f"the controller did not answer within {self._deadline_s:g} s") from None
