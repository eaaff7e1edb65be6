"""Incidents over HTTP: list, acknowledge, review, mute; status and tests of sinks."""

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
    """``by``: who acknowledges it; overridden by the token's name."""

    by: Text = Field(default="", max_length=256)


class Review(Body):
    """``by``: who reviewed it; overridden by the token's name."""

    verdict: Literal["confirmed", "rejected", ""] = Field(description="Empty withdraws the verdict.")
    by: Text = Field(default="", max_length=256)


class MuteFor(Body):
    """A mute; empty ``camera`` or ``subject``: all."""

    camera: Text = ""
    subject: Text = ""
    for_s: float = Field(gt=0, le=LONGEST_MUTE_S, description="Duration in seconds.")
    by: Text = ""


class SinkTest(Body):
    """An empty object."""


OfCamera = Annotated[str, Query(description="Only of this camera.")]
OfSubject = Annotated[str, Query(description="Only of this question or health condition.")]
OnlyOpen = Annotated[Flag, Query(alias="open", description="1: only open ones.")]
Since = Annotated[Number, Query(description="Only those opened at or after this Unix time.")]
Before = Annotated[str, Query(description="Id of the last incident of the previous page.")]
Reviewed = Annotated[str, Query(description="Only `confirmed`, `rejected` or `unreviewed` ones.")]
Limit = Annotated[Count, Query(description="Maximum number; default 100, at most 1000.")]
Muted = Annotated[str, Query(description="As listed; default: `*`.")]
Dead = Annotated[Count, Query(description="Number of dead letters to list.")]


@router.on("GET /v1/incidents", f"{SERVICE}List", Incidents, errors=(404,))
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
    """Acknowledge an incident."""
    asked = incidents_pb2.AcknowledgeRequest(id=id, by=body.by)
    return Reply(from_message(Incident, await gateway.calls.unary(f"{SERVICE}Acknowledge", asked)))


@router.on("POST /v1/incidents/{id}/review", f"{SERVICE}Review", Incident, errors=(404,))
async def review(id: str, body: Review, gateway: Gateway) -> Reply:
    """Confirm or reject an incident. Thresholds are calibrated with these verdicts."""
    asked = incidents_pb2.ReviewRequest(id=id, verdict=body.verdict, by=body.by)
    return Reply(from_message(Incident, await gateway.calls.unary(f"{SERVICE}Review", asked)))


@router.on("GET /v1/mutes", f"{SERVICE}ListMutes", Mutes)
async def list_mutes(gateway: Gateway) -> Reply:
    """Active mutes."""
    return await _mutes(gateway, "ListMutes", incidents_pb2.ListMutesRequest())


@router.on("POST /v1/mutes", f"{SERVICE}Mute", Mutes)
async def mute(body: MuteFor, gateway: Gateway) -> Reply:
    """Suppress alerts of a camera or subject for some time; returns the active mutes."""
    return await _mutes(gateway, "Mute", incidents_pb2.MuteRequest(**body.model_dump()))


@router.on("DELETE /v1/mutes", f"{SERVICE}Unmute", Mutes)
async def unmute(gateway: Gateway, camera: Muted = "*", subject: Muted = "*") -> Reply:
    """Remove one mute; idempotent. Returns the active mutes."""
    return await _mutes(gateway, "Unmute", incidents_pb2.UnmuteRequest(camera=camera, subject=subject))


async def _mutes(gateway: Gateway, method: str, asked: Any) -> Reply:
    return Reply({"mutes": mutes_from_proto(await gateway.calls.unary(f"{SERVICE}{method}", asked))})


@router.on("GET /v1/outbox", f"{SERVICE}Outbox", Outbox)
async def outbox(gateway: Gateway, dead: Dead = 0) -> Reply:
    """Status of the sinks and the disk."""
    asked = incidents_pb2.OutboxRequest(dead=min(dead, MOST_LISTED))
    return Reply(outbox_from_proto(await gateway.calls.unary(f"{SERVICE}Outbox", asked)))


@router.on("POST /v1/sinks/{name}/test", f"{SERVICE}TestSink", Nothing, errors=(404,))
async def test_sink(name: str, body: SinkTest, gateway: Gateway) -> Reply:  # noqa: ARG001
    """Send a test incident to one sink."""
    await gateway.calls.unary(f"{SERVICE}TestSink", incidents_pb2.TestSinkRequest(sink=name))
    return Reply({})
