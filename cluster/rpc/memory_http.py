"""The gateway's HTTP: ``/v1/ask``, ``/v1/forget`` and ``/v1/memory/CAMERA`` in JSON, beside what is served already.

Answers of ``/v1/ask`` are newline-delimited JSON: ``{"text": …}`` for every piece, then one ``{"result": …}``. What
fails before the first piece has a status and ``{"error": …}``; what fails later ends the lines with ``{"error": …}``.
A connection that the client closes stops the answer with its next piece.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from cluster.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    NotReadyError,
    SightlineError,
    UnauthenticatedError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.rpc.client import Metadata
from cluster.rpc.http_server import Application, Environ, StartResponse
from cluster.rpc.memory_client import MemoryClient
from cluster.rpc.memory_wire import Told, ago_s

MAX_BODY_BYTES = 64 * 2**10
MAX_NUMBER = 10**9
PREFIX = "/v1/"

_STATUS: tuple[tuple[type[SightlineError], str], ...] = (
    (UnknownCameraError, "404 Not Found"),
    (NotReadyError, "409 Conflict"),
    (ConfigError, "400 Bad Request"),
    (UnauthenticatedError, "401 Unauthorized"),
    (ForbiddenError, "403 Forbidden"),
    (CapacityError, "429 Too Many Requests"),
    (UnavailableError, "503 Service Unavailable"),
)
_ASK_KEYS: dict[str, tuple[type, ...]] = {
    "camera": (str,),
    "text": (str,),
    "conversation": (str,),
    "since_s": (int, float),
    "max_new_tokens": (int,),
    "with_pictures": (bool,),
    "timeout_s": (int, float),
}
_FORGET_KEYS: dict[str, tuple[type, ...]] = {"camera": (str,), "before_s": (int, float)}


class _RefusedError(SightlineError):
    """A request that is wrong as HTTP; ``status`` with its sentence."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class MemoryApi:
    """A WSGI application. Asks the gateway over gRPC, as every other client: one way in, one set of rules.

    Args:
        client: of this gateway; shared by all requests, closed by its owner.
        beside: gets every request that is not below ``/v1/``.
        max_asks: answers at once, fewer than the server's requests, so that ``beside`` always has some of them; one
            more is refused with 429.
    """

    def __init__(self, client: MemoryClient, beside: Application, *, max_asks: int = 32) -> None:
        self._client = client
        self._beside = beside
        self._max_asks = max_asks
        self._free = threading.BoundedSemaphore(max_asks)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        path = environ.get("PATH_INFO", "")
        if not path.startswith(PREFIX):
            return self._beside(environ, start_response)
        try:
            return self._answer(path.removeprefix(PREFIX), environ, start_response)
        except SightlineError as error:
            return _reply(start_response, {"error": str(error)}, _status_of(error))

    def _answer(self, path: str, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_ORIGIN" in environ:
            # No page of ours is served from here: without this, any page in a browser beside the gateway could ask.
            raise _RefusedError("403 Forbidden", "requests from web pages are not answered; ask from a program")
        name, _, rest = path.partition("/")
        if name == "ask" and not rest:
            body = _body(environ, _ASK_KEYS, needed=("camera", "text"))
            return self._ask(body, _metadata(environ), start_response)
        if name == "forget" and not rest:
            body = _body(environ, _FORGET_KEYS, needed=("camera", "before_s"))
            return _reply(start_response, asdict(self._client.forget(**body, metadata=_metadata(environ))))
        if name == "memory" and rest:
            _check_method(environ, "GET")
            # WSGI has the bytes of a path as Latin-1.
            camera = rest.encode("latin-1").decode("utf-8", "replace")
            return _reply(start_response, asdict(self._client.memory(camera, metadata=_metadata(environ))))
        raise _RefusedError(
            "404 Not Found",
            f"there is no {PREFIX}{quote(path, encoding='latin-1')}; there are: POST /v1/ask, POST /v1/forget, "
            "GET /v1/memory/CAMERA",
        )

    def _ask(self, body: dict[str, Any], metadata: Metadata, start_response: StartResponse) -> Iterator[bytes]:
        if not self._free.acquire(blocking=False):
            raise CapacityError(f"{self._max_asks} questions are being answered over HTTP already; ask again later")
        try:
            # Asked with the first piece, which decides over the status.
            events = self._client.ask(body.pop("camera"), body.pop("text"), **body, metadata=metadata)
            first = next(events)
        except BaseException:
            self._free.release()
            raise
        start_response("200 OK", [("Content-Type", "application/x-ndjson"), ("Cache-Control", "no-store")])
        return self._lines(first, events)

    def _lines(self, first: str | Told, events: Generator[str | Told, None, None]) -> Iterator[bytes]:
        try:
            yield _line(first)
            for event in events:
                yield _line(event)
        except SightlineError as error:
            yield json.dumps({"error": str(error)}).encode() + b"\n"
        finally:
            events.close()
            self._free.release()


def result_body(told: Told) -> dict[str, Any]:
    """A result as JSON; pictures in base64."""
    body = asdict(told.result)
    body["camera"] = body.pop("stream")
    body["conversation"] = told.conversation
    for moment, entry, picture in zip(told.result.moments, body["moments"], told.pictures, strict=True):
        entry["ago_s"] = ago_s(told.result, moment)
        if picture:
            entry["picture"] = base64.b64encode(picture).decode()
    return body


def _metadata(environ: Environ) -> Metadata:
    """The caller's own token goes on to gRPC, which decides."""
    header = environ.get("HTTP_AUTHORIZATION", "")
    return (("authorization", header),) if header.isascii() and header.isprintable() and header else ()


def _line(event: str | Told) -> bytes:
    body: dict[str, Any] = {"text": event} if isinstance(event, str) else {"result": result_body(event)}
    return json.dumps(body).encode() + b"\n"


def _reply(start_response: StartResponse, body: dict[str, Any], status: str = "200 OK") -> list[bytes]:
    data = json.dumps(body).encode() + b"\n"
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(data)))])
    return [data]


def _status_of(error: SightlineError) -> str:
    if isinstance(error, _RefusedError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), "500 Internal Server Error")


def _check_method(environ: Environ, wanted: str) -> None:
    if environ["REQUEST_METHOD"] != wanted:
        raise _RefusedError("405 Method Not Allowed", f"{environ['REQUEST_METHOD']} is not for this path; use {wanted}")


def _body(environ: Environ, keys: dict[str, tuple[type, ...]], needed: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object that was posted, with known keys of the right types only."""
    _check_method(environ, "POST")
    kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _RefusedError("415 Unsupported Media Type", "the request must have Content-Type: application/json")
    body = _json(environ)
    for key, value in body.items():
        if key not in keys:
            raise ConfigError(f"unknown key {key!r}; there are: {', '.join(keys)}")
        if not isinstance(value, keys[key]) or (isinstance(value, bool) and bool not in keys[key]):
            raise ConfigError(f"{key} is {json.dumps(value)[:80]}, which is not {_kind(keys[key])}")
        if isinstance(value, (int, float)) and not 0 <= value <= MAX_NUMBER:
            raise ConfigError(f"{key} is out of range; it must lie between 0 and {MAX_NUMBER:,}")
    for key in needed:
        if key not in body:
            explained = "; 0 forgets everything" if key == "before_s" else ""
            raise ConfigError(f"{key} is missing{explained}")
    return body


def _json(environ: Environ) -> dict[str, Any]:
    length = environ.get("CONTENT_LENGTH", "")
    if not length.isascii() or not length.isdigit():
        raise _RefusedError("411 Length Required", "the request must have a Content-Length")
    if int(length) > MAX_BODY_BYTES:
        raise _RefusedError("413 Content Too Large", f"the request is larger than {MAX_BODY_BYTES} bytes")
    data = b""
    with suppress(TimeoutError):
        data = environ["wsgi.input"].read(int(length))
    if len(data) < int(length):
        raise _RefusedError("408 Request Timeout", "the request ended before its Content-Length")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise ConfigError(f"the request must be a JSON object, not {type(body).__name__}")
    return body


def _kind(types: tuple[type, ...]) -> str:
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[types[-1]]
