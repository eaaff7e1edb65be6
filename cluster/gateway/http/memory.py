"""Memories over HTTP: free questions, replay of questions, simulation of incident rules, deletion, status.

Streams are newline-delimited JSON. ``/v1/ask`` sends ``{"text": …}`` per piece, then one ``{"result": …}``;
``/v1/ask/all`` sends ``{"answer": …}`` per camera and ``{"progress": …}`` in between, the last being ``finished``;
``/v1/replay`` sends ``{"window": …}`` per past window. A failure before the first line has a status and
``{"error": …}``; a later one ends the stream with a line ``{"error": …}``. Closing the connection cancels the answer.
"""

import time
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from sightline.v1 import memory_pb2

from cluster.alerts.incident import Incident
from cluster.alerts.tracker import ScoredWindow, simulate_incidents
from cluster.errors import ConfigError
from cluster.files import jsonable
from cluster.gateway.http.forms import AskAllLine, AskLine, Rehearsal, ReplayLine
from cluster.gateway.http.free_questions import ASK, ASK_ALL, NDJSON, answer_body, lines, result_body
from cluster.gateway.http.replies import Reply, Stream
from cluster.gateway.http.routes import MAX_NUMBER, Body, Gateway, Routes, Text
from cluster.security.roles import REHEARSE
from cluster.types import MICROSECONDS, MemoryStatus
from cluster.types.cameras import answer_remark
from cluster.wire import memory_wire
from cluster.wire.mapping import from_message

SERVICE = "/sightline.v1.Memory/"
MOST_WINDOWS = 1000
router = Routes()


# These checks raise ``ConfigError``, which is passed to the client as it is.
Camera = Annotated[str, AfterValidator(memory_wire.check_camera)]
Question = Annotated[str, AfterValidator(memory_wire.check_question)]
Conversation = Annotated[str, AfterValidator(partial(memory_wire.check_name, what="the conversation"))]


class Ask(Body):
    """A question about what a camera has seen.

    ``conversation``: of an earlier result, continued; ``since_s``: only of the last seconds before the newest frame, 0:
    all; ``max_new_tokens``: 0: the cluster's limit; ``with_pictures``: one of each moment; ``timeout_s``: 0: 300."""

    camera: Camera
    text: Question
    conversation: Conversation = ""
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_new_tokens: int = Field(default=0, ge=0, le=MAX_NUMBER)
    with_pictures: bool = False
    timeout_s: float = Field(default=120.0, ge=0, le=MAX_NUMBER)


class AskEvery(Body):
    """A question to every camera that the token may see.

    As in ``Ask``; ``max_new_tokens``: of each camera, 0: 16; ``at_once``: cameras asked concurrently, 0: 8;
    ``deadline_s``: after which cameras stay unanswered, 0: 60."""

    text: Question
    cameras: list[Text] = Field(default_factory=list, max_length=100, description="Name patterns; empty: all.")
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_new_tokens: int = Field(default=0, ge=0, le=MAX_NUMBER)
    with_pictures: bool = False
    at_once: int = Field(default=0, ge=0, le=32)
    deadline_s: float = Field(default=0.0, ge=0, le=300)


class Forget(Body):
    """A camera, and the age in seconds above which its records are deleted."""

    camera: Camera
    before_s: float = Field(ge=0, le=MAX_NUMBER, description="age in seconds; 0 deletes everything")


@router.on("POST /v1/ask", ASK, AskLine, media=NDJSON, errors=(404, 409, 504))
async def ask(body: Ask, gateway: Gateway) -> Stream:
    """Ask a camera about what it has seen; streams the answer."""
    asked = memory_pb2.AskRequest(**body.model_dump(exclude={"timeout_s"}))

    def line(event: str | memory_wire.AskOutcome) -> dict[str, Any]:
        if isinstance(event, str):
            return {"text": event}
        return {"result": result_body(event) | {"remark": answer_remark(body.text, event.result.text)}}

    return await lines(gateway.answering.ask(asked, body.timeout_s), line)


@router.on("POST /v1/ask/all", ASK_ALL, AskAllLine, media=NDJSON)
async def ask_all(body: AskEvery, gateway: Gateway) -> Stream:
    """Ask every camera the same question; streams answers as they arrive, with progress."""
    asked = memory_pb2.AskAllRequest(**body.model_dump())

    def line(event: memory_wire.CameraOutcome | memory_wire.AskAllProgress) -> dict[str, Any]:
        return (
            {"answer": answer_body(event)}
            if isinstance(event, memory_wire.CameraOutcome)
            else {"progress": jsonable(event)}
        )

    return await lines(gateway.answering.ask_all(asked), line)


@router.on("POST /v1/forget", f"{SERVICE}Forget", memory_wire.ForgottenCamera, errors=(404,))
async def forget(body: Forget, gateway: Gateway) -> Reply:
    """Delete a camera's memory, footage and incident records."""
    asked = memory_pb2.ForgetRequest(**body.model_dump())
    forgotten = await gateway.calls.unary(f"{SERVICE}Forget", asked)
    return Reply(from_message(memory_wire.ForgottenCamera, forgotten))


@router.on("GET /v1/memory/{name}", f"{SERVICE}Describe", MemoryStatus, errors=(404, 409))
async def describe_memory(name: str, gateway: Gateway) -> Reply:
    """Contents and size of a camera's memory."""
    asked = memory_pb2.DescribeRequest(camera=memory_wire.check_camera(name))
    return Reply(memory_wire.status_from_proto(await gateway.calls.unary(f"{SERVICE}Describe", asked)))


Number = Annotated[float, Field(ge=0, le=100 * MAX_NUMBER)]
Window = Annotated[list[Number], Field(min_length=3, max_length=3)]


class Replay(Body):
    """A yes/no question to replay on a camera's past.

    ``since_s``: only windows of the last seconds before the newest frame, 0: all; ``windows``: at most so many, evenly
    spread, up to 480, 0: 240; ``timeout_s``: 0: 300."""

    camera: Camera
    text: Question
    since_s: float = Field(default=3600.0, ge=0, le=MAX_NUMBER)
    windows: int = Field(default=0, ge=0, le=MAX_NUMBER)
    timeout_s: float = Field(default=300.0, ge=0, le=MAX_NUMBER)


class RehearsedRule(Body):
    """Incident settings of a question; null: the cluster's default."""

    threshold: float = Field(default=0.5, gt=0, lt=1)
    consecutive: int | None = Field(default=None, ge=1, le=1000)
    cooldown_s: float | None = Field(default=None, ge=0, le=MAX_NUMBER)
    severity: Literal["info", "warning", "critical"] | None = None


class Rehearse(Body):
    """Windows (start and end in seconds on any clock, score), oldest first, and the rule to apply."""

    windows: list[Window] = Field(max_length=MOST_WINDOWS)
    rule: RehearsedRule = Field(default_factory=RehearsedRule)


@router.on("POST /v1/replay", f"{SERVICE}Replay", ReplayLine, media=NDJSON, errors=(404, 409, 504))
async def replay(body: Replay, gateway: Gateway) -> Stream:
    """Answer a yes/no question on a camera's past windows; streams the scores."""
    asked = memory_pb2.ReplayRequest(**body.model_dump(exclude={"timeout_s"}))
    now_s = time.time()

    def line(window: memory_pb2.ReplayedWindow) -> dict[str, Any]:
        end_s = now_s - window.ago_s
        body = {
            "start_s": round(end_s - (window.end - window.start) / MICROSECONDS, 3),
            "end_s": round(end_s, 3),
            "score": window.score if window.HasField("score") else None,
            "done": window.done,
            "total": window.total,
        }
        return {"window": body}

    return await lines(gateway.calls.stream(f"{SERVICE}Replay", asked, timeout_s=body.timeout_s), line)


@router.on("POST /v1/rehearse", REHEARSE, Rehearsal)
async def rehearse_rule(body: Rehearse, gateway: Gateway) -> Reply:
    """The incidents that a rule would have opened from these scores."""
    windows = [ScoredWindow(*window) for window in body.windows]
    if wrong := next((each for each in windows if each.score > 1 or each.start_s >= each.end_s), None):
        raise ConfigError(f"a window is {list(astuple(wrong))}; it must be start, later end and a score from 0 to 1")
    for before, window in pairwise(windows):
        if window.end_s <= before.end_s:
            raise ConfigError("windows are not in order; send them oldest first")
    given = {name: value for name, value in body.rule.model_dump().items() if value is not None}
    rule = replace(gateway.rule, **given)
    return Reply({"incidents": [_incident(each) for each in simulate_incidents(windows, rule)], "rule": asdict(rule)})


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "start_s": incident.start / MICROSECONDS,
        "end_s": None if incident.open else incident.end / MICROSECONDS,
        "score": incident.score,
        "windows": incident.windows,
        "severity": incident.severity,
    }
