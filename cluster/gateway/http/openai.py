"""OpenAI chat protocol: ``model: camera/NAME`` asks that camera about what it has seen, ``model: fleet`` all cameras
that the token may see.

Clients send the whole conversation with every request; nothing is stored. Answers are greedy, whatever the sampling
parameters; system messages are prepended to the last question, since the model's prompt prefix is shared by all.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request, Response
from pydantic import ConfigDict, Field
from sightline.v1 import cameras_pb2, memory_pb2

from cluster.errors import ConfigError
from cluster.files import jsonable
from cluster.gateway.http.forms import ChatCompletion, Model, Models
from cluster.gateway.http.free_questions import ASK, ASK_ALL, answer_body, result_body, written
from cluster.gateway.http.replies import SSE, HttpError, Reply, Stream, openai_error
from cluster.gateway.http.routes import MAX_NUMBER, Body, Gateway, Routes
from cluster.security.roles import MODELS, current_principal
from cluster.wire.memory_wire import (
    MAX_TURNS,
    AskAllProgress,
    AskOutcome,
    CameraOutcome,
    check_camera,
    check_question,
    ranked,
)

PREFIX = "camera/"
FLEET = "fleet"
MOST_RANKED = 10
CAMERAS = "/sightline.v1.Cameras/"
TIMEOUT_S = 300.0
router = Routes()
_BEGAN_S = int(time.time())
Turns = list[tuple[str, str]]


class Open(Body):
    """Accepts unknown keys, since clients send whatever OpenAI adds."""

    model_config = ConfigDict(extra="allow")


class Part(Open):
    """A content part; only text is accepted."""

    type: str
    text: str = ""


class Message(Open):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class StreamOptions(Body):
    """``include_usage``: add a last chunk with token counts."""

    include_usage: bool = False


class Chat(Open):
    """The supported part of OpenAI's ``ChatCompletionRequest``; other keys are refused or ignored, see docs/api.md.
    ``since_s`` is an extension: restricts the question to this many seconds before the newest frame."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    n: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)


_NO_TOOLS, _TEXT = "a camera cannot call tools", "answers are text"
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, ([],)),
    "functions": ("a camera cannot call functions", ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "function_call": ("a camera cannot call functions", ("none", "auto")),
    "stop": ("stop sequences are not supported", ([],)),
    "logprobs": ("log probabilities are not available", (False,)),
    "audio": (_TEXT, ()),
    "response_format": ("answers are plain text", ({"type": "text"},)),
    "modalities": (_TEXT, (["text"],)),
    "web_search_options": ("a camera searches only its memory", ()),
}
"""Refused keys: the reason, and values that are accepted because they have no effect."""


def camera_of(model: str) -> str:
    """Camera of a model name. Raises ``HttpError``: 404, it names no camera."""
    name = model.removeprefix(PREFIX)
    if name == model or not name:
        raise HttpError(
            404, f"there is no model {model[:256]!r}; models are camera/NAME and fleet, as GET /v1/models lists them"
        )
    return check_camera(name)


def conversation(messages: Sequence[Message]) -> tuple[str, Turns]:
    """Last question, preceded by the system messages, and the turns before it. Raises ``ConfigError``: no question at
    the end, or content that is not text."""
    system: list[str] = []
    asked: list[str] = []
    turns: Turns = []
    for number, message in enumerate(messages):
        if message.role in ("tool", "function") or (message.model_extra or {}).get("tool_calls"):
            raise ConfigError("a camera cannot call tools; omit tool messages")
        text = _text(message, number)
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role == "user":
            asked.append(text)
        else:
            if asked:
                turns.append(("\n".join(asked), text))
            # An assistant message before the first question is dropped.
            asked = []
    if not asked:
        raise ConfigError("the last message must be the user's: it is the question")
    question = check_question("\n\n".join([*(each for each in system if each.strip()), "\n".join(asked)]))
    return question, [(check_question(text), answer) for text, answer in turns[-MAX_TURNS:]]


def check_extras(body: Chat) -> None:
    """Raises ``ConfigError``: an unsupported option would change the answer."""
    if (body.n or 1) > 1:
        raise ConfigError(f"n is {body.n}; it must be 1")
    for key, value in (body.model_extra or {}).items():
        why, harmless = _REFUSED.get(key, ("", (value,)))
        if value is not None and value not in harmless:
            raise ConfigError(f"{key}: {why}; omit it")


def _text(message: Message, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    for part in parts:
        if part.type != "text":
            raise ConfigError(
                f"messages.{number} contains {part.type[:40]!r}; "
                "only text is supported, and a camera answers from what it has seen"
            )
    return "\n".join(part.text for part in parts)


@dataclass(frozen=True, slots=True)
class FleetEnd:
    """End of an answer of the model ``fleet``."""

    answers: tuple[CameraOutcome, ...]
    progress: AskAllProgress


End = AskOutcome | FleetEnd


@router.on("POST /v1/chat/completions", ASK, ChatCompletion, errors=(404, 409, 504), openai=True)
async def chat(request: Request, body: Chat, gateway: Gateway) -> Response:
    """OpenAI's chat completions: the model camera/NAME answers from what the camera has seen; with stream: true, chunks
    are sent as server-sent events.
    """
    check_extras(body)
    most, longest = body.max_completion_tokens or body.max_tokens or 0, gateway.longest_answer
    if body.model == FLEET:
        question, _ = conversation(body.messages)
        # The route admitted a question to one camera; this one costs more.
        await gateway.request_guard.admit(request, ASK_ALL)
        every = memory_pb2.AskAllRequest(text=question, since_s=body.since_s, max_new_tokens=min(most, longest))
        return await _reply(body, fleet_text(gateway.answering.ask_all(every)), 0)
    camera, limit = camera_of(body.model), min(most or longest, longest)
    question, turns = conversation(body.messages)
    asked = memory_pb2.AskRequest(camera=camera, text=question, since_s=body.since_s, max_new_tokens=limit)
    asked.history.SetInParent()
    for text, answer in turns:
        asked.history.turns.add(question=text, answer=answer)
    return await _reply(body, gateway.answering.ask(asked, TIMEOUT_S), limit)


async def _reply(body: Chat, events: AsyncGenerator[str | End, None], limit: int) -> Response:
    """Send the answer, streamed or whole; ``limit``: its maximum number of tokens."""
    base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = Chunks(base, limit, usage)
        return await Stream.begin(written(events, chunks.write, lambda error: _data(openai_error(error))), SSE)
    *pieces, end = [event async for event in events]
    assert not isinstance(end, str)
    text = end.result.text if isinstance(end, AskOutcome) else "".join(map(str, pieces))
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(end, limit)}
    whole = {"choices": [choice], "usage": _usage(end), "sightline": _grounds(end)}
    return Reply({**base, "object": "chat.completion", **whole})


@router.on("GET /v1/models", MODELS, Models, openai=True)
async def models(gateway: Gateway) -> Reply:
    """The cameras as OpenAI models."""
    gateway.calls.check(f"{CAMERAS}List", cameras_pb2.ListCamerasRequest())
    sees = current_principal().sees
    names = [f"{PREFIX}{name}" for name in await gateway.live.list() if sees(name)]
    return Reply({"object": "list", "data": [_model(name) for name in (*names, FLEET)]})


@router.on("GET /v1/models/{model:path}", f"{CAMERAS}Get", Model, errors=(404,), openai=True)
async def model(model: str, gateway: Gateway) -> Reply:
    """One camera, or the fleet."""
    if model == FLEET:
        gateway.calls.check(f"{CAMERAS}List", cameras_pb2.ListCamerasRequest())
        return Reply(_model(FLEET))
    asked = cameras_pb2.GetCameraRequest(name=camera_of(model))
    return Reply(_model(f"{PREFIX}{(await gateway.calls.unary(f'{CAMERAS}Get', asked)).name}"))


async def fleet_text(
    events: AsyncGenerator[CameraOutcome | AskAllProgress, None],
) -> AsyncGenerator[str | FleetEnd, None]:
    """Answer as text: a line per camera that says yes, as they arrive, then the best moments and the number of
    answers."""
    answers, progress = [], AskAllProgress(0, 0, 0, 0, 0, False)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AskAllProgress):
                progress = event
                continue
            answers.append(event)
            if event.outcome is not None and event.outcome.result.says_yes:
                yield f"{event.camera}: {event.outcome.result.text} ({event.outcome.result.yes:.2f})\n"
    for number, each in enumerate(ranked(answers)[:MOST_RANKED], start=1):
        yield f"{number}. {each.camera}, {each.ago_s:.0f} s ago, rank {each.rank:.2f}: {each.text}\n"
    empty = f"; {progress.empty} with no memory of that time" if progress.empty else ""
    yield f"{progress.answered} of {progress.cameras} cameras answered{empty}.\n"
    yield FleetEnd(tuple(answers), progress)


def _grounds(end: End) -> dict[str, Any]:
    if isinstance(end, AskOutcome):
        return result_body(end)
    return {"progress": jsonable(end.progress), "answers": [answer_body(each) for each in end.answers]}


class Chunks:
    """Encodes an answer's events as chunks. ``limit``: its maximum number of tokens; ``usage``: add a usage chunk."""

    def __init__(self, base: dict[str, Any], limit: int, usage: bool) -> None:
        self._base = {**base, "object": "chat.completion.chunk"}
        self._limit, self._usage = limit, usage
        self._begun = False

    def write(self, event: str | End) -> bytes:
        """Chunks of one event; the first is preceded by the role, the last followed by ``[DONE]``."""
        head = b"" if self._begun else self._chunk({"role": "assistant", "content": ""})
        self._begun = True
        if isinstance(event, str):
            return head + self._chunk({"content": event})
        end = self._chunk({}, _finish(event, self._limit), sightline=_grounds(event))
        if self._usage:
            end += _data({**self._base, "choices": [], "usage": _usage(event)})
        return head + end + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _data({**self._base, "choices": [choice], **({"usage": None} if self._usage else {}), **more})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _BEGAN_S, "owned_by": "sightline"}


def _finish(end: End, limit: int) -> str:
    if isinstance(end, FleetEnd):
        return "stop"
    return "length" if end.result.answer_tokens >= limit else "stop"


def _usage(end: End) -> dict[str, int]:
    answers = (
        [end] if isinstance(end, AskOutcome) else [each.outcome for each in end.answers if each.outcome is not None]
    )
    asked = sum(each.result.prompt_tokens for each in answers)
    answered = sum(each.result.answer_tokens for each in answers)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _data(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
