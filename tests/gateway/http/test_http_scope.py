"""A token for one camera: nothing of another is in any reply, over gRPC or HTTP, whatever is asked."""

import asyncio
import contextlib
from urllib.parse import urlencode

import aiohttp
import grpc
import grpc.aio
import pytest
from fastapi import FastAPI, Request, Response
from gateway_parts import make_answer, serving
from http_parts import listening
from sightline.v1 import cameras_pb2, incidents_pb2, ingest_pb2, memory_pb2, pictures_pb2, replicas_pb2, results_pb2
from waiting import until_async

from cluster import metrics
from cluster.errors import ForbiddenError
from cluster.gateway.http.application import table
from cluster.security.roles import METRICS, RULES, SIGN_IN, Principal, Role

MINE, OTHER = "cam-000", "cam-001"
SECRET = "visitor"
"""A question of the other camera alone."""


@contextlib.asynccontextmanager
async def world(tmp_path, **options):
    """A gateway with tokens for the first of two cameras, both of which have everything that a camera can have."""
    async with serving(tmp_path, cameras=2, tokens=True, scopes=[MINE], **options) as served:
        metrics.camera_state.labels(MINE, "running").set(1)
        metrics.camera_state.labels(OTHER, "running").set(1)
        metrics.camera_score.labels(OTHER, SECRET).set(0.5)
        try:
            for window in (1, 2):
                publish(served, window)
            async with asyncio.timeout(30):
                while len(await served.alerts.incidents()) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await served.alerts.mute(OTHER, SECRET, 60.0, "ann")
            served.gateway._live.look()
            yield served, {incident.camera: incident.id for incident in await served.alerts.incidents()}
        finally:
            metrics.camera_score.remove(OTHER, SECRET)
            for camera in (MINE, OTHER):
                metrics.camera_state.remove(camera, "running")


def publish(served, window):
    served.publish([make_answer(MINE, "person", 0.9, window), make_answer(OTHER, "person", 0.9, window)])


def tells(data, incident=""):
    """Whether something is told of the other camera."""
    return OTHER.encode() in data or SECRET.encode() in data or bool(incident and incident.encode() in data)


BODIES = {
    "POST /v1/session": lambda camera, token: {"token": token},
    "POST /v1/cameras": lambda camera, token: {"name": camera, "source": "x"},
    "PUT /v1/cameras/{name}": lambda camera, token: {"source": "x"},
    "POST /v1/replicas/{name}/drain": lambda camera, token: {"undo": True},
    "POST /v1/incidents/{id}/acknowledge": lambda camera, token: {},
    "POST /v1/incidents/{id}/review": lambda camera, token: {"verdict": "confirmed"},
    "POST /v1/mutes": lambda camera, token: {"camera": camera, "subject": "person", "for_s": 60},
    "POST /v1/ask": lambda camera, token: {"camera": camera, "text": "Who?"},
    "POST /v1/ask/all": lambda camera, token: {"text": "Who?"},
    "POST /v1/forget": lambda camera, token: {"camera": camera, "before_s": 3600},
    "POST /v1/chat/completions": lambda camera, token: {
        "model": f"camera/{camera}",
        "messages": [{"role": "user", "content": "Who?"}],
    },
}


@pytest.mark.parametrize("role", [Role.VIEW, Role.ADMIN])
async def test_no_route_tells_of_another_camera(tmp_path, role):
    """Asked for its own camera, for all, and for the other: then the reply names it only as it was asked."""
    async with (
        world(tmp_path) as (served, incidents),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {served.secrets[role]}"}) as client,
    ):
        leaks, asked = [], set()
        for route in table():
            name = f"{route.method} {route.path}"
            if route.path in ("/", "/console/{path:path}"):
                continue
            for camera in (MINE, OTHER):
                served.world.cameras.setdefault(MINE, served.world._camera(MINE, 0))
                path = route.path.replace("{name}", "replica-0" if "replicas" in route.path else camera)
                path = path.replace("{id}", incidents[camera]).replace("{model:path}", f"camera/{camera}")
                given = {"camera": camera, "cameras": camera, "subject": "person", "dead": "100"}
                taken = {each.alias: given[each.alias] for each in route.dependant.query_params if each.alias in given}
                for query in ("", f"?{urlencode(taken)}"):
                    body = BODIES.get(name, lambda *_: None)(camera, served.secrets[role])
                    status, data = await fetched(served, client, route.method, served.url + path + query, body)
                    asked.add(route.rule)
                    if camera is OTHER and name not in ("GET /v1/me", "GET /v1/openapi.json"):
                        # What was asked for is no news.
                        data = data.replace(OTHER.encode(), b"", 1) if status in (403, 404) else data
                    if tells(data, incidents[OTHER] if camera is MINE else ""):
                        leaks.append((name, camera, query, status, data[:300]))
        assert not leaks
        assert {rule for rule in RULES if not rule.startswith("/")} - {SIGN_IN} <= asked


async def fetched(served, client, method, url, body):
    """What an endless reply tells is told soon, of things that happen meanwhile."""
    data = b""
    async with client.request(method, url, json=body) as reply:
        if "events" in url and reply.status == 200:
            await reply.content.readuntil(b"data: {}\n\n")
            served.gateway._live.look()
            publish(served, 9)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3 if reply.content_type == "text/event-stream" else 20.0):
                async for chunk in reply.content.iter_any():
                    data += chunk
        return reply.status, data


def test_a_scrape_without_a_camera_in_it_is_for_everybody():
    assert RULES[METRICS].role is Role.VIEW


async def test_metrics_hold_the_series_of_ones_own_cameras(tmp_path):
    """All of what is no camera's: a sum tells of no camera."""
    async with world(tmp_path) as (served, _):
        headers = {"Authorization": f"Bearer {served.secrets[Role.VIEW]}"}
        async with aiohttp.ClientSession(headers=headers) as client, client.get(served.url + "/metrics") as reply:
            text = await reply.text()
        assert f'sightline_camera_state{{camera="{MINE}",process="gateway",state="running"}} 1.0' in text
        assert OTHER not in text
        assert SECRET not in text
        assert "sightline_http_replies_total{" in text


CALLS = {
    "Cameras/List": lambda camera, incident: cameras_pb2.ListCamerasRequest(),
    "Cameras/Get": lambda camera, incident: cameras_pb2.GetCameraRequest(name=camera),
    "Cameras/Add": lambda camera, incident: cameras_pb2.AddCameraRequest(name=camera),
    "Cameras/Remove": lambda camera, incident: cameras_pb2.RemoveCameraRequest(name="cam-009"),
    "Cameras/Update": lambda camera, incident: cameras_pb2.UpdateCameraRequest(name=camera),
    "Cameras/Export": lambda camera, incident: cameras_pb2.ExportCamerasRequest(),
    "Replicas/List": lambda camera, incident: replicas_pb2.ListReplicasRequest(),
    "Replicas/Drain": lambda camera, incident: replicas_pb2.DrainReplicaRequest(name="replica-0", undo=True),
    "Results/Watch": lambda camera, incident: results_pb2.WatchRequest(recent=True),
    "Memory/AskAll": lambda camera, incident: memory_pb2.AskAllRequest(text="Who?"),
    "Memory/Ask": lambda camera, incident: memory_pb2.AskRequest(camera=camera, text="Who?"),
    "Memory/Replay": lambda camera, incident: memory_pb2.ReplayRequest(camera=camera, text="Is anyone there?"),
    "Memory/Describe": lambda camera, incident: memory_pb2.DescribeRequest(camera=camera),
    "Memory/Forget": lambda camera, incident: memory_pb2.ForgetRequest(camera=camera, before_s=3600.0),
    "Incidents/List": lambda camera, incident: incidents_pb2.ListIncidentsRequest(),
    "Incidents/Get": lambda camera, incident: incidents_pb2.GetIncidentRequest(id=incident),
    "Incidents/Follow": lambda camera, incident: incidents_pb2.FollowRequest(open=True),
    "Incidents/Timeline": lambda camera, incident: incidents_pb2.TimelineRequest(camera=camera),
    "Incidents/Review": lambda camera, incident: incidents_pb2.ReviewRequest(id=incident, verdict="rejected"),
    "Incidents/Acknowledge": lambda camera, incident: incidents_pb2.AcknowledgeRequest(id=incident, by="ann"),
    "Incidents/Mute": lambda camera, incident: incidents_pb2.MuteRequest(camera=camera, for_s=60.0, by="ann"),
    "Incidents/Unmute": lambda camera, incident: incidents_pb2.UnmuteRequest(camera=camera),
    "Incidents/ListMutes": lambda camera, incident: incidents_pb2.ListMutesRequest(),
    "Incidents/Outbox": lambda camera, incident: incidents_pb2.OutboxRequest(dead=100),
    "Incidents/Resend": lambda camera, incident: incidents_pb2.ResendRequest(),
    "Incidents/TestSink": lambda camera, incident: incidents_pb2.TestSinkRequest(sink="nobody"),
    "Pictures/Live": lambda camera, incident: pictures_pb2.LiveRequest(camera=camera),
    "Pictures/Picture": lambda camera, incident: pictures_pb2.PictureRequest(camera=camera),
    "Pictures/Test": lambda camera, incident: pictures_pb2.TestRequest(camera=camera, source="demo://gate"),
    "Pictures/Discover": lambda camera, incident: pictures_pb2.DiscoverRequest(network="127.0.0.0/30"),
    "Pictures/Footage": lambda camera, incident: pictures_pb2.FootageRequest(incident=incident, kind="clip"),
    "Pictures/Forget": lambda camera, incident: pictures_pb2.ForgetFootageRequest(camera=camera, before_s=3600.0),
    "Ingest/Push": lambda camera, incident: ingest_pb2.PushRequest(
        open=ingest_pb2.Open(camera=camera, session="s", codec="h264")
    ),
}


async def replies(channel, method, request, secret):
    """Code, sentence and replies of a call as bytes; of one that does not end, those of half a second."""
    call = channel.stream_stream(f"/sightline.v1.{method}")(
        iter([request.SerializeToString()]), metadata=(("authorization", f"Bearer {secret}"),), timeout=0.5
    )
    data = b""
    try:
        async for reply in call:
            data += reply
    except grpc.aio.AioRpcError as error:
        # That the half second is over is said by the client itself, in one of two ways.
        own = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return error.code(), data if own else data + (error.details() or "").encode()
    return grpc.StatusCode.OK, data


async def test_no_call_tells_of_another_camera(tmp_path):
    """And a camera that is not in scope is refused in the same words whether there is one or not."""
    assert {f"/sightline.v1.{method}" for method in CALLS} == {rule for rule in RULES if rule.startswith("/")}
    async with world(tmp_path) as (served, incidents), grpc.aio.insecure_channel(served.rpc) as channel:
        leaks, differ = [], []
        secret = served.secrets[Role.ADMIN]
        for method, request in CALLS.items():
            telling = asyncio.get_running_loop().call_later(0.2, publish, served, 20)
            code, data = await replies(channel, method, request(MINE, incidents[MINE]), secret)
            telling.cancel()
            if tells(data, incidents[OTHER]):
                leaks.append((method, code, data[:300]))
            if request(OTHER, incidents[OTHER]) == request("cam-999", "0" * 16):
                # It names neither, and its replies have the ages of what is its own.
                continue
            refused = [
                (code, told.replace(camera.encode(), b"").replace(incident.encode(), b""))
                for camera, incident in ((OTHER, incidents[OTHER]), ("cam-999", "0" * 16))
                for code, told in [await replies(channel, method, request(camera, incident), secret)]
            ]
            if refused[0] != refused[1]:
                differ.append((method, refused))
        assert not leaks
        assert not differ


async def test_dead_letters_of_other_cameras_are_not_sent_again(tmp_path):
    """Nor is it told that there are some: their keys are like keys of nothing."""
    posted, status = [], 401

    application = FastAPI()

    @application.post("/")
    async def take(request: Request) -> Response:
        if status < 300:
            posted.append((await request.json())["incident"]["camera"])
        return Response(status_code=status)

    async with listening(application) as (url, _):
        sinks = {"sinks": [{"name": "ops", "kind": "webhook", "options": {"url": url + "/"}}]}
        async with (
            world(tmp_path, alerts=sinks) as (served, incidents),
            grpc.aio.insecure_channel(served.rpc) as channel,
        ):
            async with asyncio.timeout(30):
                while len((await served.alerts.outbox(10)).dead) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            status = 204
            keys = {camera: f"{incident}-open" for camera, incident in incidents.items()}
            for key, count in ((keys[OTHER], 0), ("none-open", 0), ("", 1)):
                request = incidents_pb2.ResendRequest(sink="ops", key=key)
                code, data = await replies(channel, "Incidents/Resend", request, served.secrets[Role.ADMIN])
                assert (code, incidents_pb2.ResendResponse.FromString(data).count) == (grpc.StatusCode.OK, count)
            await until_async(lambda: posted)
            assert posted == [MINE]
            assert [each.event.incident.camera for each in (await served.alerts.outbox(10)).dead] == [OTHER]


@pytest.mark.parametrize(
    ("patterns", "all_of_them"),
    [(["*"], True), (["gate", "*"], True), (["?"], False), (["**"], False), (["g*"], False)],
)
def test_who_sees_all(patterns, all_of_them):
    """``?`` fits the name ``*`` as well, with which every camera is muted."""
    principal = Principal("p", frozenset({Role.ASK}), tuple(patterns))
    with contextlib.nullcontext() if all_of_them else pytest.raises(ForbiddenError, match="needs a token for all"):
        principal.require(Role.ASK, everybody=True)
