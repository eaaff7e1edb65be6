"""gRPC ``Incidents`` service: list, acknowledge, mute and follow incidents, and inspect the outbox."""

import math
import time
from collections.abc import Sequence
from typing import TypeAlias, cast

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2 as pb
from sightline.v1 import incidents_pb2_grpc

from cluster.alerts.dispatcher import Outbox, SinkStatus
from cluster.alerts.incident import UNREVIEWED, VERDICTS, AlertEvent, IncidentQuery, Mute, Verdict, unknown_incident
from cluster.alerts.service import AlertService
from cluster.alerts.timeline_store import CameraTimeline, ScoreBin, StateChange
from cluster.errors import ConfigError
from cluster.security.roles import EVERY, in_scope
from cluster.wire.mapping import from_message, to_message


def mutes_from_proto(message: pb.ListMutesResponse) -> list[Mute]:
    """The active mutes."""
    return [from_message(Mute, mute) for mute in message.mutes]


def outbox_from_proto(message: pb.OutboxStatus) -> Outbox:
    """Status of the sinks and the disk."""
    return from_message(Outbox, message, sinks={each.name: from_message(SinkStatus, each) for each in message.sinks})


_COLUMNS = ("at_s", "highest", "level", "windows", "positives")


def timeline_from_proto(message: pb.TimelineReply) -> CameraTimeline:
    """One camera's timeline; scores have been rounded to 32-bit floats."""
    scores = {
        each.question: [ScoreBin(*row) for row in zip(*(getattr(each, name) for name in _COLUMNS), strict=True)]
        for each in message.questions
    }
    return CameraTimeline(scores, [from_message(StateChange, each) for each in message.states], message.cooldown_s)


MOST_LISTED = 1000
LISTED = 100
LONGEST_NAME = 256
LONGEST_MUTE_S = 366 * 86_400.0

Context: TypeAlias = grpc.aio.ServicerContext


class IncidentsServicer(incidents_pb2_grpc.IncidentsServicer):
    """Servicer over ``AlertService``. Calls are documented in protos/sightline/v1/incidents.proto."""

    def __init__(self, service: AlertService) -> None:
        self._service = service

    async def List(self, request: pb.ListIncidentsRequest, _context: Context) -> pb.ListIncidentsResponse:
        scope = request.scope or EVERY
        last = (await self._service.incident(request.before)).incident if request.before else None
        if last is not None and not in_scope(last.camera, scope):
            raise unknown_incident(request.before)
        query = IncidentQuery(
            camera=request.camera,
            subject=request.subject,
            only_open=request.only_open,
            since_s=max(request.since_s, time.time() - request.within_s if request.within_s else 0.0),
            before=(math.inf, "") if last is None else (last.opened_s, last.id),
            verdict=_verdict(request.verdict, UNREVIEWED),
            limit=min(request.limit or LISTED, MOST_LISTED),
            scope=scope,
        )
        found = await self._service.incidents(query)
        return pb.ListIncidentsResponse(incidents=[to_message(pb.Incident, each) for each in found])

    async def Get(self, request: pb.GetIncidentRequest, _context: Context) -> pb.IncidentDetail:
        return to_message(pb.IncidentDetail, await self._service.incident(request.id))

    async def Acknowledge(self, request: pb.AcknowledgeRequest, _context: Context) -> pb.Incident:
        return to_message(pb.Incident, await self._service.acknowledge(request.id, _name(request.by, "by")))

    async def Review(self, request: pb.ReviewRequest, _context: Context) -> pb.Incident:
        verdict = cast(Verdict, _verdict(request.verdict))
        return to_message(pb.Incident, await self._service.review(request.id, verdict, _name(request.by, "by")))

    async def Timeline(self, request: pb.TimelineRequest, _context: Context) -> pb.TimelineReply:
        until_s = request.until_s or time.time() + 1
        found = await self._service.timelines.read(request.camera, request.since_s, until_s)
        questions = [
            pb.QuestionScores(question=question, **{name: [getattr(each, name) for each in bins] for name in _COLUMNS})
            for question, bins in found.scores.items()
        ]
        states = [to_message(pb.CameraStateChange, each) for each in found.states]
        return pb.TimelineReply(questions=questions, states=states, cooldown_s=self._service.cooldown_s)

    async def Mute(self, request: pb.MuteRequest, _context: Context) -> pb.ListMutesResponse:
        if not 0 < request.for_s <= LONGEST_MUTE_S:
            raise ConfigError(f"for_s must be above 0 and at most a year, not {request.for_s:g}")
        camera, subject = _name(request.camera, "camera"), _name(request.subject, "subject")
        return _mutes(await self._service.mute(camera, subject, request.for_s, _name(request.by, "by")))

    async def Unmute(self, request: pb.UnmuteRequest, _context: Context) -> pb.ListMutesResponse:
        return _mutes(await self._service.unmute(request.camera, request.subject))

    async def ListMutes(self, _request: pb.ListMutesRequest, _context: Context) -> pb.ListMutesResponse:
        return _mutes(self._service.mutes())

    async def Follow(self, request: pb.FollowRequest, context: Context) -> None:
        wanted = set(request.cameras)
        with self._service.follow() as follower:
            # No await between subscribing and this list: incidents that open later arrive as new events.
            opened = self._service.open_incidents() if request.open else []
            await context.send_initial_metadata(())
            for incident in opened:
                if not wanted or incident.camera in wanted:
                    event = AlertEvent(f"{incident.id}-open", "update", incident.updated_s, incident, incident.muted)
                    await context.write(to_message(pb.IncidentEvent, event))
            reported = {incident.id: incident.events for incident in opened}
            lost = 0
            async for event, missed in follower:
                lost += missed
                if _is_reported(event, reported.get(event.incident.id, 0)):
                    continue
                if not wanted or event.incident.camera in wanted:
                    await context.write(to_message(pb.IncidentEvent, event, missed=lost))
                    lost = 0

    async def Outbox(self, request: pb.OutboxRequest, _context: Context) -> pb.OutboxStatus:
        found = await self._service.outbox(min(request.dead, MOST_LISTED), request.scope or EVERY)
        sinks = [to_message(pb.SinkStatus, lane, name=name) for name, lane in found.sinks.items()]
        return to_message(pb.OutboxStatus, found, sinks=sinks)

    async def Resend(self, request: pb.ResendRequest, _context: Context) -> pb.ResendResponse:
        if request.sink:
            self._service.routes.check(request.sink)
        count = await self._service.resend(request.sink, request.key, request.scope or EVERY)
        return pb.ResendResponse(count=count)

    async def TestSink(self, request: pb.TestSinkRequest, _context: Context) -> pb.TestSinkResponse:
        await self._service.routes.test(request.sink)
        return pb.TestSinkResponse()


def _mutes(mutes: Sequence[Mute]) -> pb.ListMutesResponse:
    return pb.ListMutesResponse(mutes=[to_message(pb.Mute, each) for each in mutes])


def _is_reported(event: AlertEvent, events: int) -> bool:
    """Whether an incident reported with its first ``events`` events already reflects this event."""
    return event.incident.events < events or (event.incident.events == events and event.cause not in ("clip", "review"))


def _verdict(text: str, *more: str) -> str:
    if text not in (*VERDICTS, *more):
        allowed = ", ".join(each for each in (*VERDICTS, *more) if each)
        raise ConfigError(f"verdict is {text[:LONGEST_NAME]!r}; it must be {allowed}, or empty")
    return text


def _name(text: str, what: str) -> str:
    """Validate a name. Raises ``ConfigError``: it is too long or not a single line."""
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ConfigError(f"{what} must be one line of at most {LONGEST_NAME} characters")
    return text
