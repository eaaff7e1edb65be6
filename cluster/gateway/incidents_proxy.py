"""``Incidents``: what goes on at the cameras, served where alerting runs and handed on by the gateway."""

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
"""Longest that any call but ``Follow`` may take."""

Context: TypeAlias = grpc.aio.ServicerContext


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


def _of_camera(request: pb.TimelineRequest) -> pb.TimelineRequest:
    check_camera(request.camera)
    return request


def _muting(request: Any) -> Any:
    """A mute of one camera, or of all that there are or will be. Raises ``ForbiddenError``."""
    of_all = request.camera in ("", "*")
    current_principal().require(Role.ASK, [] if of_all else [request.camera], everybody=of_all)
    return request


def _seen(reply: pb.ListMutesResponse) -> pb.ListMutesResponse:
    seen = [mute for mute in reply.mutes if mute.camera == "*" or current_principal().sees(mute.camera)]
    return pb.ListMutesResponse(mutes=seen)


def _same(message: Any) -> Any:
    return message


Message: TypeAlias = Callable[[Any], Any]


def _handed_on(
    name: str, request: Message = _same, reply: Message = _same, limit_s: float = CALL_S, *, of_mine: bool = False
) -> Any:
    """A method that alerting answers: what it is asked, and what the caller gets of its ``reply``; ``of_mine``: about
    an incident that the caller may see."""

    async def method(self: IncidentsProxy, asked: Any, _context: Context) -> Any:
        async with self.alerting() as stub:
            if of_mine:
                note_cameras((await self._of_mine(stub, asked.id)).incident.camera)
            return reply(await getattr(stub, name)(request(asked), timeout=limit_s))

    return method


class IncidentsProxy(incidents_pb2_grpc.IncidentsServicer):
    """The gateway's side: hands calls on to where alerting runs, and keeps to the cameras that a caller may see.

    ``route``: ``host:port`` of that process; raises ``UnavailableError`` while there is none.
    """

    def __init__(self, route: Callable[[], Awaitable[str]], channels: ChannelPool) -> None:
        self._route = route
        self._forwarding = Forwarding(channels, "calls about incidents")
        self._following = Forwarding(channels, "calls that follow incidents")

    List = _handed_on("List", _scoped)
    Acknowledge = _handed_on("Acknowledge", _signed, of_mine=True)
    Review = _handed_on("Review", _signed, of_mine=True)
    Timeline = _handed_on("Timeline", _of_camera)
    Mute = _handed_on("Mute", lambda request: _signed(_muting(request)), _seen)
    Unmute = _handed_on("Unmute", _muting, _seen)
    ListMutes = _handed_on("ListMutes", reply=_seen)
    Outbox = _handed_on("Outbox", _scoped)
    Resend = _handed_on("Resend", _scoped)
    TestSink = _handed_on("TestSink", limit_s=TEST_S + 5.0)

    async def Get(self, request: pb.GetIncidentRequest, _context: Context) -> pb.IncidentDetail:
        async with self.alerting() as stub:
            return await self._of_mine(stub, request.id)

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
        """Asked by the gateway itself, for the request's ``scope``. Raises ``SightlineError`` or gRPC's error."""
        async with self._forwarding.channels.lease(await self._route()) as channel:
            return await incidents_pb2_grpc.IncidentsStub(channel).List(request, timeout=CALL_S)

    async def _of_mine(self, stub: Any, incident_id: str) -> pb.IncidentDetail:
        detail = await stub.Get(pb.GetIncidentRequest(id=incident_id), timeout=CALL_S)
        if not current_principal().sees(detail.incident.camera):
            raise as_refused(unknown_incident(incident_id))
        return detail

    @asynccontextmanager
    async def alerting(self) -> AsyncIterator[Any]:
        """Its stub, within the limits of :class:`Forwarding`."""
        async with self._forwarding.to("alerting", self._route, CALL_S) as channel:
            yield incidents_pb2_grpc.IncidentsStub(channel)
