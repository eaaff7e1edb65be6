"""``Incidents``: what goes on at the cameras, served where alerting runs and handed on by the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from cluster.alerts.incident import AlertEvent, unknown_incident
from cluster.alerts.service import AlertService
from cluster.alerts.wire import (
    detail_to_proto,
    event_to_proto,
    incident_to_proto,
    mutes_to_proto,
    outbox_to_proto,
)
from cluster.errors import ConfigError, ForbiddenError, SightlineError, UnavailableError
from cluster.security.access import ANYBODY, current
from cluster.security.roles import Role
from cluster.wire.channel import ChannelPool
from cluster.wire.status import RefusedError, abort, as_refused, is_ours

SERVICE = "sightline.v1.Incidents"
MOST_LISTED, LISTED = 1000, 100
LONGEST_NAME = 256
LONGEST_MUTE_S = 366 * 86_400.0

Context: TypeAlias = grpc.aio.ServicerContext


class IncidentsServicer(incidents_pb2_grpc.IncidentsServicer):
    """Over the service itself. See protos/sightline/v1/incidents.proto for every call."""

    def __init__(self, service: AlertService) -> None:
        self._service = service

    async def List(  # noqa: N802
        self, request: incidents_pb2.ListIncidentsRequest, context: Context
    ) -> incidents_pb2.ListIncidentsResponse:
        async with _explained(context):
            found = await self._service.incidents(
                camera=request.camera,
                subject=request.subject,
                only_open=request.only_open,
                since_s=request.since_s,
                limit=min(request.limit or LISTED, MOST_LISTED),
            )
            return incidents_pb2.ListIncidentsResponse(incidents=[incident_to_proto(each) for each in found])

    async def Get(  # noqa: N802
        self, request: incidents_pb2.GetIncidentRequest, context: Context
    ) -> incidents_pb2.IncidentDetail:
        async with _explained(context):
            return detail_to_proto(await self._service.incident(request.id))

    async def Acknowledge(  # noqa: N802
        self, request: incidents_pb2.AcknowledgeRequest, context: Context
    ) -> incidents_pb2.Incident:
        async with _explained(context):
            return incident_to_proto(await self._service.acknowledge(request.id, _name(request.by, "by")))

    async def Mute(  # noqa: N802
        self, request: incidents_pb2.MuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with _explained(context):
            if not 0 < request.for_s <= LONGEST_MUTE_S:
                raise ConfigError(f"for_s must be above 0 and at most a year, not {request.for_s:g}")
            camera, subject = _name(request.camera, "camera"), _name(request.subject, "subject")
            mutes = await self._service.mute(camera, subject, request.for_s, _name(request.by, "by"))
            return mutes_to_proto(mutes)

    async def Unmute(  # noqa: N802
        self, request: incidents_pb2.UnmuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with _explained(context):
            return mutes_to_proto(await self._service.unmute(request.camera, request.subject))

    async def ListMutes(  # noqa: N802
        self, _request: incidents_pb2.ListMutesRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with _explained(context):
            return mutes_to_proto(self._service.mutes())

    async def Follow(self, request: incidents_pb2.FollowRequest, context: Context) -> None:  # noqa: N802
        async with _explained(context):
            wanted = set(request.cameras)
            with self._service.follow() as follower:
                # At one moment with it: an incident that opens from here on is told as what it is, new.
                opened = self._service.opened() if request.open else []
                await context.send_initial_metadata(())
                for incident in opened:
                    if not wanted or incident.camera in wanted:
                        event = AlertEvent(
                            f"{incident.id}-open", "update", incident.updated_s, incident, incident.muted
                        )
                        await context.write(event_to_proto(event))
                told = {incident.id: incident.events for incident in opened}
                lost = 0
                async for event, missed in follower:
                    lost += missed
                    if _is_told(event, told.get(event.incident.id, 0)):
                        continue
                    if not wanted or event.incident.camera in wanted:
                        await context.write(event_to_proto(event, lost))
                        lost = 0

    async def Outbox(  # noqa: N802
        self, request: incidents_pb2.OutboxRequest, context: Context
    ) -> incidents_pb2.OutboxStatus:
        async with _explained(context):
            return outbox_to_proto(await self._service.outbox(min(request.dead, MOST_LISTED)))

    async def Resend(  # noqa: N802
        self, request: incidents_pb2.ResendRequest, context: Context
    ) -> incidents_pb2.ResendResponse:
        async with _explained(context):
            return incidents_pb2.ResendResponse(count=await self._service.resend(request.sink, request.key))


class IncidentsProxy(incidents_pb2_grpc.IncidentsServicer):
    """The gateway's side: hands calls on to where alerting runs, and keeps to the cameras that a caller may see.

    Args:
        route: ``host:port`` of that process; raises ``UnavailableError`` while there is none.
        call_s: longest that any call but ``Follow`` may take.
    """

    def __init__(self, route: Callable[[], Awaitable[str]], channels: ChannelPool, *, call_s: float = 30.0) -> None:
        self._route = route
        self._channels = channels
        self._call_s = call_s

    async def List(  # noqa: N802
        self, request: incidents_pb2.ListIncidentsRequest, context: Context
    ) -> incidents_pb2.ListIncidentsResponse:
        async with self._forwarding(context) as stub:
            reply = await stub.List(request, timeout=self._call_s)
            sees = current().sees
            return incidents_pb2.ListIncidentsResponse(incidents=[i for i in reply.incidents if sees(i.camera)])

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
            if current() is not ANYBODY:
                # A name of one's own choice would make the record worthless.
                request.by = current().name
            incident: incidents_pb2.Incident = await stub.Acknowledge(request, timeout=self._call_s)
            return incident

    async def Mute(  # noqa: N802
        self, request: incidents_pb2.MuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with self._forwarding(context) as stub:
            _require_scope(request.camera)
            if current() is not ANYBODY:
                request.by = current().name
            return self._seen(await stub.Mute(request, timeout=self._call_s))

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
            sees = current().sees
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
            reply: incidents_pb2.OutboxStatus = await stub.Outbox(request, timeout=self._call_s)
            dead = [letter for letter in reply.dead if current().sees(letter.event.incident.camera)]
            del reply.dead[:]
            reply.dead.extend(dead)
            return reply

    async def Resend(  # noqa: N802
        self, request: incidents_pb2.ResendRequest, context: Context
    ) -> incidents_pb2.ResendResponse:
        async with self._forwarding(context) as stub:
            wanted = [request]
            if not current().sees_all:
                outbox = await stub.Outbox(incidents_pb2.OutboxRequest(dead=MOST_LISTED), timeout=self._call_s)
                keys = {each.event.key for each in outbox.dead if current().sees(each.event.incident.camera)}
                # A key of another camera's event is like one that nothing has.
                keys &= {request.key or key for key in keys}
                wanted = [incidents_pb2.ResendRequest(sink=request.sink, key=key) for key in sorted(keys)]
            replies = [await stub.Resend(each, timeout=self._call_s) for each in wanted]
            return incidents_pb2.ResendResponse(count=sum(reply.count for reply in replies))

    # -- inside ---------------------------------------------------------------------------------
    async def _of_mine(self, stub: Any, incident_id: str, role: Role) -> incidents_pb2.IncidentDetail:
        detail: incidents_pb2.IncidentDetail = await stub.Get(
            incidents_pb2.GetIncidentRequest(id=incident_id), timeout=self._call_s
        )
        current().require(role)
        if not current().sees(detail.incident.camera):
            raise as_refused(unknown_incident(incident_id))
        return detail

    @staticmethod
    def _seen(reply: incidents_pb2.ListMutesResponse) -> incidents_pb2.ListMutesResponse:
        seen = [mute for mute in reply.mutes if mute.camera == "*" or current().sees(mute.camera)]
        return incidents_pb2.ListMutesResponse(mutes=seen)

    @asynccontextmanager
    async def _forwarding(self, context: Context) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(self._call_s):
                address = await self._route()
            async with self._channels.lease(address) as channel:
                yield incidents_pb2_grpc.IncidentsStub(channel)
        except grpc.aio.AioRpcError as error:
            await abort(context, _as_told(error))
        except TimeoutError:
            await abort(context, UnavailableError(f"alerting did not answer within {self._call_s:g} s"))
        except SightlineError as error:
            await abort(context, error)


def _require_scope(camera: str) -> None:
    """A mute of one camera, or of all that there are or will be. Raises ``ForbiddenError``."""
    of_all = camera in ("", "*")
    current().require(Role.ASK, [] if of_all else [camera])
    if of_all and not current().sees_all:
        raise ForbiddenError(
            f"a mute of all cameras needs a token for all of them; {current().name!r} has one for some"
        )


@asynccontextmanager
async def _explained(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except (SightlineError, ValueError) as error:
        await abort(context, error)


def _is_told(event: AlertEvent, events: int) -> bool:
    """Whether an incident that was told had all that this event says: it had had ``events`` of them by then."""
    return event.incident.events < events or (event.incident.events == events and event.cause != "clip")


def _as_told(error: grpc.aio.AioRpcError) -> SightlineError:
    if is_ours(error):
        return RefusedError(error.code(), error.details() or error.code().name)
    return UnavailableError(f"alerting does not answer; try again in a moment ({error.details()})")


def _name(text: str, what: str) -> str:
    """Raises ``ConfigError``: too long, or not one line."""
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ConfigError(f"{what} must be one line of at most {LONGEST_NAME} characters")
    return text
