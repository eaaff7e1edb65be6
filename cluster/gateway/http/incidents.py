"""Incidents over HTTP: the timeline, acknowledging, muting, and how the sinks are doing."""

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field
from sightline.v1 import incidents_pb2

from cluster.alerts.dispatcher import Outbox
from cluster.alerts.grpc_service import LONGEST_MUTE_S, MOST_LISTED, mutes_from_proto, outbox_from_proto
from cluster.alerts.incident import Incident, IncidentDetail
from cluster.gateway.http.forms import Incidents, Mutes, Nothing
from cluster.gateway.http.replies import Reply
from cluster.gateway.http.routes import Body, Count, Flag, Gateway, Number, Routes, Text
from cluster.wire.mapping import from_message

SERVICE = "/sightline.v1.Incidents/"
router = Routes()


class Acknowledge(Body):
    """``by``: who has seen to it; a token's own name counts more."""

    by: Text = Field(default="", max_length=256)


class Review(Body):
    """``by``: who says it; a token's own name counts more."""

    verdict: Literal["confirmed", "rejected", ""] = Field(description="Empty takes back what was said.")
    by: Text = Field(default="", max_length=256)


class MuteFor(Body):
    """What is muted for how long; empty names stand for all."""

    camera: Text = ""
    subject: Text = ""
    for_s: float = Field(gt=0, le=LONGEST_MUTE_S, description="Seconds from now on.")
    by: Text = ""


class SinkTest(Body):
    """Nothing more needs to be said."""


OfCamera = Annotated[str, Query(description="Of this camera only.")]
OfSubject = Annotated[str, Query(description="Of this question or state of health only.")]
OnlyOpen = Annotated[Flag, Query(alias="open", description="1: only those that go on.")]
Since = Annotated[Number, Query(description="Opened after this Unix time.")]
Before = Annotated[str, Query(description="Only those that follow this incident in the list: the next page.")]
Reviewed = Annotated[str, Query(description="Only `confirmed`, `rejected` or `unreviewed` ones.")]
Limit = Annotated[Count, Query(description="At most so many; 100 unless given, 1000 at most.")]
Dead = Annotated[Count, Query(description="How many dead letters to list.")]


@router.on("GET /v1/incidents", f"{SERVICE}List", Incidents)
async def list_incidents(
    gateway: Gateway,
    camera: OfCamera = "",
    subject: OfSubject = "",
    only_open: OnlyOpen = False,
    since_s: Since = 0.0,
    before: Before = "",
    verdict: Reviewed = "",
    limit: Limit = 0,
) -> Reply:
    """Incidents, newest first."""
    asked = incidents_pb2.ListIncidentsRequest(
        camera=camera,
        subject=subject,
        only_open=only_open,
        since_s=since_s,
        before=before,
        verdict=verdict,
        limit=min(limit, MOST_LISTED),
    )
    found = await gateway.calls.unary(f"{SERVICE}List", asked)
    return Reply({"incidents": [from_message(Incident, each) for each in found.incidents]})


@router.on("GET /v1/incidents/{id}", f"{SERVICE}Get", IncidentDetail, errors=(404,))
async def get_incident(id: str, gateway: Gateway) -> Reply:
    """One incident with its events."""
    found = await gateway.calls.unary(f"{SERVICE}Get", incidents_pb2.GetIncidentRequest(id=id))
    return Reply(from_message(IncidentDetail, found))


@router.on("POST /v1/incidents/{id}/acknowledge", f"{SERVICE}Acknowledge", Incident, errors=(404, 409))
async def acknowledge(id: str, body: Acknowledge, gateway: Gateway) -> Reply:
    """Somebody sees to it."""
    asked = incidents_pb2.AcknowledgeRequest(id=id, by=body.by)
    return Reply(from_message(Incident, await gateway.calls.unary(f"{SERVICE}Acknowledge", asked)))


@router.on("POST /v1/incidents/{id}/review", f"{SERVICE}Review", Incident, errors=(404,))
async def review(id: str, body: Review, gateway: Gateway) -> Reply:
    """Confirm or reject it: what the camera's thresholds are calibrated by."""
    asked = incidents_pb2.ReviewRequest(id=id, verdict=body.verdict, by=body.by)
    return Reply(from_message(Incident, await gateway.calls.unary(f"{SERVICE}Review", asked)))


@router.on("GET /v1/mutes", f"{SERVICE}ListMutes", Mutes)
async def list_mutes(gateway: Gateway) -> Reply:
    """Mutes that hold."""
    return await _mutes(gateway, "ListMutes", incidents_pb2.ListMutesRequest())


@router.on("POST /v1/mutes", f"{SERVICE}Mute", Mutes)
async def mute(body: MuteFor, gateway: Gateway) -> Reply:
    """Tell nothing of a camera or subject for a time."""
    return await _mutes(gateway, "Mute", incidents_pb2.MuteRequest(**body.model_dump()))


@router.on("DELETE /v1/mutes", f"{SERVICE}Unmute", Mutes)
async def unmute(gateway: Gateway, camera: OfCamera = "", subject: OfSubject = "") -> Reply:
    """End a mute, named as it is listed; where there is none, nothing changes. Mutes that hold."""
    return await _mutes(gateway, "Unmute", incidents_pb2.UnmuteRequest(camera=camera, subject=subject))


async def _mutes(gateway: Gateway, method: str, asked: Any) -> Reply:
    return Reply({"mutes": mutes_from_proto(await gateway.calls.unary(f"{SERVICE}{method}", asked))})


@router.on("GET /v1/outbox", f"{SERVICE}Outbox", Outbox)
async def outbox(gateway: Gateway, dead: Dead = 0) -> Reply:
    """How sinks and disk are doing."""
    asked = incidents_pb2.OutboxRequest(dead=min(dead, MOST_LISTED))
    return Reply(outbox_from_proto(await gateway.calls.unary(f"{SERVICE}Outbox", asked)))


@router.on("POST /v1/sinks/{name}/test", f"{SERVICE}TestSink", Nothing, errors=(404,))
async def test_sink(name: str, body: SinkTest, gateway: Gateway) -> Reply:  # noqa: ARG001
    """Send a made-up incident to one sink, now."""
    await gateway.calls.unary(f"{SERVICE}TestSink", incidents_pb2.TestSinkRequest(sink=name))
    return Reply({})
