"""``Route``: one thing the gateway answers over HTTP, with the rule that decides who gets it and what documents it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web
from pydantic import BaseModel

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = ""
"""The rule of what anybody may have: nothing that a camera saw is in it."""


@dataclass(frozen=True, slots=True)
class Query:
    """One key of a query; ``kind`` is a JSON type."""

    name: str
    text: str
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Route:
    """``method path``, as in ``GET /v1/cameras/{name}``.

    * ``rule``: key of :data:`cluster.security.roles.RULES`, or :data:`OPEN`
    * ``text``: what it does, one sentence
    * ``reply``: type of the JSON reply, ``None`` where ``media`` says what it is
    * ``body``: of the request; ``errors``: statuses that it may have besides 400, 401, 403, 429 and 503
    * ``openai``: errors have the form that OpenAI's clients read
    """

    method: str
    path: str
    rule: str
    handler: Handler
    text: str
    reply: Any = None
    media: str = "application/json"
    body: type[BaseModel] | None = None
    query: tuple[Query, ...] = ()
    errors: tuple[int, ...] = ()
    openai: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"
