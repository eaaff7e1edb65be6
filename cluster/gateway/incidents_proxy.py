"""Gateway side of gRPC ``Incidents``: forwards calls to alerting, within the caller's camera scope."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2 as pb
from sightline.v1 import incidents_pb2_grpc

from cluster.alerts.incident import unknown_incident
from cluster.alerts.routing import TEST_S
from cluster.gateway.forwarding import Forwarding
from cluster.security.roles import ANYBODY, Role, current_principal, note_cameras
from cluster.wire.channel import ChannelPool
from cluster.wire.memory_wire import check_camera
from cluster.wire.status import as_refused

CALL_S = 30.0
"""Timeout of every call but ``Follow``, in seconds."""

Context: TypeAlias = grpc.aio.ServicerContext


def _signed(request: Any) -> Any:
    """Set ``by`` to the caller's name, unless callers are not authenticated."""
    # A self-chosen name would make the record worthless.
    if current_principal() is not ANYBODY:
        request.by = current_principal().name
    return request


def _scoped(request: Any) -> Any:
    """Set ``scope`` to the cameras that the caller may see, whatever it asked for."""
    # An empty scope means every camera in the request, but none in a principal.
    request.scope[:] = current_principal().cameras or [""]
    return request


def _check_timeline(request: pb.TimelineRequest) -> pb.TimelineRequest:
    check_camera(request.camera)
    return request


def _check_mute(request: Any) -> Any:
    """Check the right to mute one camera, or all present and future ones. Raises ``ForbiddenError``."""
    of_all = request.camera in ("", "*")
    current_principal().require(Role.ASK, [] if of_all else [request.camera], everybody=of_all)
    return request


def _visible_mutes(reply: pb.ListMutesResponse) -> pb.ListMutesResponse:
    visible = [mute for mute in reply.mutes if mute.camera == "*" or current_principal().sees(mute.camera)]
    return pb.ListMutesResponse(mutes=visible)


def _same(message: Any) -> Any:
    return message


Transform: TypeAlias = Callable[[Any], Any]


def _forwarded(
    name: str, request: Transform = _same, reply: Transform = _same, limit_s: float = CALL_S, *, own: bool = False
) -> Any:
    """Make a method that forwards to alerting, transforming request and reply; ``own``: it names an incident, which the
    caller must be allowed to see."""

    async def method(self: IncidentsProxy, asked: Any, _context: Context) -> Any:
        async with self.alerting() as stub:
            if own:
                note_cameras((await self._get_own(stub, asked.id)).incident.camera)
            return reply(await getattr(stub, name)(request(asked), timeout=limit_s))

    return method


class IncidentsProxy(incidents_pb2_grpc.IncidentsServicer):
    """Forwards calls to the alerting process, restricted to the cameras that the caller may see.

    ``route``: ``host:port`` of that process; raises ``UnavailableError`` while there is none.
    """

    def __init__(self, route: Callable[[], Awaitable[str]], channels: ChannelPool) -> None:
        self._route = route
        self._forwarding = Forwarding(channels, "calls about incidents")
        self._following = Forwarding(channels, "calls that follow incidents")

    List = _forwarded("List", _scoped)
    Acknowledge = _forwarded("Acknowledge", _signed, own=True)
    Review = _forwarded("Review", _signed, own=True)
    Timeline = _forwarded("Timeline", _check_timeline)
    Mute = _forwarded("Mute", lambda request: _signed(_check_mute(request)), _visible_mutes)
    Unmute = _forwarded("Unmute", _check_mute, _visible_mutes)
    ListMutes = _forwarded("ListMutes", reply=_visible_mutes)
    Outbox = _forwarded("Outbox", _scoped)
    Resend = _forwarded("Resend", _scoped)
    TestSink = _forwarded("TestSink", limit_s=TEST_S + 5.0)

    async def Get(self, request: pb.GetIncidentRequest, _context: Context) -> pb.IncidentDetail:
        async with self.alerting() as stub:
            return await self._get_own(stub, request.id)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> None:
        async with self._following.to("alerting", self._route, CALL_S) as channel:
            sees = current_principal().sees
            call = incidents_pb2_grpc.IncidentsStub(channel).Follow(request)
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

    async def list_incidents(self, request: pb.ListIncidentsRequest) -> pb.ListIncidentsResponse:
        """List incidents for the gateway itself, within ``request.scope``. Raises ``SightlineError`` or gRPC errors."""
        async with self._forwarding.channels.lease(await self._route()) as channel:
            return await incidents_pb2_grpc.IncidentsStub(channel).List(request, timeout=CALL_S)

    async def _get_own(self, stub: Any, incident_id: str) -> pb.IncidentDetail:
        detail = await stub.Get(pb.GetIncidentRequest(id=incident_id), timeout=CALL_S)
        if not current_principal().sees(detail.incident.camera):
            raise as_refused(unknown_incident(incident_id))
        return detail

    @asynccontextmanager
    async def alerting(self) -> AsyncIterator[Any]:
        """Stub of the alerting process, within the limits of :class:`Forwarding`."""
        async with self._forwarding.to("alerting", self._route, CALL_S) as channel:
            yield incidents_pb2_grpc.IncidentsStub(channel)
