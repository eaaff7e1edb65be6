"""Passwords that the gateway knows cannot be guessed by what its replies hide."""

import asyncio
import secrets

import grpc
import pytest
from gateway_parts import serving
from http_parts import Client
from sightline.v1 import cameras_pb2, cameras_pb2_grpc, incidents_pb2, incidents_pb2_grpc

from cluster.redaction import SourceAddress, redact


@pytest.fixture
def words():
    """The password of a camera that this process knows, and another word."""
    # Of each test another: one that was met before is not met again.
    right, wrong = secrets.token_hex(8), secrets.token_hex(8)
    SourceAddress(f"rtsp://viewer:{right}@10.0.0.7/live")
    assert redact(right) == "***"
    return right, wrong


@pytest.mark.parametrize(
    ("role", "method", "path", "body"),
    [
        (None, "GET", "/{}", None),
        (None, "GET", "/console/{}", None),
        ("view", "GET", "/v1/cameras/{}", None),
        ("view", "GET", "/v1/incidents/{}", None),
        ("view", "GET", "/v1/incidents?verdict={}", None),
        ("view", "GET", "/v1/incidents/{}/snapshot.jpg", None),
        ("view", "GET", "/v1/incidents/x/clip.mp4?part={}", None),
        ("view", "GET", "/v1/models/camera/{}", None),
        ("ask", "POST", "/v1/chat/completions", {"model": "{}", "messages": [{"role": "user", "content": "Who?"}]}),
        ("ask", "POST", "/v1/ask", {"camera": "cam-000", "text": "Who?", "conversation": "{}"}),
        ("ask", "POST", "/v1/ask", {"camera": "{}", "text": "Who?"}),
        ("admin", "POST", "/v1/cameras", {"name": "{} {}", "source": "demo://gate"}),
        ("admin", "POST", "/v1/cameras", {"name": "new", "source": "demo://gate", "settings": {"priority": "{}"}}),
        ("admin", "POST", "/v1/cameras/import", {"text": "name,source,priority\nnew,demo://gate,{}"}),
    ],
)
async def test_a_word_that_is_a_password_is_answered_as_any_other(tmp_path, words, role, method, path, body):
    """Whoever sees it hidden has guessed it, as fast as this gateway answers, and without asking the camera."""

    def filled(value, word):
        if isinstance(value, dict):
            return {key: filled(each, word) for key, each in value.items()}
        return value.replace("{}", word) if isinstance(value, str) else value

    told = {}
    async with (
        serving(tmp_path, cameras=1, tokens=True) as served,
        Client(served.url, served.secrets.get(role)) as client,
    ):
        for word in words:
            async with client.open(method, path.replace("{}", word), json=filled(body, word)) as reply:
                told[word] = reply.status, (await reply.text()).replace(word, "WORD")
    assert told[words[0]] == told[words[1]]


async def test_nor_over_grpc(tmp_path, words):
    requests = {
        (cameras_pb2_grpc.CamerasStub, "Get"): lambda word: cameras_pb2.GetCameraRequest(name=word),
        (incidents_pb2_grpc.IncidentsStub, "Get"): lambda word: incidents_pb2.GetIncidentRequest(id=word),
    }

    def sentence(channel, stub, call, request):
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub(channel), call)(request, metadata=(("authorization", f"Bearer {secret}"),))
        return caught.value.code(), caught.value.details()

    async with serving(tmp_path, cameras=1, tokens=True, scopes=["cam-*"]) as served:
        secret = served.secrets["view"]
        with grpc.insecure_channel(served.rpc) as channel:
            for (stub, call), request in requests.items():
                told = {}
                for word in words:
                    code, said = await asyncio.to_thread(sentence, channel, stub, call, request(word))
                    told[word] = code, said.replace(word, "WORD")
                assert told[words[0]] == told[words[1]]
