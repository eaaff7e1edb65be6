"""``Replicas``: look at the replicas, and take the cameras off one, over whatever places them."""

from collections.abc import Sequence
from typing import Protocol

import grpc.aio
from sightline.v1 import replicas_pb2, replicas_pb2_grpc

from cluster.errors import ConfigError, ForbiddenError
from cluster.gateway.forwarding import in_time
from cluster.security.roles import current_principal
from cluster.types.reports import DecoderNumbers, ReplicaStatus
from cluster.wire.mapping import to_message
from cluster.wire.status import explained

SERVICE = "sightline.v1.Replicas"


class ReplicaDirectory(Protocol):
    """Who places cameras: the controller, seen from the gateway.

    Raises ``ConfigError`` (no such replica), ``NotReadyError`` (nobody would take its cameras) or ``UnavailableError``.
    """

    async def list_replicas(self) -> Sequence[ReplicaStatus]: ...

    async def decoder_numbers(self) -> DecoderNumbers | None: ...

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
        async with explained(context):
            found = await in_time(self._directory.list_replicas(), self._deadline_s)
            decoders = await in_time(self._directory.decoder_numbers(), self._deadline_s)
            return replicas_pb2.ListReplicasResponse(
                replicas=[to_message(replicas_pb2.ReplicaStatus, status) for status in found],
                decoders=None if decoders is None else to_message(replicas_pb2.DecoderNumbers, decoders),
            )

    async def Drain(  # noqa: N802
        self, request: replicas_pb2.DrainReplicaRequest, context: grpc.aio.ServicerContext
    ) -> replicas_pb2.ReplicaStatus:
        """See protos/sightline/v1/replicas.proto."""
        async with explained(context):
            if not request.name:
                raise ConfigError("name the replica, as `sightline replicas list` shows it")
            if not current_principal().sees_all:
                who = current_principal().name
                raise ForbiddenError(f"draining moves everybody's cameras: it needs a token for all; {who!r} has some")
            drained = await in_time(self._directory.drain(request.name, request.undo), self._deadline_s)
            return to_message(replicas_pb2.ReplicaStatus, drained)
