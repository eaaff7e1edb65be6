"""Memories over HTTP: a question about the past answered line by line, forgetting, and what is remembered.

Answers of ``/v1/ask`` are newline-delimited JSON: ``{"text": …}`` for every piece, then one ``{"result": …}``. What
fails before the first piece has a status and ``{"error": …}``; what fails later ends the lines with ``{"error": …}``.
A connection that the client closes stops the answer. ``/v1/ask/all`` has one ``{"answer": …}`` for each camera and
``{"progress": …}`` in between, of which the last is ``finished``.
"""

import json

from pydantic import Field
from sightline.v1 import memory_pb2

from cluster.gateway.http.answering import ASK, ASK_ALL, answer_body, result_body, written
from cluster.gateway.http.forms import AskAllLine, AskLine
from cluster.gateway.http.replies import Reply, Stream, jsonable
from cluster.gateway.http.routes import MAX_NUMBER, Body, Gateway, Routes, Text
from cluster.types import MemoryStatus
from cluster.types.cameras import remark_on
from cluster.wire.mapping import from_message
from cluster.wire.memory_wire import (
    AskAllProgress,
    CameraTold,
    ForgottenCamera,
    Told,
    check_camera,
    check_name,
    check_question,
    status_from_proto,
)

SERVICE = "/sightline.v1.Memory/"
NDJSON = "application/x-ndjson"
router = Routes()


class Ask(Body):
    """A question about what a camera has seen; see ``AskRequest`` in protos/sightline/v1/memory.proto."""

    camera: str
    text: str
    conversation: str = ""
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_new_tokens: int = Field(default=0, ge=0, le=MAX_NUMBER)
    with_pictures: bool = False
    timeout_s: float = Field(default=120.0, ge=0, le=MAX_NUMBER)


class AskEvery(Body):
    """A question to every camera that the token may see; see ``AskAllRequest``."""

    text: str
    cameras: list[Text] = Field(default_factory=list, max_length=100, description="Patterns; none: all.")
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_new_tokens: int = Field(default=0, ge=0, le=MAX_NUMBER)
    with_pictures: bool = False
    at_once: int = Field(default=0, ge=0, le=32)
    deadline_s: float = Field(default=0.0, ge=0, le=300)

    def request(self) -> memory_pb2.AskAllRequest:
        """The same for the gateway's service."""
        return memory_pb2.AskAllRequest(**self.model_dump() | {"text": check_question(self.text)})


class Forget(Body):
    """What a camera is to forget."""

    camera: str
    before_s: float = Field(ge=0, le=MAX_NUMBER, description="0 forgets everything")


@router.on("POST /v1/ask", ASK, AskLine, media=NDJSON, errors=(404, 409, 504))
async def ask(body: Ask, gateway: Gateway) -> Stream:
    """Ask a camera about what it has seen; the answer comes line by line."""
    asked = memory_pb2.AskRequest(
        camera=check_camera(body.camera),
        text=check_question(body.text),
        conversation=check_name(body.conversation, "the conversation"),
        since_s=body.since_s,
        max_new_tokens=body.max_new_tokens,
        with_pictures=body.with_pictures,
    )
    events = gateway.answering.ask(asked, body.timeout_s)

    def write(event: str | Told) -> bytes:
        if isinstance(event, str):
            return _json({"text": event})
        return _json({"result": result_body(event) | {"remark": remark_on(body.text, event.result.text)}})

    return await Stream.begin(written(events, write, lambda error: _json({"error": str(error)})), NDJSON)


@router.on("POST /v1/ask/all", ASK_ALL, AskAllLine, media=NDJSON)
async def ask_all(body: AskEvery, gateway: Gateway) -> Stream:
    """Ask every camera the same; answers come line by line in the order they are there, with progress."""
    events = gateway.answering.ask_all(body.request())
    return await Stream.begin(written(events, all_line, lambda error: _json({"error": str(error)})), NDJSON)


def all_line(event: CameraTold | AskAllProgress) -> bytes:
    """One line of a question to all: ``{"progress": …}`` or ``{"answer": …}``."""
    return _json({"answer": answer_body(event)} if isinstance(event, CameraTold) else {"progress": jsonable(event)})


@router.on("POST /v1/forget", f"{SERVICE}Forget", ForgottenCamera, errors=(404,))
async def forget(body: Forget, gateway: Gateway) -> Reply:
    """Make a camera forget: its memory, its footage and what was recorded of its incidents."""
    asked = memory_pb2.ForgetRequest(camera=check_camera(body.camera), before_s=body.before_s)
    return Reply(from_message(ForgottenCamera, await gateway.calls.unary(f"{SERVICE}Forget", asked)))


@router.on("GET /v1/memory/{name}", f"{SERVICE}Describe", MemoryStatus, errors=(404, 409))
async def describe_memory(name: str, gateway: Gateway) -> Reply:
    """What a camera remembers."""
    asked = memory_pb2.DescribeRequest(camera=check_camera(name))
    return Reply(status_from_proto(await gateway.calls.unary(f"{SERVICE}Describe", asked)))


def _json(body: dict[str, object]) -> bytes:
    return json.dumps(body).encode() + b"\n"
