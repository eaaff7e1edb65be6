"""``Incidents``: the service over the wire, through the gateway's proxy, and who may see and do what."""

import asyncio
import json
import threading
import time
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from rpc_serving import serving
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from actors.cli import main
from cluster.alerts.grpc_service import IncidentsServicer, timeline_from_proto
from cluster.alerts.service import AlertService
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.errors import (
    ConfigError,
    NotFoundError,
    NotReadyError,
    SightlineError,
    UnauthenticatedError,
    UnavailableError,
)
from cluster.gateway.guard import Guard
from cluster.gateway.incidents_proxy import IncidentsProxy
from cluster.security.audit import AuditLog
from cluster.security.roles import RULES, Principal, Role
from cluster.wire.channel import ChannelPool, open_channel

WHO = {
    "agent": Principal("agent", frozenset({Role.INGEST})),
    "viewer": Principal("viewer", frozenset({Role.VIEW}), ("gate",)),
    "guard": Principal("guard", frozenset({Role.ASK}), ("gate",)),
    "boss": Principal("boss", frozenset({Role.ADMIN})),
    "blind": Principal("blind", frozenset({Role.ADMIN}), ()),
}


def verify(secret):
    if secret not in WHO:
        raise UnauthenticatedError("unknown token")
    return WHO[secret]


def configuration():
    return load_config(
        None,
        {
            "alerts": {"cooldown_s": 0, "consecutive": 1, "sinks": [{"name": "log", "kind": "log"}]},
            "cameras": [{"name": "gate"}, {"name": "yard"}],
            "questions": [{"id": "person", "text": "?"}],
        },
    )


@asynccontextmanager
async def gateway(tmp_path, guard=None):
    """(the service, the address of the gateway in front of it)."""
    service = AlertService(configuration(), tmp_path)
    await service.start()
    async with serving(IncidentsServicer(service)) as behind:

        async def route():
            return behind

        async with serving(IncidentsProxy(route, ChannelPool()), guard=guard) as address:
            yield service, address
    await service.stop()


def open_both(service, make):
    for camera in ("gate", "yard"):
        service.accept_answer(make.answer(0, stream=camera))


async def in_thread(call, *arguments, **options):
    return await asyncio.to_thread(call, *arguments, **options)


async def test_everything_a_person_does(tmp_path, make, until):
    async with gateway(tmp_path) as (service, address):
        open_both(service, make)
        await until(lambda: service._dispatcher.status()["log"].delivered == 2)
        await until(lambda: not service._settled)
        with GatewayClient(address) as client:
            found = await in_thread(client.incidents)
            assert {each.camera for each in found} == {"gate", "yard"}
            assert [each.camera for each in await in_thread(client.incidents, camera="gate", limit=5)] == ["gate"]
            assert await in_thread(client.incidents, before=found[0].id) == found[1:]
            assert await in_thread(client.incidents, before=found[1].id) == []
            gate = next(each for each in found if each.camera == "gate")
            detail = await in_thread(client.incident, gate.id)
            assert [(each.sink, each.state) for each in detail.deliveries] == [("log", "delivered")]
            assert detail.events[0].incident.id == gate.id
            assert (await in_thread(client.acknowledge, gate.id, "ann")).acknowledged_by == "ann"
            with pytest.raises(SightlineError, match="verdict is 'maybe'; it must be confirmed, rejected, or empty"):
                await in_thread(client.review, gate.id, "maybe", "ann")
            said = await in_thread(client.review, gate.id, "confirmed", "ann")
            assert (said.verdict, said.reviewed_by) == ("confirmed", "ann")
            [listed] = await in_thread(lambda: client.incidents(verdict="confirmed"))
            assert listed == said
            [mute] = await in_thread(client.mute, "gate", "", 60.0, "ann")
            assert (mute.camera, mute.subject, mute.by) == ("gate", "*", "ann")
            assert await in_thread(client.mutes) == [mute]
            for _ in range(2):
                assert await in_thread(client.unmute, "gate", "") == [], "once more is no error"
            outbox = await in_thread(client.outbox, 5)
            assert outbox.sinks["log"].kind == "log"
            assert outbox.sinks["log"].delivered >= 2
            assert await in_thread(client.resend) == 0
            with pytest.raises(NotFoundError, match="there is no sink 'lgo'; there are: log"):
                await in_thread(client.resend, "lgo")


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
async def test_the_last_minutes_are_those_of_alertings_clock(tmp_path, make, monkeypatch, capsys, ahead_s):
    """That of the machine at which somebody asks may be ten minutes off."""
    there = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
    for module in "wall_clock", "grpc_service":
        monkeypatch.setattr(f"cluster.alerts.{module}.time", there)
    async with gateway(tmp_path) as (service, address):
        for camera, waited_s in ("gate", 400.0), ("yard", 200.0):
            monkeypatch.setattr(there, "time", lambda waited_s=waited_s: time.time() + ahead_s - waited_s)
            service.accept_answer(make.answer(0, stream=camera))
        monkeypatch.setattr(there, "time", lambda: time.time() + ahead_s)
        command = ["incidents", "list", "--since", "5m", "--json", "-", "--gateway", address]
        assert await in_thread(main, command) == 0
    assert [each["camera"] for each in json.loads(capsys.readouterr().out)] == ["yard"]


@pytest.mark.parametrize("hung", [False, True])
async def test_what_is_only_in_memory_is_seen_and_acknowledged(tmp_path, make, hung, monkeypatch):
    """The database takes no writes, or answers nothing at all."""
    async with gateway(tmp_path) as (service, address):
        answers = threading.Event()
        journal = service._journal
        monkeypatch.setattr(journal, "_deadline_s", 0.2)
        if hung:
            journal._thread.submit(answers.wait, 60.0)
        else:
            await journal.read(lambda store: store._db.execute("PRAGMA query_only = 1").fetchall())
        open_both(service, make)
        for window in (1, 2):
            service.accept_answer(replace(make.answer(window, stream="yard"), score=0.0, positive=False))
        await service._flush()
        assert journal.trouble
        with ExitStack() as stack:
            stack.callback(answers.set)
            client = stack.enter_context(GatewayClient(address))
            found = {each.camera: each for each in await in_thread(client.incidents)}
            assert {camera: each.open for camera, each in found.items()} == {"gate": True, "yard": False}
            for each in found.values():
                assert (await in_thread(client.incident, each.id)).incident == each
                assert (await in_thread(client.review, each.id, "confirmed", "ann")).verdict == "confirmed"
            gate, yard = found["gate"].id, found["yard"].id
            assert (await in_thread(client.acknowledge, gate, "ann")).acknowledged_by == "ann"
            assert (await in_thread(client.incident, gate)).incident.acknowledged_by == "ann"
            with pytest.raises(UnavailableError if hung else SightlineError):
                await in_thread(client.incident, "nothing")
            # What is to be erased is not shown any more.
            with pytest.raises(UnavailableError):
                await service.erase_camera("yard")
            assert [each.id for each in await in_thread(client.incidents)] == [gate]
            with pytest.raises(SightlineError, match="there is no incident"):
                await in_thread(client.incident, yard)


async def test_following(tmp_path, make, until):
    async with gateway(tmp_path) as (service, address), open_channel(address) as channel:
        service.accept_answer(make.answer(0))
        call = incidents_pb2_grpc.IncidentsStub(channel).Follow(
            incidents_pb2.FollowRequest(cameras=["gate"], open=True)
        )
        first = await call.read()
        assert (first.incident.camera, first.incident.windows) == ("gate", 1)
        service.accept_answer(make.answer(0, stream="yard"))
        await service.acknowledge(first.incident.id, "ann")
        second = await call.read()
        assert (second.event, second.incident.acknowledged_by, second.incident.camera) == ("update", "ann", "gate")
        assert second.cause == "acknowledged"
        await service.set_clip_state(first.incident.id, "none", "no clip: the disk is full")
        third = await call.read()
        assert (third.event, third.cause, third.incident.clip) == ("update", "clip", "none")
        assert third.incident.footage_note == "no clip: the disk is full"
        call.cancel()
        await until(lambda: not service._feed._subscriptions)


async def test_what_is_open_is_told_once_whatever_is_still_on_its_way(tmp_path, make):
    """Events that are not written yet come after it, and would take back what it said."""
    async with gateway(tmp_path) as (service, address), open_channel(address) as channel:
        async with service._flushing:
            service.accept_answer(make.answer(0))
            [incident] = service.open_incidents()
            seeing_to_it = asyncio.create_task(service.acknowledge(incident.id, "ann"))
            settling = asyncio.create_task(service.set_clip_state(incident.id, "whole", ""))
            request = incidents_pb2.FollowRequest(open=True)
            call = incidents_pb2_grpc.IncidentsStub(channel).Follow(request)
            first = await call.read()
        await asyncio.gather(seeing_to_it, settling)
        second = await call.read()
        call.cancel()
    assert [(each.key, each.cause) for each in (first, second)] == [
        (f"{incident.id}-open", ""),
        (f"{incident.id}-clip", "clip"),
    ]
    assert first.incident == second.incident
    assert (first.incident.acknowledged_by, first.incident.clip) == ("ann", "whole")


class Lossy(incidents_pb2_grpc.IncidentsServicer):
    """Events of two cameras; some were lost before the one that not everybody may see."""

    async def Follow(self, request, context):
        for number, (camera, missed) in enumerate((("gate", 0), ("yard", 3), ("gate", 1))):
            incident = incidents_pb2.Incident(id=str(number), camera=camera)
            await context.write(incidents_pb2.IncidentEvent(key=str(number), incident=incident, missed=missed))


async def test_what_was_missed_is_told_with_the_next_event_that_may_be_seen():
    async with serving(Lossy()) as behind:

        async def route():
            return behind

        async with (
            serving(IncidentsProxy(route, ChannelPool()), guard=Guard(verify)) as address,
            open_channel(address) as channel,
        ):
            call = incidents_pb2_grpc.IncidentsStub(channel).Follow(incidents_pb2.FollowRequest(), **calls("viewer"))
            assert [(event.key, event.missed) async for event in call] == [("0", 0), ("2", 4)]


async def test_a_follower_that_does_not_read_is_told_what_it_missed(make):
    from cluster.alerts.incident import AlertEvent, Incident
    from cluster.wire.answers import FanOut

    incident = Incident("i", "gate", "question", "person", "info", 0, 1, 0.5, 1, 0.0, 0.0)
    feed = FanOut(lambda event: event.incident.camera, limit=3)
    with feed.subscribe() as follower:
        feed.publish(AlertEvent(str(number), "update", 0.0, incident) for number in range(10))
        got = [await anext(follower) for _ in range(3)]
        assert [(event.key, missed) for event, missed in got] == [("7", 7), ("8", 0), ("9", 0)]
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(follower)


@pytest.mark.parametrize(
    ("ask", "error", "sentence"),
    [
        (lambda client: client.incident("nothing"), SightlineError, "there is no incident 'nothing'"),
        (lambda client: client.acknowledge("nothing", "ann"), SightlineError, "there is no incident 'nothing'"),
        (lambda client: client.mute("gate", "", -1.0, ""), ConfigError, "for_s must be above 0"),
        (lambda client: client.mute("gate", "", float("nan"), ""), ConfigError, "for_s must be above 0"),
        (lambda client: client.mute("g" * 300, "", 1.0, ""), ConfigError, "camera must be one line"),
        (lambda client: client.mute("gate", "", 1.0, "a\nb"), ConfigError, "by must be one line"),
    ],
)
async def test_what_is_refused(tmp_path, ask, error, sentence):
    async with gateway(tmp_path) as (_, address):
        with GatewayClient(address) as client, pytest.raises(error, match=sentence):
            await in_thread(ask, client)


async def test_without_alerting_the_gateway_says_so():
    async def nowhere():
        raise NotReadyError("this cluster makes no incidents; alerts.enabled is off")

    async def gone():
        return "127.0.0.1:9"

    for route, kind, sentence in (
        (nowhere, NotReadyError, "makes no incidents"),
        (gone, UnavailableError, "alerting does not answer; try again"),
    ):
        async with serving(IncidentsProxy(route, ChannelPool())) as address:
            with GatewayClient(address) as client, pytest.raises(kind, match=sentence):
                await in_thread(client.incidents)


def calls(who):
    return {"metadata": (("authorization", f"Bearer {who}"),)}


BOSSES = {"boss", "blind"}
GUARDS = BOSSES | {"guard"}
VIEWERS = GUARDS | {"viewer"}
REFUSED, HIDDEN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND
MATRIX = {
    # method -> (makes the request for a camera and its incident, who may, what a camera out of scope gets)
    "List": (lambda camera, _: incidents_pb2.ListIncidentsRequest(camera=camera), VIEWERS, None),
    "Get": (lambda _, incident: incidents_pb2.GetIncidentRequest(id=incident), VIEWERS, HIDDEN),
    "Acknowledge": (lambda _, incident: incidents_pb2.AcknowledgeRequest(id=incident), GUARDS, HIDDEN),
    "Review": (
        lambda _, incident: incidents_pb2.ReviewRequest(id=incident, verdict="confirmed"),
        GUARDS,
        HIDDEN,
    ),
    "Timeline": (lambda camera, _: incidents_pb2.TimelineRequest(camera=camera), VIEWERS, REFUSED),
    "Mute": (lambda camera, _: incidents_pb2.MuteRequest(camera=camera, for_s=60), GUARDS, REFUSED),
    "Unmute": (lambda camera, _: incidents_pb2.UnmuteRequest(camera=camera), GUARDS, REFUSED),
    "ListMutes": (lambda *_: incidents_pb2.ListMutesRequest(), VIEWERS, None),
    "Outbox": (lambda *_: incidents_pb2.OutboxRequest(dead=5), VIEWERS, None),
    "Resend": (lambda *_: incidents_pb2.ResendRequest(), BOSSES, None),
    "TestSink": (lambda *_: incidents_pb2.TestSinkRequest(sink="log"), {"boss"}, None),
    "Follow": (lambda camera, _: incidents_pb2.FollowRequest(cameras=[camera], open=True), VIEWERS, REFUSED),
}


async def outcome(stub, method, request, who):
    call = getattr(stub, method)(request, **(calls(who) if who else {}))
    try:
        if method == "Follow":
            await call.read()
            call.cancel()
            return await call.code() if call.done() and not call.cancelled() else grpc.StatusCode.OK
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_call_times_every_role_and_scope(tmp_path, make):
    methods = {f"/sightline.v1.Incidents/{name}" for name in MATRIX}
    assert methods == {method for method in RULES if "Incidents" in method}
    wrong = []
    async with gateway(tmp_path, Guard(verify)) as (service, address), open_channel(address) as channel:
        stub = incidents_pb2_grpc.IncidentsStub(channel)
        open_both(service, make)
        incidents = {incident.camera: incident.id for incident in service.open_incidents()}
        for method, (request, may, elsewhere) in MATRIX.items():
            for who in (*WHO, "nobody", None):
                for camera, incident in incidents.items():
                    code = await outcome(stub, method, request(camera, incident), who)
                    if who not in WHO:
                        wanted = grpc.StatusCode.UNAUTHENTICATED
                    elif who not in may:
                        wanted = REFUSED
                    elif elsewhere is not None and not WHO[who].sees(camera):
                        wanted = elsewhere
                    else:
                        wanted = grpc.StatusCode.OK
                    if code is not wanted:
                        wrong.append((method, who, camera, code, wanted))
    assert not wrong


async def refusal(call, incident):
    """All that its caller gets to know, but for the id it sent itself."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details().replace(incident, "ID"), [*error.trailing_metadata()]
    pytest.fail("it was let through")


async def test_an_incident_that_a_token_is_not_for_is_answered_as_one_that_never_was(tmp_path, make):
    async with gateway(tmp_path, Guard(verify)) as (service, address), open_channel(address) as channel:
        stub = incidents_pb2_grpc.IncidentsStub(channel)
        open_both(service, make)
        await service._flush()
        yard = next(incident.id for incident in service.open_incidents() if incident.camera == "yard")
        for method, who in (("Get", "viewer"), ("Get", "guard"), ("Acknowledge", "guard"), ("Acknowledge", "viewer")):
            request = MATRIX[method][0]
            answers = [
                await refusal(getattr(stub, method)(request("yard", incident), **calls(who)), incident)
                for incident in (yard, "0" * 16)
            ]
            assert answers[0] == answers[1], (method, who)
        pages = [incidents_pb2.ListIncidentsRequest(before=incident) for incident in (yard, "0" * 16)]
        answers = [await refusal(stub.List(page, **calls("viewer")), page.before) for page in pages]
        assert answers[0] == answers[1]
        assert answers[0][0] is grpc.StatusCode.NOT_FOUND
        assert not service.open_incidents()[0].acknowledged_by


async def test_the_audit_log_tells_at_which_camera_and_what_came_to_nothing(tmp_path, make):
    """It said ``ok`` of what was refused, and named an incident that nobody knew any more once it was deleted."""
    guard = Guard(verify, audit=AuditLog(tmp_path / "audit.jsonl"))
    async with gateway(tmp_path, guard) as (service, address), open_channel(address) as channel:
        stub = incidents_pb2_grpc.IncidentsStub(channel)
        open_both(service, make)
        of = {incident.camera: incident.id for incident in service.open_incidents()}
        for camera, wanted in (("gate", grpc.StatusCode.OK), ("yard", HIDDEN)):
            request = incidents_pb2.AcknowledgeRequest(id=of[camera])
            assert await outcome(stub, "Acknowledge", request, "guard") is wanted
        assert await outcome(stub, "TestSink", incidents_pb2.TestSinkRequest(sink="nil"), "boss") is HIDDEN
    lines = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert [(line["who"], line["cameras"], line["outcome"], line["text"]) for line in lines] == [
        ("guard", ["gate"], "ok", of["gate"]),
        ("guard", [], "not_found", of["yard"]),
        ("boss", [], "ok", "nil"),
        ("boss", [], "not_found", "nil"),
    ]


async def test_what_a_token_is_not_for_is_not_shown(tmp_path, make):
    async with gateway(tmp_path, Guard(verify)) as (service, address), open_channel(address) as channel:
        stub = incidents_pb2_grpc.IncidentsStub(channel)
        open_both(service, make)
        await service.mute("yard", "", 60, "boss")
        everything = incidents_pb2.ListIncidentsRequest()
        assert len((await stub.List(everything, **calls("boss"))).incidents) == 2
        for who, seen in (("viewer", ["gate"]), ("blind", [])):
            for limit in (0, 1):
                asked = incidents_pb2.ListIncidentsRequest(limit=limit, scope=["*"])
                assert [each.camera for each in (await stub.List(asked, **calls(who))).incidents] == seen
        assert len((await stub.ListMutes(incidents_pb2.ListMutesRequest(), **calls("boss"))).mutes) == 1
        assert not (await stub.ListMutes(incidents_pb2.ListMutesRequest(), **calls("viewer"))).mutes
        everywhere = incidents_pb2.MuteRequest(for_s=60)
        assert await outcome(stub, "Mute", everywhere, "guard") is grpc.StatusCode.PERMISSION_DENIED
        by_camera = {incident.camera: incident.id for incident in service.open_incidents()}
        follow = stub.Follow(incidents_pb2.FollowRequest(open=True), **calls("viewer"))
        assert (await follow.read()).incident.camera == "gate"
        await service.acknowledge(by_camera["yard"], "boss")
        # Who acknowledges is who the token says, whatever the request does.
        says = incidents_pb2.ReviewRequest(id=by_camera["gate"], verdict="rejected", by="somebody else")
        assert (await stub.Review(says, **calls("guard"))).reviewed_by == "guard"
        assert (await follow.read()).incident.verdict == "rejected"
        mine = incidents_pb2.AcknowledgeRequest(id=by_camera["gate"], by="somebody else")
        assert (await stub.Acknowledge(mine, **calls("guard"))).acknowledged_by == "guard"
        assert (await follow.read()).incident.acknowledged_by == "guard"
        follow.cancel()


async def test_a_timeline_is_for_those_who_see_the_camera(tmp_path, make):
    async with gateway(tmp_path, Guard(verify)) as (service, address), open_channel(address) as channel:
        open_both(service, make)
        stub = incidents_pb2_grpc.IncidentsStub(channel)
        found = await stub.Timeline(incidents_pb2.TimelineRequest(camera="gate"), **calls("viewer"))
        [scores] = timeline_from_proto(found).scores.values()
        assert timeline_from_proto(found).cooldown_s == 0, "of the cluster's alerts"
        assert sum(each.windows for each in scores) >= 1
        other = incidents_pb2.TimelineRequest(camera="yard")
        assert await outcome(stub, "Timeline", other, "viewer") is grpc.StatusCode.PERMISSION_DENIED
        assert await outcome(stub, "Timeline", other, "boss") is grpc.StatusCode.OK
