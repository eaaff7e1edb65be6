"""The gateway's door: every call times every role, in scope and out of it; the audit log; rates."""

import asyncio
import contextlib
import json
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from memory_parts import replica
from oidc_parts import provider
from security_parts import guarded_gateway
from sightline.v1 import (
    cameras_pb2,
    cameras_pb2_grpc,
    incidents_pb2,
    ingest_pb2,
    ingest_pb2_grpc,
    memory_pb2,
    memory_pb2_grpc,
    pictures_pb2,
    pictures_pb2_grpc,
    replicas_pb2,
    replicas_pb2_grpc,
    results_pb2,
    results_pb2_grpc,
)

from cluster import metrics
from cluster.client import GatewayClient
from cluster.config import load_config
from cluster.config.security import SecurityConfig
from cluster.errors import CapacityError, ConfigError, ForbiddenError, UnauthenticatedError
from cluster.gateway.claims import Attempt
from cluster.gateway.guard import REFUSALS_NOTED, Guard, make_guard
from cluster.security.audit import AuditLog
from cluster.security.limits import RateLimit
from cluster.security.roles import RULES, Principal, Role, note_cameras
from cluster.security.tokens import read_tokens, write_tokens
from cluster.wire.channel import open_channel
from cluster.wire.tls import ClientCredentials

Code = grpc.StatusCode

READERS, ASKERS, ADMINS = {Role.VIEW, Role.ASK, Role.ADMIN}, {Role.ASK, Role.ADMIN}, {Role.ADMIN}
# Each call with its request about a camera and who may make it.
CALLS = {
    "/sightline.v1.Cameras/List": (lambda camera: cameras_pb2.ListCamerasRequest(), READERS),
    "/sightline.v1.Cameras/Get": (lambda camera: cameras_pb2.GetCameraRequest(name=camera), READERS),
    "/sightline.v1.Cameras/Add": (lambda camera: cameras_pb2.AddCameraRequest(name=camera), ADMINS),
    "/sightline.v1.Cameras/Remove": (lambda camera: cameras_pb2.RemoveCameraRequest(name=camera), ADMINS),
    "/sightline.v1.Cameras/Update": (lambda camera: cameras_pb2.UpdateCameraRequest(name=camera), ADMINS),
    "/sightline.v1.Cameras/Export": (lambda camera: cameras_pb2.ExportCamerasRequest(names=[camera]), ADMINS),
    "/sightline.v1.Memory/Ask": (lambda camera: memory_pb2.AskRequest(camera=camera, text="Who?"), ASKERS),
    "/sightline.v1.Memory/Replay": (lambda camera: memory_pb2.ReplayRequest(camera=camera, text="Is it?"), ASKERS),
    # Of the cameras there are, those that the token sees are asked: its scope is tested in test_ask_all.py.
    "/sightline.v1.Memory/AskAll": (lambda camera: memory_pb2.AskAllRequest(text="Who?"), ASKERS),
    "/sightline.v1.Memory/Describe": (lambda camera: memory_pb2.DescribeRequest(camera=camera), READERS),
    "/sightline.v1.Memory/Forget": (lambda camera: memory_pb2.ForgetRequest(camera=camera), ADMINS),
    "/sightline.v1.Replicas/List": (lambda camera: replicas_pb2.ListReplicasRequest(), READERS),
    # It needs a token for all cameras, and these are for some; so does Discover.
    "/sightline.v1.Replicas/Drain": (lambda camera: replicas_pb2.DrainReplicaRequest(name="replica-0"), set()),
    "/sightline.v1.Results/Watch": (lambda camera: results_pb2.WatchRequest(cameras=[camera]), READERS),
    "/sightline.v1.Ingest/Push": (lambda camera: iter([_opening(camera)]), {Role.INGEST, Role.ADMIN}),
    "/sightline.v1.Pictures/Test": (
        lambda camera: pictures_pb2.TestRequest(camera=camera, source="demo://gate"),
        ADMINS,
    ),
    "/sightline.v1.Pictures/Discover": (lambda camera: pictures_pb2.DiscoverRequest(network="127.0.0.0/30"), set()),
    "/sightline.v1.Pictures/Picture": (lambda camera: pictures_pb2.PictureRequest(camera=camera), READERS),
    "/sightline.v1.Pictures/Live": (lambda camera: pictures_pb2.LiveRequest(camera=camera), READERS),
    # Whose footage an incident's is, only alerting knows: its scope is tested in test_footage_flow.py.
    "/sightline.v1.Pictures/Footage": (
        lambda camera: pictures_pb2.FootageRequest(incident="0" * 16, kind="clip"),
        READERS,
    ),
    "/sightline.v1.Pictures/Forget": (lambda camera: pictures_pb2.ForgetFootageRequest(camera=camera), ADMINS),
}
STUBS = {
    "Cameras": cameras_pb2_grpc.CamerasStub,
    "Ingest": ingest_pb2_grpc.IngestStub,
    "Memory": memory_pb2_grpc.MemoryStub,
    "Pictures": pictures_pb2_grpc.PicturesStub,
    "Replicas": replicas_pb2_grpc.ReplicasStub,
    "Results": results_pb2_grpc.ResultsStub,
}
WITHOUT_CAMERA = {
    "/sightline.v1.Pictures/Discover",
    "/sightline.v1.Memory/AskAll",
    "/sightline.v1.Pictures/Footage",
    "/sightline.v1.Cameras/List",
    "/sightline.v1.Replicas/List",
    "/sightline.v1.Replicas/Drain",
}
LET_THROUGH = {
    # No decoder, and no alerting, is behind this gateway.
    "/sightline.v1.Ingest/Push": Code.UNAVAILABLE,
    "/sightline.v1.Pictures/Picture": Code.UNAVAILABLE,
    "/sightline.v1.Pictures/Test": Code.UNAVAILABLE,
    "/sightline.v1.Pictures/Live": Code.UNAVAILABLE,
    "/sightline.v1.Pictures/Footage": Code.FAILED_PRECONDITION,
}


def _opening(camera):
    return ingest_pb2.PushRequest(open=ingest_pb2.Open(camera=camera, session="s", codec="h264"))


def _call(channel, method, camera, metadata):
    service, name = method.removeprefix("/sightline.v1.").split("/")
    request, _ = CALLS[method]
    # A push that was let through waits for a decoder.
    timeout_s = 0.5 if service == "Ingest" else 5
    reply = getattr(STUBS[service](channel), name)(request(camera), metadata=metadata, timeout=timeout_s)
    if service == "Results":
        # The first answer, or the refusal.
        next(reply)
        reply.cancel()
    elif isinstance(reply, grpc.Call):
        list(reply)


def _outcome(address, method, camera, secret):
    """The call's status code."""
    metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
    with grpc.insecure_channel(address) as channel:
        try:
            _call(channel, method, camera, metadata)
        except grpc.RpcError as error:
            return error.code()
    return Code.OK


def test_the_matrix_names_every_call():
    """Those of incidents are in test_incidents.py: what they may touch is known by the incident, not by the request."""
    elsewhere = {method for method in RULES if method.startswith("/sightline.v1.Incidents/")}
    over_http = {method for method in RULES if not method.startswith("/")}
    assert set(CALLS) == set(RULES) - over_http - elsewhere


async def wrong_outcomes(gateway, addresses, directory, secrets, make):
    """``(call, role, camera, code, expected)`` of what the matrix does not allow; ``secrets`` are for gate and y*."""

    async def answer():
        while True:
            gateway._hub.publish([make.answer(stream=camera) for camera in ("gate", "yard")])
            await asyncio.sleep(0.02)

    async with replica() as (_, address), asyncio.TaskGroup() as background:
        directory.address = address
        answering = background.create_task(answer())
        wrong = []
        for method in CALLS:
            for role, secret in {**secrets, None: None, "unknown": "sl_unknown"}.items():
                for camera in ("gate", "yard", "depot"):
                    directory.added = [camera]
                    code = await asyncio.to_thread(_outcome, addresses.rpc, method, camera, secret)
                    if role not in list(Role):
                        expected = Code.UNAUTHENTICATED
                    elif role not in CALLS[method][1] or (camera == "depot" and method not in WITHOUT_CAMERA):
                        expected = Code.PERMISSION_DENIED
                    else:
                        expected = LET_THROUGH.get(method, Code.OK)
                    if code is not expected:
                        wrong.append((method, role, camera, code, expected))
        answering.cancel()
    return wrong


async def test_every_call_times_every_role_and_scope(monkeypatch, tmp_path, make):
    async with guarded_gateway(monkeypatch, tmp_path) as (gateway, addresses, directory, secrets):
        assert not await wrong_outcomes(gateway, addresses, directory, secrets, make)


async def test_the_same_with_tokens_of_a_provider(monkeypatch, tmp_path, make):
    people = {role: {"groups": [f"{role}ers"]} for role in Role}
    with provider(people, "http://127.0.0.1:1/v1/sign-in/callback") as issuer:
        groups = [{"group": f"{role}ers", "roles": [role], "cameras": ["gate", "y*"]} for role in Role]
        oidc = {"issuer": issuer.url, "client_id": "sightline", "url": "http://127.0.0.1:1", "groups": groups}
        oidc["bearer_audience"] = "urn:sightline"
        async with guarded_gateway(monkeypatch, tmp_path, oidc=oidc) as (gateway, addresses, directory, _):
            await gateway._guard.provider.address(Attempt.begin())
            secrets = {role: await issuer.robot_token(role) for role in Role}
            assert not await wrong_outcomes(gateway, addresses, directory, secrets, make)


async def test_lists_and_answers_hold_only_what_the_token_is_for(monkeypatch, tmp_path, make):
    async with guarded_gateway(monkeypatch, tmp_path) as (running, addresses, _, secrets):
        credentials = ClientCredentials(token=secrets[Role.VIEW])

        def look():
            with GatewayClient(addresses.rpc, credentials=credentials) as client:
                seen = [status.name for status in client.cameras_list()]
                answers = client.watch()
                for stream in ("depot", "yard", "depot", "gate"):
                    running._hub.publish([make.answer(stream=stream)])
                return seen, [next(answers)[0].stream for _ in range(2)]

        assert await asyncio.to_thread(look) == (["gate", "yard"], ["yard", "gate"])


@pytest.mark.parametrize(
    ("cameras", "code"), [(None, Code.UNAUTHENTICATED), (["yard"], Code.UNAVAILABLE)], ids=["revoked", "other cameras"]
)
async def test_a_stream_ends_with_its_token(monkeypatch, tmp_path, make, cameras, code):
    """Pushes and watches have no end of their own."""
    monkeypatch.setattr("cluster.gateway.guard.RECHECK_S", 0.1)
    async with (
        guarded_gateway(monkeypatch, tmp_path) as (gateway, addresses, _, secrets),
        open_channel(addresses.rpc) as channel,
    ):
        metadata = (("authorization", f"Bearer {secrets[Role.VIEW]}"),)
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest(), metadata=metadata)
        await call.initial_metadata()
        await asyncio.sleep(0.3)
        gateway._hub.publish([make.answer(stream="gate")])
        assert (await call.read()).camera == "gate"
        tokens = [token for token in read_tokens(tmp_path / "tokens.json") if token.name == "view-token"]
        kept = [] if cameras is None else [replace(token, cameras=tuple(cameras)) for token in tokens]
        write_tokens(tmp_path / "tokens.json", kept)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(call.read(), 5.0)
        assert ended.value.code() is code
        assert len(gateway._hub._subscriptions) == 1, "of the watchers only the console's is left"
    if cameras is None:
        last = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
        assert (last["who"], last["call"], last["outcome"]) == (
            "view-token",
            "/sightline.v1.Results/Watch",
            "unauthenticated",
        )


async def test_probes_need_no_token_and_reflection_does(monkeypatch, tmp_path):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    def look(address, metadata):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            try:
                return health.status, len(list(stub.ServerReflectionInfo(iter([listing]), metadata=metadata)))
            except grpc.RpcError as error:
                return health.status, error.code()

    async with guarded_gateway(monkeypatch, tmp_path) as (_, addresses, _, secrets):
        serving = health_pb2.HealthCheckResponse.SERVING
        assert await asyncio.to_thread(look, addresses.rpc, ()) == (serving, Code.UNAUTHENTICATED)
        known = (("authorization", f"Bearer {secrets[Role.VIEW]}"),)
        assert await asyncio.to_thread(look, addresses.rpc, known) == (serving, 1)


async def test_the_audit_log_tells_who_asked_what_and_who_was_refused(monkeypatch, tmp_path):
    async with guarded_gateway(monkeypatch, tmp_path) as (_, addresses, directory, secrets), replica() as (_, address):
        directory.address = address
        ask = "/sightline.v1.Memory/Ask"
        for secret, camera in ((secrets[Role.ASK], "gate"), (secrets[Role.ASK], "depot"), ("sl_no", "gate")):
            await asyncio.to_thread(_outcome, addresses.rpc, ask, camera, secret)
        await asyncio.to_thread(_outcome, addresses.rpc, "/sightline.v1.Cameras/List", "", secrets[Role.VIEW])
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(secret in text for secret in secrets.values())
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    told = [(line["who"], line["cameras"], line["outcome"], line.get("text")) for line in lines]
    assert told == [
        ("ask-token", ["gate"], "ok", "Who?"),
        ("ask-token", ["depot"], "forbidden", "Who?"),
        ("?", [], "unauthenticated", None),
    ]


def test_an_audit_log_needs_callers_who_are_asked_and_its_lost_lines_are_counted(tmp_path):
    with pytest.raises(ConfigError, match=r"needs authenticated callers: set security\.tokens_file or security\.oidc"):
        make_guard(SecurityConfig(audit_log=str(tmp_path / "audit.jsonl")))
    write_tokens(tmp_path / "tokens.json", [])
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    keys = {"tokens_file": str(tmp_path / "tokens.json"), "audit_log": str(tmp_path / "audit.jsonl")}
    guard = make_guard(SecurityConfig(**keys))
    assert guard is not None
    before = metrics.REGISTRY.get_sample_value("sightline_audit_lines_lost_total")
    with pytest.raises(UnauthenticatedError):
        guard.admit("Bearer sl_wrong", "/sightline.v1.Cameras/List", "10.0.0.1")
    guard.close()
    assert metrics.REGISTRY.get_sample_value("sightline_audit_lines_lost_total") == before + 1


def test_strangers_push_nobody_out_of_the_audit_log(tmp_path):
    """However often they come; what was left out is told with the next line."""
    now = 0.0
    guard = Guard(_nobody, audit=AuditLog(tmp_path / "audit.jsonl"))
    guard._refusals = RateLimit(1.0, REFUSALS_NOTED, clock=lambda: now)
    list_cameras = "/sightline.v1.Cameras/List"
    for now in (0.0, 1.0, 3.0):
        for number in range(1000):
            with pytest.raises(UnauthenticatedError):
                guard.admit("Bearer sl_wrong", list_cameras, f"10.0.0.{number % 2}" if now else f"10.0.{number}.7")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert len(lines) == 60 + 1 + 2
    assert all((line["who"], line["outcome"]) == ("?", "unauthenticated") for line in lines)
    told = [line["text"] for line in lines if "text" in line]
    named = ", ".join(f"1 from 10.0.{number}.7" for number in range(60, 68))
    assert told == [
        f"and 940 earlier refusals not logged: 932 from others, {named}",
        "and 999 earlier refusals not logged: 500 from 10.0.0.1, 499 from 10.0.0.0",
    ]
    assert (lines[0]["peer"], lines[-1]["peer"]) == ("10.0.0.7", "10.0.0.1")


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("Memory/Ask", memory_pb2.AskRequest(camera="gate", text="?" * 2**20)),
        ("Memory/Ask", memory_pb2.AskRequest(camera="g" * 2**20, text="Who?")),
        ("Results/Watch", results_pb2.WatchRequest(cameras=["g" * 2**20])),
        ("Results/Watch", results_pb2.WatchRequest(cameras=[f"gate-{number}" for number in range(2**16)])),
        ("Incidents/Mute", incidents_pb2.MuteRequest(camera="g" * 2**20, for_s=60)),
    ],
    ids=["text", "name", "watched name", "names", "mute"],
)
@pytest.mark.parametrize("scope", ["*", "yard"])
def test_nobody_writes_others_out_of_the_audit_log_with_long_lines(tmp_path, caplog, call, request_, scope):
    """It is turned over by its size, and a message may have megabytes; so is the log of the process."""
    caplog.set_level("INFO")
    guard = Guard(_nobody, audit=AuditLog(tmp_path / "audit.jsonl"))
    with contextlib.suppress(ConfigError, ForbiddenError):
        guard.check_request(Principal("ann", frozenset({Role.ASK}), (scope,)), f"/sightline.v1.{call}", request_)
    [line] = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(line) < 10_000
    assert json.loads(line)["who"] == "ann"
    assert all(len(record.getMessage()) < 10_000 for record in caplog.records)


def test_many_names_cost_what_they_write():
    ann, watch = Principal("ann", frozenset({Role.VIEW})), "/sightline.v1.Results/Watch"
    guard = Guard(lambda _: ann, rate=RateLimit(0.001, 100))
    names = [f"gate-{number}" for number in range(1000)]

    def call():
        guard.check(guard.admit("Bearer sl_ann", watch, "10.0.0.1"), watch, names)

    # One itself, and twenty for its names.
    for _ in range(5):
        call()
    with pytest.raises(CapacityError, match="'ann' calls too often"):
        call()


def test_a_question_is_not_hidden_behind_white_space(tmp_path):
    guard = Guard(_nobody, audit=AuditLog(tmp_path / "audit.jsonl"))
    asked = memory_pb2.AskRequest(camera="gate", text=" " * 10_000 + "Who opens the safe?")
    guard.check_request(Principal("ann", frozenset({Role.ASK})), "/sightline.v1.Memory/Ask", asked)
    assert json.loads((tmp_path / "audit.jsonl").read_text())["text"] == "Who opens the safe?"


@pytest.mark.parametrize(
    ("call", "request_", "text"),
    [
        ("Incidents/Acknowledge", incidents_pb2.AcknowledgeRequest(id="af07"), "af07"),
        ("Incidents/Review", incidents_pb2.ReviewRequest(id="af07", verdict="rejected"), "af07, rejected"),
        ("Incidents/Mute", incidents_pb2.MuteRequest(camera="gate", for_s=60), "gate, *, 60.0"),
        ("Incidents/Unmute", incidents_pb2.UnmuteRequest(camera="gate", subject="fence"), "gate, fence"),
        ("Incidents/Resend", incidents_pb2.ResendRequest(sink="pager"), "pager, *"),
        ("Incidents/TestSink", incidents_pb2.TestSinkRequest(sink="pager"), "pager"),
        ("Pictures/Footage", pictures_pb2.FootageRequest(incident="af07", kind="clip"), "af07, clip"),
        ("Pictures/Discover", pictures_pb2.DiscoverRequest(network="10.0.0.0/30"), "10.0.0.0/30"),
        ("Replicas/Drain", replicas_pb2.DrainReplicaRequest(name="replica-0", undo=True), "replica-0, True"),
        ("Memory/Forget", memory_pb2.ForgetRequest(camera="gate", before_s=60), "60.0"),
        ("Cameras/Export", cameras_pb2.ExportCamerasRequest(secrets=True), "True"),
    ],
    ids=lambda each: each if isinstance(each, str) and "/" in each else "",
)
def test_the_audit_log_tells_what_was_changed_or_seen(tmp_path, call, request_, text):
    guard = Guard(_nobody, audit=AuditLog(tmp_path / "audit.jsonl"))
    guard.check_request(Principal("ann", frozenset({Role.ADMIN})), f"/sightline.v1.{call}", request_)
    # By the service, once it knows whose incident it is; of others that was written before.
    note_cameras("yard")
    note_cameras("gate")
    [line] = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == text
    assert RULES[f"/sightline.v1.{call}"].late == (json.loads(line)["cameras"] == ["yard"])


def _nobody(secret):
    raise UnauthenticatedError("this token is not known here; ask for a new one")


async def test_who_calls_too_often_is_told_when_to_come_back(monkeypatch, tmp_path):
    def hammer(address, secret):
        return [_outcome(address, "/sightline.v1.Cameras/List", "", secret) for _ in range(4)]

    limits = {"calls_burst": 3, "calls_per_s": 0.001}
    async with guarded_gateway(monkeypatch, tmp_path, **limits) as (_, addresses, _, secrets):
        codes = await asyncio.to_thread(hammer, addresses.rpc, secrets[Role.VIEW])
        assert codes == [Code.OK] * 3 + [Code.RESOURCE_EXHAUSTED]
        assert await asyncio.to_thread(hammer, addresses.rpc, secrets[Role.ASK]) == codes


async def test_clients_say_what_the_door_said(monkeypatch, tmp_path):
    async with guarded_gateway(monkeypatch, tmp_path) as (_, addresses, _, secrets):

        def remove(credentials):
            with GatewayClient(addresses.rpc, credentials=credentials) as client:
                client.camera_remove("gate")

        with pytest.raises(UnauthenticatedError, match="set SIGHTLINE_TOKEN"):
            await asyncio.to_thread(remove, None)
        with pytest.raises(ForbiddenError, match="role admin; 'view-token' has: view"):
            await asyncio.to_thread(remove, ClientCredentials(token=secrets[Role.VIEW]))


def test_a_gateway_open_to_all_must_be_wanted_in_words():
    with pytest.raises(ConfigError, match=r"gateway\.host: 0\.0\.0\.0 accepts other machines without authentication"):
        load_config(None, {"gateway": {"host": "0.0.0.0"}})
    load_config(None, {"gateway": {"host": "0.0.0.0"}, "security": {"allow_unauthenticated": True}})
    load_config(None, {"gateway": {"host": "0.0.0.0"}, "security": {"tokens_file": "tokens.json"}})
    load_config(None, {"gateway": {"host": "localhost"}})
