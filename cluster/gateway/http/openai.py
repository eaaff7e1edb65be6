"""OpenAI's chat protocol: ``model: camera/NAME`` asks that camera about what it has seen, so that existing tools can.

A conversation is what its client sends, every time: nothing of it is kept here. Answers are greedy, whatever is said
about sampling; system messages are put before the last question, since the model's own beginning is shared by all.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web
from pydantic import ConfigDict, Field
from sightline.v1 import cameras_pb2, memory_pb2

from cluster.errors import ConfigError, SightlineError
from cluster.gateway.http.body import MAX_NUMBER, Body, read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.forms import ChatCompletion, Model, Models, Route
from cluster.gateway.http.memory import SERVICE, Answering, result_body
from cluster.gateway.http.replies import HttpError, headers_of, reply, status_of
from cluster.redaction import redact
from cluster.security.roles import MODELS
from cluster.wire.memory_wire import MAX_TURNS, Told, check_camera, check_question

PREFIX = "camera/"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
}
_CODES = {401: "invalid_api_key", 403: "permission_denied", 429: "rate_limit_exceeded"}

Turns = list[tuple[str, str]]


class Part(Body):
    """A piece of a message; only text is taken."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str = ""


class Message(Body):
    """One message of the conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class StreamOptions(Body):
    """``include_usage``: the last chunk counts the tokens."""

    include_usage: bool = False


class Chat(Body):
    """``ChatCompletionRequest`` as OpenAI has it, as far as a camera can answer; other keys are refused or have no
    effect, see docs/api.md. ``since_s`` is our own: only what was seen in so many seconds before the newest frame."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: list[Message] = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    n: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)


_REFUSED = {
    "tools": "a camera calls no tools",
    "functions": "a camera calls no functions",
    "tool_choice": "a camera calls no tools",
    "function_call": "a camera calls no functions",
    "stop": "answers end where they end; stop is not supported",
    "logprobs": "log probabilities are not given",
    "audio": "answers are text",
    "response_format": "answers are plain text",
    "modalities": "answers are text",
    "web_search_options": "a camera searches nothing but its memory",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "stop": ([],),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def camera_of(model: str) -> str:
    """The camera of a model's name.

    Raises:
        HttpError: 404, it is no camera.
    """
    name = model.removeprefix(PREFIX)
    if name == model or not name:
        raise HttpError(404, f"there is no model {model[:256]!r}; models are camera/NAME, as GET /v1/models lists them")
    return check_camera(name)


def conversation(messages: Sequence[Message]) -> tuple[str, Turns]:
    """The last question, what system messages say before it, and the turns before.

    Raises:
        ConfigError: no question at the end, or what is not text.
    """
    system: list[str] = []
    asked: list[str] = []
    turns: Turns = []
    for number, message in enumerate(messages):
        if message.role in ("tool", "function") or (message.model_extra or {}).get("tool_calls"):
            raise ConfigError("a camera calls no tools; leave tool messages away")
        text = _text(message, number)
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role == "user":
            asked.append(text)
        else:
            if asked:
                turns.append(("\n".join(asked), text))
            # A greeting before the first question is no answer to anything.
            asked = []
    if not asked:
        raise ConfigError("the last message must be the user's: it is the question")
    question = check_question("\n\n".join([*(each for each in system if each.strip()), "\n".join(asked)]))
    return question, [(check_question(said), answer) for said, answer in turns[-MAX_TURNS:]]


def error_body(error: BaseException) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read."""
    status = status_of(error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # Nothing else can be missing here: paths that are not there have the other form.
    missing = status == 404
    code = "model_not_found" if missing else _CODES.get(status)
    return {"error": {"message": redact(str(error)), "type": kind, "param": "model" if missing else None, "code": code}}


def openai_failure(error: BaseException, request_id: str) -> web.Response:
    """As :func:`cluster.gateway.http.replies.failure`, in OpenAI's form."""
    status = status_of(error)
    body = error_body(error)
    if status == 500:
        body["error"]["message"] += f"; the gateway's log has more under request {request_id}"
    return reply(body, status, headers_of(error))


def check_extras(body: Chat) -> None:
    """Raises ``ConfigError`` for what would change an answer, and no camera can do."""
    if (body.n or 1) > 1:
        raise ConfigError(f"n is {body.n}; there is one answer")
    for key, value in (body.model_extra or {}).items():
        if key in _REFUSED and value is not None and value not in _HARMLESS.get(key, ()):
            raise ConfigError(f"{key}: {_REFUSED[key]}; leave it away")


def _text(message: Message, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    for part in parts:
        if part.type != "text":
            raise ConfigError(
                f"messages.{number} holds {part.type[:40]!r}; "
                "a camera takes text only, and answers from what it has seen"
            )
    return "\n".join(part.text for part in parts)


TIMEOUT_S = 300.0
_CAMERAS = "/sightline.v1.Cameras/"


class OpenAiRoutes:
    """See :meth:`routes`. ``longest``: most tokens of an answer; who allows more gets as many."""

    def __init__(self, calls: Calls, answering: Answering, longest: int) -> None:
        self._calls = calls
        self._answering = answering
        self._longest = longest
        self._began_s = int(time.time())

    def routes(self) -> list[Route]:
        models = "/v1/models"
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                f"{SERVICE}Ask",
                self.chat,
                "OpenAI's chat completions: model camera/NAME answers from what the camera has seen; stream: true "
                "sends chunks as server-sent events.",
                ChatCompletion,
                body=Chat,
                errors=(404, 409, 504),
                openai=True,
            ),
            Route("GET", models, MODELS, self.models, "The cameras as OpenAI's models.", Models, openai=True),
            Route(
                "GET",
                f"{models}/{{model:.+}}",
                f"{_CAMERAS}Get",
                self.model,
                "One camera.",
                Model,
                errors=(404,),
                openai=True,
            ),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        found = await self._calls.unary(f"{_CAMERAS}List", cameras_pb2.ListCamerasRequest())
        return reply({"object": "list", "data": [self._model(camera.name) for camera in found.cameras]})

    async def model(self, request: web.Request) -> web.Response:
        asked = cameras_pb2.GetCameraRequest(name=camera_of(request.match_info["model"]))
        return reply(self._model((await self._calls.unary(f"{_CAMERAS}Get", asked)).name))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, Chat)
        check_extras(body)
        camera = camera_of(body.model)
        question, turns = conversation(body.messages)
        wanted = body.max_completion_tokens or body.max_tokens or self._longest
        asked = memory_pb2.AskRequest(
            camera=camera, text=question, since_s=body.since_s, max_new_tokens=min(wanted, self._longest)
        )
        asked.history.SetInParent()
        for said, answer in turns:
            asked.history.turns.add(question=said, answer=answer)
        reply_id = f"chatcmpl-{secrets.token_hex(12)}"
        base = {"id": reply_id, "created": int(time.time()), "model": body.model}
        async with self._answering.ask(asked, TIMEOUT_S) as events:
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return await self._streamed(request, base, events, asked.max_new_tokens, usage)
            told = [event async for event in events][-1]
        assert isinstance(told, Told)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": told.result.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _finish(told, asked.max_new_tokens),
        }
        whole = {
            **base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(told),
            "sightline": result_body(told),
        }
        return reply(whole)

    async def _streamed(
        self, request: web.Request, base: dict[str, Any], events: Any, limit: int, usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)

        async def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            body = {**base, "object": "chat.completion.chunk", "choices": [choice], **more}
            await response.write(_data(body))

        nothing = {"usage": None} if usage else {}
        try:
            await chunk({"role": "assistant", "content": ""}, **nothing)
            async for event in events:
                if isinstance(event, str):
                    await chunk({"content": event}, **nothing)
                    continue
                await chunk({}, _finish(event, limit), sightline=result_body(event), **nothing)
                if usage:
                    await response.write(
                        _data({**base, "object": "chat.completion.chunk", "choices": [], "usage": _usage(event)})
                    )
            await response.write(b"data: [DONE]\n\n")
        except SightlineError as error:
            await response.write(_data(error_body(error)))
        await response.write_eof()
        return response

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": f"{PREFIX}{name}", "object": "model", "created": self._began_s, "owned_by": "sightline"}


def _finish(told: Told, limit: int) -> str:
    return "length" if told.result.answer_tokens >= limit else "stop"


def _usage(told: Told) -> dict[str, int]:
    asked, answered = told.result.prompt_tokens, told.result.answer_tokens
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _data(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
