"""Replies: JSON, and every error with its status and one sentence."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import grpc
from aiohttp import web

from cluster.errors import SightlineError
from cluster.redaction import redact
from cluster.wire.status import code_of


def plain(value: Any) -> Any:
    """Dictionaries, lists, text and numbers; what is no number (an infinite age) is None, as JSON knows none."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    raise TypeError(f"{type(value).__name__} has no JSON form")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


Code = grpc.StatusCode

STATUS: Mapping[grpc.StatusCode, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 416,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""gRPC's status -> HTTP's; 500 for the others."""

_WORTH_PACKING = 16 * 2**10


class HttpError(SightlineError):
    """A request that is wrong as HTTP; ``status`` with its sentence."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def status_of(error: BaseException) -> int:
    """The status of an error; 500 for what was not raised on purpose."""
    return error.status if isinstance(error, HttpError) else STATUS.get(code_of(error), 500)


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON that nobody keeps: it may be for one token's eyes only."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    # Halves of characters, which a source's name or a model's answer may have, are no UTF-8.
    data = text.encode("utf-8", "replace") + b"\n"
    response = web.Response(
        body=data,
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )
    if len(data) >= _WORTH_PACKING:
        response.enable_compression()
    return response


def failure(error: BaseException, request_id: str) -> web.Response:
    """``{"error": …}``; what is our own mistake says where its story is."""
    status = status_of(error)
    sentence = redact(str(error)) or type(error).__name__
    if status == 500:
        sentence = f"{sentence.rstrip('.')}; the gateway's log has more under request {request_id}"
    return reply({"error": sentence}, status, headers_of(error))


def headers_of(error: BaseException) -> dict[str, str]:
    """What a client is told beside the sentence: how to come in, or when to come back."""
    status = status_of(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return headers
