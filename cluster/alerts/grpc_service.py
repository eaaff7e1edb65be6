"""gRPC ``Incidents`` service: list, acknowledge, mute and follow incidents, and inspect the outbox."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from cluster.alerts.dispatcher import Outbox, SinkStatus
from cluster.alerts.incident import (
    UNREVIEWED,
    VERDICTS,
    AlertEvent,
    Delivery,
    DeliveryState,
    EventCause,
    EventKind,
    Incident,
    IncidentDetail,
    IncidentQuery,
    Mute,
    Verdict,
)
from cluster.alerts.service import AlertService
from cluster.alerts.timeline_store import CameraTimeline, ScoreBin, StateChange
from cluster.errors import ConfigError
from cluster.security.roles import EVERY
from cluster.wire.status import explained

_FIELDS = list(incidents_pb2.Incident.DESCRIPTOR.fields_by_name)
_OPTIONAL = ("ended_s", "acknowledged_s", "reviewed_s")


def incident_to_proto(incident: Incident) -> incidents_pb2.Incident:
    """Convert one incident; the number of its events is not part of the message."""
    return incidents_pb2.Incident(**{name: getattr(incident, name) for name in _FIELDS})


def incident_from_proto(message: incidents_pb2.Incident) -> Incident:
    """The inverse of :func:`incident_to_proto`."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    values.update({name: None for name in _OPTIONAL if not message.HasField(name)})
    return Incident(**values)


def event_to_proto(event: AlertEvent, missed: int = 0) -> incidents_pb2.IncidentEvent:
    """Convert one event; ``missed``: events that the reader lost before it."""
    return incidents_pb2.IncidentEvent(
        key=event.key,
        event=event.kind,
        at_s=event.at_s,
        incident=incident_to_proto(event.incident),
        missed=missed,
        quiet=event.quiet,
        cause=event.cause,
    )


def event_from_proto(message: incidents_pb2.IncidentEvent) -> AlertEvent:
    """The inverse of :func:`event_to_proto`."""
    kind, cause = cast(EventKind, message.event), cast(EventCause, message.cause)
    return AlertEvent(message.key, kind, message.at_s, incident_from_proto(message.incident), message.quiet, cause)


def delivery_to_proto(delivery: Delivery) -> incidents_pb2.Delivery:
    """Convert one delivery."""
    return incidents_pb2.Delivery(
        event=event_to_proto(delivery.event),
        sink=delivery.sink,
        state=delivery.state,
        attempts=delivery.attempts,
        error=delivery.error,
    )


def delivery_from_proto(message: incidents_pb2.Delivery) -> Delivery:
    """The inverse of :func:`delivery_to_proto`."""
    state = cast(DeliveryState, message.state)
    return Delivery(event_from_proto(message.event), message.sink, state, message.attempts, message.error)


def detail_to_proto(detail: IncidentDetail) -> incidents_pb2.IncidentDetail:
    """Convert an incident with its events and deliveries."""
    return incidents_pb2.IncidentDetail(
        incident=incident_to_proto(detail.incident),
        events=[event_to_proto(event) for event in detail.events],
        deliveries=[delivery_to_proto(delivery) for delivery in detail.deliveries],
    )


def detail_from_proto(message: incidents_pb2.IncidentDetail) -> IncidentDetail:
    """The inverse of :func:`detail_to_proto`."""
    return IncidentDetail(
        incident_from_proto(message.incident),
        [event_from_proto(event) for event in message.events],
        [delivery_from_proto(delivery) for delivery in message.deliveries],
    )


def mutes_to_proto(mutes: Sequence[Mute]) -> incidents_pb2.ListMutesResponse:
    """Convert the active mutes."""
    return incidents_pb2.ListMutesResponse(
        mutes=[incidents_pb2.Mute(camera=m.camera, subject=m.subject, until_s=m.until_s, by=m.by) for m in mutes]
    )


def mutes_from_proto(message: incidents_pb2.ListMutesResponse) -> list[Mute]:
    """The inverse of :func:`mutes_to_proto`."""
    return [Mute(mute.camera, mute.subject, mute.until_s, mute.by) for mute in message.mutes]


def outbox_to_proto(outbox: Outbox) -> incidents_pb2.OutboxStatus:
    """Convert the status of sinks and disk."""
    lanes = [
        incidents_pb2.SinkStatus(name=name, kind=kind, **asdict(lane)) for name, (kind, lane) in outbox.sinks.items()
    ]
    return incidents_pb2.OutboxStatus(
        sinks=lanes,
        trouble=outbox.trouble,
        unwritten=outbox.unwritten,
        trimmed=outbox.trimmed,
        lost=outbox.lost,
        answers_missed=outbox.answers_missed,
        dead=[delivery_to_proto(letter) for letter in outbox.dead],
    )


def outbox_from_proto(message: incidents_pb2.OutboxStatus) -> Outbox:
    """The inverse of :func:`outbox_to_proto`."""
    lanes = {
        s.name: (s.kind, SinkStatus(s.waiting, s.delivered, s.failures, s.dead, s.trouble, s.dropped))
        for s in message.sinks
    }
    dead = [delivery_from_proto(letter) for letter in message.dead]
    return Outbox(
        lanes, message.trouble, message.unwritten, message.trimmed, message.lost, message.answers_missed, dead
    )


_COLUMNS = ("at_s", "highest", "level", "windows", "positives")


def timeline_to_proto(timeline: CameraTimeline) -> incidents_pb2.TimelineReply:
    """Convert one camera's timeline."""
    questions = [
        incidents_pb2.QuestionScores(
            question=question, **{name: [getattr(each, name) for each in bins] for name in _COLUMNS}
        )
        for question, bins in timeline.scores.items()
    ]
    return incidents_pb2.TimelineReply(
        questions=questions, states=[incidents_pb2.CameraStateChange(**asdict(each)) for each in timeline.states]
    )


def timeline_from_proto(message: incidents_pb2.TimelineReply) -> CameraTimeline:
    """The inverse of :func:`timeline_to_proto`; scores are floats of 32 bits on the way."""
    scores = {
        each.question: [ScoreBin(*row) for row in zip(*(getattr(each, name) for name in _COLUMNS), strict=True)]
        for each in message.questions
    }
    return CameraTimeline(scores, [StateChange(each.at_s, each.state, each.rung, each.gaps) for each in message.states])


MOST_LISTED = 1000
LISTED = 100
LONGEST_NAME = 256
LONGEST_MUTE_S = 366 * 86_400.0

Context: TypeAlias = grpc.aio.ServicerContext


class IncidentsServicer(incidents_pb2_grpc.IncidentsServicer):
    """Servicer over ``AlertService``. See protos/sightline/v1/incidents.proto for every call."""

    def __init__(self, service: AlertService) -> None:
        self._service = service

    async def List(  # noqa: N802
        self, request: incidents_pb2.ListIncidentsRequest, context: Context
    ) -> incidents_pb2.ListIncidentsResponse:
        async with explained(context):
            query = IncidentQuery(
                camera=request.camera,
                subject=request.subject,
                only_open=request.only_open,
                since_s=request.since_s,
                verdict=_verdict(request.verdict, UNREVIEWED),
                limit=min(request.limit or LISTED, MOST_LISTED),
                scope=request.scope or EVERY,
            )
            found = await self._service.incidents(query)
            return incidents_pb2.ListIncidentsResponse(incidents=[incident_to_proto(each) for each in found])

    async def Get(  # noqa: N802
        self, request: incidents_pb2.GetIncidentRequest, context: Context
    ) -> incidents_pb2.IncidentDetail:
        async with explained(context):
            return detail_to_proto(await self._service.incident(request.id))

    async def Acknowledge(  # noqa: N802
        self, request: incidents_pb2.AcknowledgeRequest, context: Context
    ) -> incidents_pb2.Incident:
        async with explained(context):
            return incident_to_proto(await self._service.acknowledge(request.id, _name(request.by, "by")))

    async def Review(self, request: incidents_pb2.ReviewRequest, context: Context) -> incidents_pb2.Incident:  # noqa: N802
        async with explained(context):
            verdict = cast(Verdict, _verdict(request.verdict))
            return incident_to_proto(await self._service.review(request.id, verdict, _name(request.by, "by")))

    async def Timeline(  # noqa: N802
        self, request: incidents_pb2.TimelineRequest, context: Context
    ) -> incidents_pb2.TimelineReply:
        async with explained(context):
            until_s = request.until_s or time.time() + 1
            return timeline_to_proto(await self._service.timelines.read(request.camera, request.since_s, until_s))

    async def Mute(  # noqa: N802
        self, request: incidents_pb2.MuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with explained(context):
            if not 0 < request.for_s <= LONGEST_MUTE_S:
                raise ConfigError(f"for_s must be above 0 and at most a year, not {request.for_s:g}")
            camera, subject = _name(request.camera, "camera"), _name(request.subject, "subject")
            mutes = await self._service.mute(camera, subject, request.for_s, _name(request.by, "by"))
            return mutes_to_proto(mutes)

    async def Unmute(  # noqa: N802
        self, request: incidents_pb2.UnmuteRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with explained(context):
            return mutes_to_proto(await self._service.unmute(request.camera, request.subject))

    async def ListMutes(  # noqa: N802
        self, _request: incidents_pb2.ListMutesRequest, context: Context
    ) -> incidents_pb2.ListMutesResponse:
        async with explained(context):
            return mutes_to_proto(self._service.mutes())

    async def Follow(self, request: incidents_pb2.FollowRequest, context: Context) -> None:  # noqa: N802
        async with explained(context):
            wanted = set(request.cameras)
            with self._service.follow() as follower:
                # No await in between: an incident that opens from here on is reported as new.
                opened = self._service.open_incidents() if request.open else []
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
        async with explained(context):
            return outbox_to_proto(await self._service.outbox(min(request.dead, MOST_LISTED), request.scope or EVERY))

    async def Resend(  # noqa: N802
        self, request: incidents_pb2.ResendRequest, context: Context
    ) -> incidents_pb2.ResendResponse:
        async with explained(context):
            count = await self._service.resend(request.sink, request.key, request.scope or EVERY)
            return incidents_pb2.ResendResponse(count=count)

    async def TestSink(  # noqa: N802
        self, request: incidents_pb2.TestSinkRequest, context: Context
    ) -> incidents_pb2.TestSinkResponse:
        async with explained(context):
            await self._service.routes.test(request.sink)
            return incidents_pb2.TestSinkResponse()


def _is_told(event: AlertEvent, events: int) -> bool:
    """Whether an incident already reported with ``events`` events includes this event."""
    return event.incident.events < events or (event.incident.events == events and event.cause not in ("clip", "review"))


def _verdict(text: str, *more: str) -> str:
    if text not in (*VERDICTS, *more):
        allowed = ", ".join(each for each in (*VERDICTS, *more) if each)
        raise ConfigError(f"verdict is {text[:LONGEST_NAME]!r}; it is one of {allowed}, or empty")
    return text


def _name(text: str, what: str) -> str:
    """Validate a name; raises ``ConfigError`` when too long or not a single line."""
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ConfigError(f"{what} must be one line of at most {LONGEST_NAME} characters")
    return text
