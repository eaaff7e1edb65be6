"""Free questions over HTTP: concurrency limit, and answers as newline-delimited JSON (``FreeQuestions``)."""

import base64
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from sightline.v1 import memory_pb2

from cluster.errors import SightlineError, UnavailableError
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.replies import Stream
from cluster.security.limits import ConcurrencyLimit
from cluster.wire.memory_wire import (
    AskAllProgress,
    AskOutcome,
    CameraOutcome,
    all_from_proto,
    outcome_body,
    outcome_from_proto,
)
from cluster.wire.status import sentence_of

log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
ASK = "/sightline.v1.Memory/Ask"
ASK_ALL = "/sightline.v1.Memory/AskAll"
Event = TypeVar("Event")


class FreeQuestions:
    """At most ``limit`` concurrent answers, to leave room for other requests."""

    def __init__(self, calls: InProcessCalls, limit: int = 32) -> None:
        self._calls = calls
        self._places = ConcurrencyLimit(limit, "questions are being answered over HTTP already; ask again later")

    async def ask(self, request: memory_pb2.AskRequest, timeout_s: float) -> AsyncGenerator[str | AskOutcome, None]:
        """Yield the answer's pieces, then its result. Raises ``CapacityError``: too many are running;
        ``SightlineError``: error of the camera's replica."""
        with self._places.taken():
            async with aclosing(self._calls.stream(ASK, request, timeout_s=timeout_s)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "result":
                        yield outcome_from_proto(event.result, request.camera)
                        return
                    yield event.piece
            raise UnavailableError("the gateway ended the answer without a result")

    async def ask_all(self, request: memory_pb2.AskAllRequest) -> AsyncGenerator[CameraOutcome | AskAllProgress, None]:
        """Yield the cameras' answers as they arrive, with progress. Raises ``SightlineError``."""
        async with aclosing(self._calls.stream(ASK_ALL, request)) as events:
            async for event in events:
                yield all_from_proto(event)


async def written(
    events: AsyncGenerator[Event, None],
    write: Callable[[Event], bytes],
    fail: Callable[[Exception], bytes],
) -> AsyncGenerator[bytes, None]:
    """Encode events as body pieces; a failure after the first one is encoded with ``fail``."""
    begun = False
    async with aclosing(events):
        try:
            async for event in events:
                yield write(event)
                begun = True
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, SightlineError):
                log.exception("an answer failed after it had begun")
            yield fail(error)


async def lines(events: AsyncGenerator[Event, None], body: Callable[[Event], dict[str, Any]]) -> Stream:
    """Stream events as newline-delimited JSON; a failure after the first one becomes a last line with ``error``."""
    pieces = written(events, lambda event: _line(body(event)), lambda error: _line({"error": sentence_of(error)}))
    return await Stream.begin(pieces, NDJSON)


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"


def result_body(outcome: AskOutcome) -> dict[str, Any]:
    """A result as JSON, with pictures in base64."""
    return outcome_body(outcome, [base64.b64encode(each).decode() if each else None for each in outcome.pictures])


def answer_body(answer: CameraOutcome) -> dict[str, Any]:
    """One camera's answer to a question to all, as JSON: the result, with rank and incident of each moment."""
    if answer.outcome is None:
        return {"camera": answer.camera, "error": answer.error, "empty": answer.empty}
    body = result_body(answer.outcome)
    for entry, incident in zip(body["moments"], answer.incidents, strict=True):
        entry |= {"rank": body["yes"] * entry["weight"], "incident": incident}
    return body
