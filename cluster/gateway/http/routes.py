"""Base of all routes: access rule, bounded and strictly typed bodies and queries, one-sentence validation errors
(``Routes``).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.types import Message

from cluster.alerts.tracker import Rule
from cluster.errors import ConfigError
from cluster.gateway.console import Files
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.forms import Failure, OpenAiFailure
from cluster.gateway.http.free_questions import FreeQuestions
from cluster.gateway.http.live import Live
from cluster.gateway.http.replies import HttpError, Reply, packed
from cluster.gateway.http.request_guard import OPEN, OPENAI, RequestGuard

MAX_BODY_BYTES = 64 * 2**10
MAX_NUMBER = 10**9
STALL_S = 30.0
PING_S = 15.0


@dataclass(frozen=True, slots=True)
class Backend:
    """State shared by all routes.

    * ``calls``, ``live``: the gateway's services; the last known cameras, replicas and answers
    * ``files``, ``registry``: the console's files; metrics of ``/metrics``
    * ``longest_answer``: the cluster's limit of tokens per answer
    * ``rule``: default incident rule of questions
    * ``ping_s``: interval of pings to browsers; ``stall_s``: timeout of reading a request body
    """

    request_guard: RequestGuard
    calls: InProcessCalls
    live: Live
    answering: FreeQuestions
    files: Files
    registry: CollectorRegistry
    longest_answer: int
    rule: Rule
    ping_s: float
    stall_s: float


async def _backend(request: Request) -> Any:
    return request.app.state.backend


Gateway = Annotated[Backend, Depends(_backend)]
"""Type of a route's parameter that receives the backend."""


class Route(APIRoute):
    """Admits the caller before the body is read."""

    @property
    def rule(self) -> str:
        """Key of :data:`cluster.security.roles.RULES`, or :data:`OPEN`."""
        return str((self.openapi_extra or {})["x-rule"])

    @property
    def method(self) -> str:
        return "".join(self.methods or ())

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            backend: Backend = request.app.state.backend
            await backend.request_guard.admit(request, self.rule)
            known = [each.alias for each in self.dependant.query_params]
            # Sign-in providers, OpenAI clients and scrapers add their own parameters.
            strict = self.rule != OPEN and not self.path.startswith((*OPENAI, "/metrics"))
            if strict and not request.query_params.keys() <= set(known):
                # Not quoted: it may be a secret, and errors are logged.
                raise ConfigError(f"unknown parameter; there are: {', '.join(known) or 'none'}")
            if self.body_field is not None:
                request = await _read(request, backend.stall_s, int((self.openapi_extra or {})["x-body-bytes"]))
            try:
                response = await handle(request)
            except RecursionError:
                raise ConfigError("the request is not JSON") from None
            return await packed(request, response) if isinstance(response, Reply) else response

        return guarded


Handler = TypeVar("Handler", bound=Callable[..., Any])

_RESPONSES = {
    206: "The range requested by Range.",
    304: "Not modified: it matches If-None-Match.",
    400: "The request is invalid.",
    401: "No token, or it is unknown or expired.",
    403: "The token does not permit this, or not for this camera; or the request came from another web page.",
    404: "Not found.",
    409: "Not possible in the present state.",
    416: "The range is not satisfiable.",
    429: "Too many requests, or no capacity.",
    503: "Another process is temporarily unavailable.",
    504: "Timed out.",
}


class Routes(APIRouter):
    """Routes of one topic, which the application includes unchanged."""

    def __init__(self) -> None:
        super().__init__(route_class=Route)

    def on(
        self,
        route: str,
        rule: str = OPEN,
        reply: Any = None,
        *,
        media: str = "application/json",
        errors: tuple[int, ...] = (),
        openai: bool = False,
        body_bytes: int = MAX_BODY_BYTES,
    ) -> Callable[[Handler], Handler]:
        """Register the decorated function, whose docstring is published in the OpenAPI document.

        Args:
            route: method and path, like ``GET /v1/cameras/{name}``.
            rule: see :attr:`Route.rule`.
            reply: type of the JSON reply; None: not JSON.
            media: media type of the reply.
            errors: possible statuses besides 200, 400, 401, 403, 429 and 503.
            openai: errors have OpenAI's format.
            body_bytes: size limit of the request body.
        """
        method, _, path = route.partition(" ")
        failure = OpenAiFailure if openai else Failure
        statuses = {400, 403, 503, *errors, *(() if rule == OPEN else (401, 429))}
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": failure if status >= 400 else None, "description": _RESPONSES[status]}
            for status in sorted(statuses)
        }
        return self.api_route(
            path,
            methods=[method],
            response_model=reply,
            response_description="Done.",
            responses={**responses, "default": {"model": failure, "description": "Another error."}},
            openapi_extra={
                "x-rule": rule,
                "x-media": media,
                "x-body-bytes": body_bytes,
                "security": [] if rule == OPEN else [{"token": []}, {"session": []}],
            },
        )


class Body(BaseModel):
    """Base of request bodies: unknown keys and type coercion are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        # Lone surrogates, which protobuf cannot encode.
        raise ValueError("not text; send UTF-8") from None
    return value


def _flag(value: object) -> bool:
    if value not in ("0", "1", "true", "false", False):
        raise ValueError("it must be 0 or 1")
    return value in ("1", "true")


Text = Annotated[str, AfterValidator(_text)]
Flag = Annotated[bool, BeforeValidator(_flag), WithJsonSchema({"type": "boolean"})]
Number = Annotated[float, Query(ge=0, le=100 * MAX_NUMBER, allow_inf_nan=False)]
"""The upper limit admits Unix times, for ``since_s``."""
Count = Annotated[int, Query(ge=0)]


async def _read(request: Request, stall_s: float, most: int) -> Request:
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "the request must have Content-Type: application/json")
    data = bytearray()
    too_large = int(request.headers.get("Content-Length", 0)) > most
    try:
        async with asyncio.timeout(stall_s):
            while not too_large and (message := await request.receive())["type"] == "http.request":
                data += message.get("body", b"")
                too_large = len(data) > most
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise HttpError(408, "the request ended before its Content-Length", Connection="close") from None
    if too_large:
        raise HttpError(413, f"the request is larger than {most} bytes")

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(data)}

    return Request(request.scope, receive)


async def no_route(request: Request, error: HTTPException) -> NoReturn:
    """Error for an unknown path, or a method that the path does not have."""
    if error.status_code not in (404, 405):
        # FastAPI's own error about an unreadable body.
        raise ConfigError("the request is not JSON")
    path, raw_path = request.scope["path"], request.scope.get("raw_path", b"").decode("latin-1")
    methods = {each.method for each in request.app.routes if each.path_regex.match(path)}
    if methods:
        use = ", ".join(sorted(methods))
        raise HttpError(405, f"{request.method} is not allowed here; use {use}", Allow=use)
    raise HttpError(404, f"there is no {raw_path}; see /v1/openapi.json")


_KINDS = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a number",
}
_SECRETS = {"password", "token", "source"}
"""Fields whose values must not appear in replies or logs."""
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "int_parsing_size")


async def wrong_form(request: Request, error: RequestValidationError) -> NoReturn:
    """Turn a validation error of a query or body into one sentence about its first problem."""
    problem = error.errors()[0]
    place, *where = problem["loc"]
    if place != "body":
        expected = problem.get("ctx", {}).get("error", "it must be a number that is not negative")
        raise ConfigError(f"{where[0]} is {str(problem['input'])[:80]!r}; {expected}")
    if problem["type"] == "json_invalid" or (problem["type"] == "missing" and not where):
        raise ConfigError("the request is not JSON")
    if not where:
        raise ConfigError(f"the request must be a JSON object, not {type(problem['input']).__name__}")
    form = request.scope["route"].body_field.field_info.annotation
    raise ConfigError(_sentence(problem, [str(part) for part in where], form))


def _quoted(value: object, path: Sequence[str]) -> str:
    """The offending value for the error message; empty if it is, or may contain, a secret."""
    if _SECRETS.intersection(path) or (value and isinstance(value, dict | list)):
        return ""
    return f"{json.dumps(value, default=str)[:80]}, which is "


def _sentence(problem: Mapping[str, Any], path: list[str], form: type[BaseModel]) -> str:
    where, kind, value = ".".join(path), str(problem["type"]), problem.get("input")
    if kind == "missing":
        explained = (form.model_fields[where].description or "") if where in form.model_fields else ""
        return f"{where} is missing{f'; {explained}' if explained else ''}"
    if kind == "extra_forbidden":
        rest = f" in {'.'.join(path[:-1])}" if len(path) > 1 else f"; there are: {', '.join(form.model_fields)}"
        return f"unknown key {path[-1]!r}{rest}"
    if kind in _RANGES:
        negative = isinstance(value, int | float) and value < 0
        return f"{where} is out of range; {'it must not be negative' if negative else str(problem['msg']).lower()}"
    if kind in _KINDS:
        return f"{where} is {_quoted(value, path)}not {_KINDS[kind]}"
    if kind == "value_error":
        return f"{where} is {problem['ctx']['error']}"
    return f"{where} is invalid: {str(problem['msg'])[:200]}"
