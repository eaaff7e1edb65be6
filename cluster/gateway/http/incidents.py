"""Incidents over HTTP: the timeline, acknowledging, muting, and how the sinks are doing."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import Field
from sightline.v1 import incidents_pb2

from cluster.alerts.grpc_service import detail_from_proto, incident_from_proto, mutes_from_proto, outbox_from_proto
from cluster.alerts.incident import Incident
from cluster.alerts.service import Detail
from cluster.gateway.http.body import Body, flag, number, read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.cameras import text
from cluster.gateway.http.forms import Incidents, Mutes, OutboxStatus, Query, Route
from cluster.gateway.http.replies import plain, reply

SERVICE = "/sightline.v1.Incidents/"
MOST_DEAD = 1000
YEAR_S = 366 * 86_400


class Acknowledge(Body):
    """``by``: who has seen to it; a token's own name counts more."""

    by: str = Field(default="", max_length=256)


class MuteFor(Body):
    """What is muted for how long; empty names stand for all."""

    camera: str = ""
    subject: str = ""
    for_s: float = Field(gt=0, le=YEAR_S, description="Seconds from now on.")
    by: str = ""


class IncidentRoutes:
    """See :meth:`routes`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def routes(self) -> list[Route]:
        query = (
            Query("camera", "Of this camera only."),
            Query("subject", "Of this question or state of health only."),
            Query("open", "1: only those that go on.", "integer"),
            Query("since_s", "Opened after this Unix time.", "number"),
            Query("limit", "At most so many; 100 unless given, 1000 at most.", "integer"),
        )
        dead = (Query("dead", "How many dead letters to list.", "integer"),)
        one, mutes = "/v1/incidents/{id}", "/v1/mutes"
        return [
            Route(
                "GET", "/v1/incidents", f"{SERVICE}List", self.list, "Incidents, newest first.", Incidents, query=query
            ),
            Route("GET", one, f"{SERVICE}Get", self.get, "One incident with its events.", Detail, errors=(404,)),
            Route(
                "POST",
                f"{one}/acknowledge",
                f"{SERVICE}Acknowledge",
                self.acknowledge,
                "Somebody sees to it.",
                Incident,
                body=Acknowledge,
                errors=(404, 409),
            ),
            Route("GET", mutes, f"{SERVICE}ListMutes", self.mutes, "Mutes that hold.", Mutes),
            Route(
                "POST",
                mutes,
                f"{SERVICE}Mute",
                self.mute,
                "Tell nothing of a camera or subject for a time.",
                Mutes,
                body=MuteFor,
            ),
            Route(
                "DELETE",
                mutes,
                f"{SERVICE}Unmute",
                self.unmute,
                "End a mute, named as it is listed; where there is none, nothing changes. Mutes that hold.",
                Mutes,
                query=query[:2],
            ),
            Route(
                "GET",
                "/v1/outbox",
                f"{SERVICE}Outbox",
                self.outbox,
                "How sinks and disk are doing.",
                OutboxStatus,
                query=dead,
            ),
        ]

    async def list(self, request: web.Request) -> web.Response:
        found = await self._calls.unary(
            f"{SERVICE}List",
            incidents_pb2.ListIncidentsRequest(
                camera=text(request.query.get("camera", ""), "camera"),
                subject=text(request.query.get("subject", ""), "subject"),
                only_open=flag(request, "open"),
                since_s=number(request, "since_s"),
                limit=int(min(number(request, "limit"), 1000)),
            ),
        )
        return reply({"incidents": [plain(incident_from_proto(each)) for each in found.incidents]})

    async def get(self, request: web.Request) -> web.Response:
        asked = incidents_pb2.GetIncidentRequest(id=_id(request))
        return reply(plain(detail_from_proto(await self._calls.unary(f"{SERVICE}Get", asked))))

    async def acknowledge(self, request: web.Request) -> web.Response:
        body = await read(request, Acknowledge)
        asked = incidents_pb2.AcknowledgeRequest(id=_id(request), by=text(body.by, "by"))
        return reply(plain(incident_from_proto(await self._calls.unary(f"{SERVICE}Acknowledge", asked))))

    async def mutes(self, _request: web.Request) -> web.Response:
        return self._muted(await self._calls.unary(f"{SERVICE}ListMutes", incidents_pb2.ListMutesRequest()))

    async def mute(self, request: web.Request) -> web.Response:
        body = await read(request, MuteFor)
        asked = incidents_pb2.MuteRequest(
            camera=text(body.camera, "camera"),
            subject=text(body.subject, "subject"),
            for_s=body.for_s,
            by=text(body.by, "by"),
        )
        return self._muted(await self._calls.unary(f"{SERVICE}Mute", asked))

    async def unmute(self, request: web.Request) -> web.Response:
        camera, subject = (text(request.query.get(key, ""), key) for key in ("camera", "subject"))
        asked = incidents_pb2.UnmuteRequest(camera=camera, subject=subject)
        return self._muted(await self._calls.unary(f"{SERVICE}Unmute", asked))

    async def outbox(self, request: web.Request) -> web.Response:
        asked = incidents_pb2.OutboxRequest(dead=int(min(number(request, "dead"), MOST_DEAD)))
        outbox = outbox_from_proto(await self._calls.unary(f"{SERVICE}Outbox", asked))
        sinks = {name: {"kind": kind, **plain(lane)} for name, (kind, lane) in outbox.sinks.items()}
        return reply({**plain(outbox), "sinks": sinks})

    @staticmethod
    def _muted(found: Any) -> web.Response:
        return reply({"mutes": plain(mutes_from_proto(found))})


def _id(request: web.Request) -> str:
    return text(request.match_info["id"], "the incident's id")
