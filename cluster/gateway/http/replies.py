"""Replies: JSON, bodies that come in pieces, and every error with its status and one sentence."""

import asyncio
import base64
import functools
import gzip
import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from typing import Any, Self

import grpc
from fastapi import Request
from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import SightlineError
from cluster.wire.status import code_of, sentence_of


def jsonable(value: Any) -> Any:
    """Dictionaries, lists, text and numbers; what is no number (an infinite age) is None, as JSON knows none, and bytes
    are base64."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: jsonable(getattr(value, name)) for name in _names(type(value))}
    raise TypeError(f"{type(value).__name__} has no JSON form")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def encoded(value: Any) -> bytes:
    """JSON of :func:`jsonable`, of a value without bytes."""
    try:
        # Four times as fast, and the event loop waits for it; its base64 would be that of addresses.
        return to_json(value, inf_nan_mode="null", fallback=jsonable)
    except PydanticSerializationError:
        # Halves of characters, which a source's name or a model's answer may have, are no UTF-8.
        return json.dumps(jsonable(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Reply(JSONResponse):
    """JSON that nobody keeps: it may be for one token's eyes only. A body of bytes is JSON already."""

    def __init__(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body, status, {"Cache-Control": "no-store", **(headers or {})})

    def render(self, content: Any) -> bytes:
        return (content if isinstance(content, bytes) else encoded(content)) + b"\n"


SSE = "text/event-stream"
_WORTH_PACKING = 16 * 2**10


async def packed(request: Request, response: Response) -> Response:
    """The response, compressed where that is worth it and the client can read it."""
    if len(response.body) >= _WORTH_PACKING and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.body = await asyncio.to_thread(gzip.compress, response.body, 6)
        response.headers.update({"Content-Encoding": "gzip", "Content-Length": str(len(response.body))})
    return response


class Stream(StreamingResponse):
    """A body in pieces. What fails after the first one breaks the reply off; when the client leaves, the pieces end."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str], status: int
    ) -> None:
        super().__init__(rest, status, headers)
        self._first, self._rest = first, rest

    @classmethod
    async def begin(
        cls,
        pieces: AsyncGenerator[bytes, None],
        media: str,
        headers: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> Self:
        """With the first piece there already: what fails before it has a status of its own."""
        headers = {"Content-Type": media, "Cache-Control": "no-store", **(headers or {})}
        return cls(await anext(pieces, b""), pieces, headers, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See ASGI. A client that leaves cancels this, wherever it is."""
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if not scope.get("head"):
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for piece in self._rest:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


Code = grpc.StatusCode

STATUS: Mapping[grpc.StatusCode, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""gRPC's status -> HTTP's; 500 for the others."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error"}
_OPENAI_CODES = {401: "invalid_api_key", 403: "permission_denied", 404: "model_not_found", 429: "rate_limit_exceeded"}


class HttpError(SightlineError):
    """A request that is wrong as HTTP; ``status`` with its sentence."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def status_of(error: BaseException) -> int:
    """The status of an error; 500 for what was not raised on purpose."""
    return error.status if isinstance(error, HttpError) else STATUS.get(code_of(error), 500)


def openai_error(error: BaseException, sentence: str = "") -> dict[str, Any]:
    """An error in the form that OpenAI's clients read; ``sentence`` in place of its own."""
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # Nothing but a camera can be missing where this form is read.
    param = "model" if status == 404 else None
    told = {"message": sentence or sentence_of(error), "type": kind, "param": param, "code": _OPENAI_CODES.get(status)}
    return {"error": told}


def failure(error: BaseException, request_id: str, *, openai: bool) -> Reply:
    """``{"error": …}``, or OpenAI's form; what is our own mistake says where its story is."""
    status = status_of(error)
    sentence = sentence_of(error)
    if status == 500:
        sentence = f"{sentence.rstrip('.')}; the gateway's log has more under request {request_id}"
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return Reply(openai_error(error, sentence) if openai else {"error": sentence}, status, headers)
