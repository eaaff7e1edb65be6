"""Bodies of requests: bounded, JSON, of a closed form, and one sentence about what is wrong with one."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import ConfigError
from cluster.gateway.http.replies import HttpError

MAX_BODY_BYTES = 64 * 2**10
MAX_NUMBER = 10**9
STALL_S = 30.0
STALL: web.AppKey[float] = web.AppKey("stall_s", float)

T = TypeVar("T", bound="Body")


class Body(BaseModel):
    """A request's body: no key but these, no type but theirs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


async def read(request: web.Request, form: type[T]) -> T:
    """The request's body.

    Raises:
        HttpError: 408 late, 413 too large, 415 not said to be JSON.
        ConfigError: not JSON, or not of this form.
    """
    if request.content_type != "application/json":
        raise HttpError(415, "the request must have Content-Type: application/json")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _large()
    try:
        async with asyncio.timeout(request.app[STALL]):
            data = await request.read()
    except TimeoutError:
        raise HttpError(408, "the request ended before its Content-Length", Connection="close") from None
    except web.HTTPRequestEntityTooLarge:
        raise _large() from None
    except (web.RequestPayloadError, ValueError):
        raise HttpError(400, "the request's body cannot be read as it was sent") from None
    return parse(data, form)


def parse(data: bytes, form: type[T]) -> T:
    """The inside of :func:`read`; raises ``ConfigError``."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise ConfigError(f"the request must be a JSON object, not {type(body).__name__}")
    try:
        return form.model_validate(body)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(include_url=False)[0], form)) from None
    except RecursionError:
        raise ConfigError("the request is not JSON") from None


def number(request: web.Request, key: str, default: float = 0.0) -> float:
    """A number of the query, 0 or more. Raises ``ConfigError``."""
    text = request.query.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # `since_s` may be a date: seconds since 1970.
    if not 0 <= value <= 100 * MAX_NUMBER:
        raise ConfigError(f"{key} is {text[:80]!r}; it must be a number that is not negative")
    return value


def flag(request: web.Request, key: str) -> bool:
    """A switch of the query, 0 or 1. Raises ``ConfigError``."""
    text = request.query.get(key, "0")
    if text not in ("0", "1", "true", "false"):
        raise ConfigError(f"{key} is {text[:80]!r}; it is 0 or 1")
    return text in ("1", "true")


def _large() -> HttpError:
    return HttpError(413, f"the request is larger than {MAX_BODY_BYTES} bytes")


_KINDS = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a number",
}
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "int_parsing_size")


def _sentence(problem: Any, form: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    kind, value = str(problem["type"]), problem.get("input")
    if kind == "missing":
        explained = (form.model_fields[where].description or "") if where in form.model_fields else ""
        return f"{where} is missing{f'; {explained}' if explained else ''}"
    if kind == "extra_forbidden":
        outer = f" in {'.'.join(map(str, problem['loc'][:-1]))}" if len(problem["loc"]) > 1 else ""
        known = f"; there are: {', '.join(form.model_fields)}" if not outer else ""
        return f"unknown key {str(problem['loc'][-1])!r}{outer}{known}"
    if kind in _RANGES:
        limits = "; it must not be negative" if isinstance(value, (int, float)) and value < 0 else ""
        return f"{where} is out of range{limits or '; ' + str(problem['msg']).lower()}"
    if kind in _KINDS:
        return f"{where} is {json.dumps(value, default=str)[:80]}, which is not {_KINDS[kind]}"
    return f"{where} is wrong: {str(problem['msg'])[:200]}"
