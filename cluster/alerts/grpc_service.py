"""``Incidents`` of the alerting process: list, acknowledge, mute and follow them, and look after the outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from cluster.alerts.incident import AlertEvent
from cluster.alerts.service import AlertService
from cluster.alerts.wire import (
    detail_to_proto,
    event_to_proto,
    incident_to_proto,
    mutes_to_proto,
    outbox_to_proto,
)
from cluster.errors import ConfigError, SightlineError
from cluster.wire.status import abort

MOST_LISTED = 1000
LISTED = 100
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


@asynccontextmanager
async def _explained(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except (SightlineError, ValueError) as error:
        await abort(context, error)


def _is_told(event: AlertEvent, events: int) -> bool:
    """Whether an incident that was told had all that this event says: it had had ``events`` of them by then."""
    return event.incident.events < events or (event.incident.events == events and event.cause != "clip")


def _name(text: str, what: str) -> str:
    """Raises ``ConfigError``: too long, or not one line."""
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ConfigError(f"{what} must be one line of at most {LONGEST_NAME} characters")
    return text
