"""``Incidents``: what goes on at the cameras, served where alerting runs and handed on by the gateway."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from cluster.alerts.incident import unknown_incident
from cluster.alerts.routing import TEST_S
from cluster.errors import ForbiddenError
from cluster.gateway.forwarding import Forwarding
from cluster.security.roles import ANYBODY, Role, current_principal
from cluster.wire.channel import ChannelPool
from cluster.wire.memory_wire import check_camera
from cluster.wire.status import as_refused

SERVICE = "sightline.v1.Incidents"

MAX_CALLS = 4096
"""Calls at once: each of those who follow incidents is one."""

Context: TypeAlias = grpc.aio.ServicerContext


class IncidentsProxy(incidents_pb2_grpc.IncidentsServicer):
    """The gateway's side: hands calls on to where alerting runs, and keeps to the cameras that a caller may see.

    Args:
        route: ``host:port`` of that process; raises ``UnavailableError`` while there is none.
        call_s: longest that any call but ``Follow`` may take.
    """

    def __init__(self, route: Callable[[], Awaitable[str]], channels: ChannelPool, *, call_s: float = 30.0) -> None:
        self._route = route
        self._alerting = Forwarding(channels, "calls about incidents", max_calls=MAX_CALLS)
        self._call_s = call_s

    async def List(  # noqa: N802
        self, request: incidents_pb2.ListIncidentsRequest, context: Context
    ) -> incidents_pb2.ListIncidentsResponse:
        async with self._forwarding(context) as stub:
            found: incidents_pb2.ListIncidentsResponse = await stub.List(_scoped(request), timeout=self._call_s)
            return found

    async def Get(  # noqa: N802
        self, request: incidents_pb2.GetIncidentRequest, context: Context
    ) -> incidents_pb2.IncidentDetail:
        async with self._forwarding(context) as stub:
            return await self._of_mine(stub, request.id, Role.VIEW)

    async def Acknowledge(  # noqa: N802
        self, request: incidents_pb2.AcknowledgeRequest, context: Context
    ) -> incidents_pb2.Incident:
        async with self._forwarding(context) as stub:
            await self._of_mine(stub, request.id, Role.ASK)
            incident: incidents_pb2.Incident = await stub.Acknowledge(_signed(request), timeout=self._call_s)
            return incident

    async def Review(self, request: incidents_pb2.ReviewRequest, context: Context) -> incidents_pb2.Incident:  # noqa: N802
        async with self._forwarding(context) as stub:
            await self._of_mine(stub, request.id, Role.ASK)
            incident: incidents_pb2.Incident = await stub.Review(_signed(request), timeout=self._call_s)
            return incident

    async def Timeline(  # noqa: N802
        self, request: incidents_pb2.TimelineRequest, context: Context
    ) -> incidents_pb2.TimelineReply:
        async with self._forwarding(context) as stub:
            check_camera(request.camera)
            timeline: incidents_pb2.TimelineReply = await stub.Timeline(request, timeout=self._call_s)
            return timeline

    async def Mute(  # noqa: N802
        self, request: incidents_pb2.MuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with self._forwarding(context) as stub:
            _require_scope(request.camera)
            return self._seen(await stub.Mute(_signed(request), timeout=self._call_s))

    async def Unmute(  # noqa: N802
        self, request: incidents_pb2.UnmuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with self._forwarding(context) as stub:
            _require_scope(request.camera)
            return self._seen(await stub.Unmute(request, timeout=self._call_s))

    async def ListMutes(  # noqa: N802
        self, request: incidents_pb2.ListMutesRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with self._forwarding(context) as stub:
            return self._seen(await stub.ListMutes(request, timeout=self._call_s))

    async def Follow(self, request: incidents_pb2.FollowRequest, context: Context) -> None:  # noqa: N802
        async with self._forwarding(context) as stub:
            sees = current_principal().sees
            call = stub.Follow(request)
            try:
                await call.initial_metadata()
                await context.send_initial_metadata(())
                lost = 0
                async for event in call:
                    lost += event.missed
                    if sees(event.incident.camera):
                        event.missed, lost = lost, 0
                        await context.write(event)
            finally:
                call.cancel()

    async def Outbox(  # noqa: N802
        self, request: incidents_pb2.OutboxRequest, context: Context
    ) -> incidents_pb2.OutboxStatus:
        async with self._forwarding(context) as stub:
            status: incidents_pb2.OutboxStatus = await stub.Outbox(_scoped(request), timeout=self._call_s)
            return status

    async def Resend(  # noqa: N802
        self, request: incidents_pb2.ResendRequest, context: Context
    ) -> incidents_pb2.ResendResponse:
        async with self._forwarding(context) as stub:
            sent: incidents_pb2.ResendResponse = await stub.Resend(_scoped(request), timeout=self._call_s)
            return sent

    async def list_incidents(self, request: incidents_pb2.ListIncidentsRequest) -> incidents_pb2.ListIncidentsResponse:
        """Asked by the gateway itself, for the request's ``scope``. Raises ``SightlineError`` or gRPC's error."""
        async with self._alerting.channels.lease(await self._route()) as channel:
            stub = incidents_pb2_grpc.IncidentsStub(channel)
            found: incidents_pb2.ListIncidentsResponse = await stub.List(request, timeout=self._call_s)
            return found

    async def TestSink(  # noqa: N802
        self, request: incidents_pb2.TestSinkRequest, context: Context
    ) -> incidents_pb2.TestSinkResponse:
        async with self._forwarding(context) as stub:
            if not current_principal().sees_all:
                who = current_principal().name
                raise ForbiddenError(
                    f"a sink is everybody's: to test it needs a token for all cameras; {who!r} has some"
                )
            done: incidents_pb2.TestSinkResponse = await stub.TestSink(request, timeout=TEST_S + 5.0)
            return done

    # -- inside ---------------------------------------------------------------------------------
    async def _of_mine(self, stub: Any, incident_id: str, role: Role) -> incidents_pb2.IncidentDetail:
        detail: incidents_pb2.IncidentDetail = await stub.Get(
            incidents_pb2.GetIncidentRequest(id=incident_id), timeout=self._call_s
        )
        current_principal().require(role)
        if not current_principal().sees(detail.incident.camera):
            raise as_refused(unknown_incident(incident_id))
        return detail

    @staticmethod
    def _seen(reply: incidents_pb2.ListMutesResponse) -> incidents_pb2.ListMutesResponse:
        seen = [mute for mute in reply.mutes if mute.camera == "*" or current_principal().sees(mute.camera)]
        return incidents_pb2.ListMutesResponse(mutes=seen)

    @asynccontextmanager
    async def _forwarding(self, context: Context) -> AsyncIterator[Any]:
        async with self._alerting.to(context, "alerting", self._route, self._call_s) as channel:
            yield incidents_pb2_grpc.IncidentsStub(channel)


def _signed(request: Any) -> Any:
    """The same request by the caller, whoever it says itself; where nobody is known, by whom it says."""
    # A name of one's own choice would make the record worthless.
    if current_principal() is not ANYBODY:
        request.by = current_principal().name
    return request


def _scoped(request: Any) -> Any:
    """The same request for no more than the caller may see, whatever it says itself."""
    # Nothing at all stands for every camera there, and for none here.
    request.scope[:] = current_principal().cameras or [""]
    return request


def _require_scope(camera: str) -> None:
    """A mute of one camera, or of all that there are or will be. Raises ``ForbiddenError``."""
    of_all = camera in ("", "*")
    current_principal().require(Role.ASK, [] if of_all else [camera])
    if of_all and not current_principal().sees_all:
        raise ForbiddenError(
            f"a mute of all cameras needs a token for all of them; {current_principal().name!r} has one for some"
        )
