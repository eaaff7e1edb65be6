"""HTTP replies: JSON, streamed bodies, and errors with a status and one sentence."""

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Self

import grpc
from fastapi import Request
from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import SightlineError
from cluster.files import jsonable
from cluster.wire.status import code_of, sentence_of


def encoded(value: Any) -> bytes:
    """Encode a value as JSON, like :func:`jsonable`; it must not contain bytes."""
    try:
        # Four times as fast as json, and it blocks the event loop. Without bytes: its base64 is the URL-safe variant.
        return to_json(value, inf_nan_mode="null", fallback=jsonable)
    except PydanticSerializationError:
        # Lone surrogates, which a source's name or a model's answer may contain, are not valid UTF-8.
        return json.dumps(jsonable(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Reply(JSONResponse):
    """JSON reply that must not be cached, since it depends on the token. A body of bytes is already JSON."""

    def __init__(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body, status, {"Cache-Control": "no-store", **(headers or {})})

    def render(self, content: Any) -> bytes:
        return (content if isinstance(content, bytes) else encoded(content)) + b"\n"


SSE = "text/event-stream"
_WORTH_PACKING = 16 * 2**10


async def packed(request: Request, response: Response) -> Response:
    """Compress the response if it is large and the client accepts gzip."""
    if len(response.body) >= _WORTH_PACKING and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.body = await asyncio.to_thread(gzip.compress, response.body, 6)
        response.headers.update({"Content-Encoding": "gzip", "Content-Length": str(len(response.body))})
    return response


class Stream(StreamingResponse):
    """A streamed body. A failure after the first piece aborts the reply; a disconnect closes the generator."""

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
        """Wait for the first piece, so that an earlier failure gets its own status."""
        headers = {"Content-Type": media, "Cache-Control": "no-store", **(headers or {})}
        return cls(await anext(pieces, b""), pieces, headers, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See ASGI. Cancelled when the client disconnects."""
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
"""gRPC status -> HTTP status; 500 for all others."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error"}
_OPENAI_CODES = {401: "invalid_api_key", 403: "permission_denied", 404: "model_not_found", 429: "rate_limit_exceeded"}


class HttpError(SightlineError):
    """An error of the HTTP layer, with its status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def status_of(error: BaseException) -> int:
    """HTTP status of an error; 500 for unexpected exceptions."""
    return error.status if isinstance(error, HttpError) else STATUS.get(code_of(error), 500)


def openai_error(error: BaseException, sentence: str = "") -> dict[str, Any]:
    """An error in OpenAI's format; ``sentence`` replaces its message."""
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # Only a camera, named by ``model``, can be missing on these routes.
    param = "model" if status == 404 else None
    body = {"message": sentence or sentence_of(error), "type": kind, "param": param, "code": _OPENAI_CODES.get(status)}
    return {"error": body}


def failure(error: BaseException, request_id: str, *, openai: bool) -> Reply:
    """``{"error": …}``, or OpenAI's format; internal errors refer to the log."""
    status = status_of(error)
    sentence = sentence_of(error)
    if status == 500:
        sentence = f"{sentence.rstrip('.')}; see request {request_id} in the gateway's log"
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return Reply(openai_error(error, sentence) if openai else {"error": sentence}, status, headers)
