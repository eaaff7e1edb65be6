"""OpenAI's chat protocol as messages: what a request may say, and what it means for a camera."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web
from pydantic import ConfigDict, Field

from cluster.errors import ConfigError
from cluster.gateway.http.body import MAX_NUMBER, Body
from cluster.gateway.http.replies import HttpError, headers_of, reply, status_of
from cluster.redaction import redact
from cluster.wire.memory_wire import MAX_TURNS, check_camera, check_question

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
