"""Memories over HTTP: a question about the past answered line by line, forgetting, and what is remembered.

Answers of ``/v1/ask`` are newline-delimited JSON: ``{"text": …}`` for every piece, then one ``{"result": …}``. What
fails before the first piece has a status and ``{"error": …}``; what fails later ends the lines with ``{"error": …}``.
A connection that the client closes stops the answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from pydantic import Field
from sightline.v1 import memory_pb2

from cluster.errors import CapacityError, SightlineError, UnavailableError
from cluster.gateway.http.body import MAX_NUMBER, Body, read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.cameras import name_of
from cluster.gateway.http.forms import AskLine, Route
from cluster.gateway.http.replies import plain, reply
from cluster.types import MemoryStatus
from cluster.wire.memory_wire import (
    ForgottenCamera,
    Told,
    ago_s,
    check_camera,
    check_name,
    check_question,
    forgotten_from_proto,
    status_from_proto,
    told_from_proto,
)

SERVICE = "/sightline.v1.Memory/"


class Ask(Body):
    """A question about what a camera has seen; see ``AskRequest`` in protos/sightline/v1/memory.proto."""

    camera: str
    text: str
    conversation: str = ""
    since_s: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_new_tokens: int = Field(default=0, ge=0, le=MAX_NUMBER)
    with_pictures: bool = False
    timeout_s: float = Field(default=120.0, ge=0, le=MAX_NUMBER)


class Forget(Body):
    """What a camera is to forget."""

    camera: str
    before_s: float = Field(ge=0, le=MAX_NUMBER, description="0 forgets everything")


class Answering:
    """Answers under way over HTTP: at most ``limit``, so that there is room for everything else.

    ``calls``: the gateway's services.
    """

    def __init__(self, calls: Calls, limit: int = 32) -> None:
        self._calls = calls
        self._limit = limit
        self.under_way = 0

    @asynccontextmanager
    async def ask(
        self, request: memory_pb2.AskRequest, timeout_s: float
    ) -> AsyncIterator[AsyncGenerator[str | Told, None]]:
        """The answer's pieces, then how it came about; the first is there already, so that it has not been refused.

        Raises:
            CapacityError: too many are under way.
            SightlineError: what the camera's replica says.
        """
        if self.under_way >= self._limit:
            raise CapacityError(f"{self._limit} questions are being answered over HTTP already; ask again later")
        self.under_way += 1
        try:
            events = self._events(request, timeout_s)
            try:
                first = await anext(events)
                yield _with_first(first, events)
            finally:
                await events.aclose()
        finally:
            self.under_way -= 1

    async def _events(self, request: memory_pb2.AskRequest, timeout_s: float) -> AsyncGenerator[str | Told, None]:
        stream: Any = self._calls.stream(f"{SERVICE}Ask", request, timeout_s=timeout_s)
        try:
            async for event in stream:
                if event.WhichOneof("event") == "result":
                    yield told_from_proto(event.result, request.camera)
                    return
                yield event.piece
        finally:
            await stream.aclose()
        raise UnavailableError("the gateway ended the answer without a result")


async def _with_first(first: str | Told, rest: AsyncGenerator[str | Told, None]) -> AsyncGenerator[str | Told, None]:
    yield first
    async for event in rest:
        yield event


class MemoryRoutes:
    """See :meth:`routes`."""

    def __init__(self, calls: Calls, answering: Answering) -> None:
        self._calls = calls
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/ask",
                f"{SERVICE}Ask",
                self.ask,
                "Ask a camera about what it has seen; the answer comes line by line.",
                AskLine,
                media="application/x-ndjson",
                body=Ask,
                errors=(404, 409, 504),
            ),
            Route(
                "POST",
                "/v1/forget",
                f"{SERVICE}Forget",
                self.forget,
                "Make a camera forget: its memory, its footage and what was recorded of its incidents.",
                ForgottenCamera,
                body=Forget,
                errors=(404,),
            ),
            Route(
                "GET",
                "/v1/memory/{name}",
                f"{SERVICE}Describe",
                self.describe,
                "What a camera remembers.",
                MemoryStatus,
                errors=(404, 409),
            ),
        ]

    async def ask(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, Ask)
        asked = memory_pb2.AskRequest(
            camera=check_camera(body.camera),
            text=check_question(body.text),
            conversation=check_name(body.conversation, "the conversation"),
            since_s=body.since_s,
            max_new_tokens=min(body.max_new_tokens, 2**32 - 1),
            with_pictures=body.with_pictures,
        )
        async with self._answering.ask(asked, body.timeout_s) as events:
            response = web.StreamResponse(headers={"Cache-Control": "no-store", "Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            try:
                async for event in events:
                    await response.write(_line(event))
            except SightlineError as error:
                await response.write(json.dumps({"error": str(error)}).encode() + b"\n")
            await response.write_eof()
            return response

    async def forget(self, request: web.Request) -> web.Response:
        body = await read(request, Forget)
        asked = memory_pb2.ForgetRequest(camera=check_camera(body.camera), before_s=body.before_s)
        done = await self._calls.unary(f"{SERVICE}Forget", asked)
        return reply(plain(forgotten_from_proto(done)))

    async def describe(self, request: web.Request) -> web.Response:
        asked = memory_pb2.DescribeRequest(camera=check_camera(name_of(request)))
        return reply(plain(status_from_proto(await self._calls.unary(f"{SERVICE}Describe", asked))))


def result_body(told: Told) -> dict[str, Any]:
    """A result as JSON; pictures in base64."""
    body: dict[str, Any] = plain(told.result)
    body["camera"] = body.pop("stream")
    body["conversation"] = told.conversation
    for moment, entry, picture in zip(told.result.moments, body["moments"], told.pictures, strict=True):
        entry["ago_s"] = ago_s(told.result, moment)
        if picture:
            entry["picture"] = base64.b64encode(picture).decode()
    return body


def _line(event: str | Told) -> bytes:
    body: dict[str, Any] = {"text": event} if isinstance(event, str) else {"result": result_body(event)}
    return json.dumps(body).encode() + b"\n"
