"""Questions over HTTP: what one would have answered in the past, and which incidents a rule makes of scores.

Lines of ``/v1/replay`` are newline-delimited JSON: ``{"window": …}`` for each past window. What fails before the first
has a status and ``{"error": …}``; what fails later ends the lines with ``{"error": …}``. A connection that the client
closes stops the replay.
"""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, astuple, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field
from sightline.v1 import memory_pb2

from cluster.alerts.incident import Incident
from cluster.alerts.rehearsal import ScoredWindow, rehearse
from cluster.errors import ConfigError, SightlineError
from cluster.gateway.http.forms import Rehearsal, ReplayLine
from cluster.gateway.http.memory import NDJSON
from cluster.gateway.http.replies import Reply, Stream
from cluster.gateway.http.routes import MAX_NUMBER, Body, Gateway, Routes
from cluster.security.roles import REHEARSE
from cluster.types import MICROSECONDS
from cluster.wire.memory_wire import check_camera, check_question

REPLAY = "/sightline.v1.Memory/Replay"
MOST_WINDOWS = 1000
router = Routes()

Number = Annotated[float, Field(ge=0, le=100 * MAX_NUMBER)]
Window = Annotated[list[Number], Field(min_length=3, max_length=3)]


class Replay(Body):
    """A yes/no question and the past of a camera; see ``ReplayRequest`` in protos/sightline/v1/memory.proto."""

    camera: str
    text: str
    since_s: float = Field(default=3600.0, ge=0, le=MAX_NUMBER)
    windows: int = Field(default=0, ge=0, le=MAX_NUMBER)
    timeout_s: float = Field(default=300.0, ge=0, le=MAX_NUMBER)


class RehearsedRule(Body):
    """Keys of a question that make incidents; null: as in the cluster's alerts section."""

    threshold: float = Field(default=0.5, gt=0, lt=1)
    consecutive: int | None = Field(default=None, ge=1, le=1000)
    cooldown_s: float | None = Field(default=None, ge=0, le=MAX_NUMBER)
    severity: Literal["info", "warning", "critical"] | None = None


class Rehearse(Body):
    """Windows (begin and end in seconds of any one clock, score), oldest first, and the rule to apply."""

    windows: list[Window] = Field(max_length=MOST_WINDOWS)
    rule: RehearsedRule = Field(default_factory=RehearsedRule)


@router.on("POST /v1/replay", REPLAY, ReplayLine, media=NDJSON, errors=(404, 409, 504))
async def replay(body: Replay, gateway: Gateway) -> Stream:
    """What a yes/no question would have answered on a camera's past windows, line by line."""
    asked = memory_pb2.ReplayRequest(
        camera=check_camera(body.camera), text=check_question(body.text), since_s=body.since_s, windows=body.windows
    )
    windows = gateway.calls.stream(REPLAY, asked, timeout_s=body.timeout_s)
    return await Stream.begin(_lines(windows), NDJSON)


@router.on("POST /v1/rehearse", REHEARSE, Rehearsal)
async def rehearse_rule(body: Rehearse, gateway: Gateway) -> Reply:
    """The incidents that a question's rule would have made of these scores."""
    windows = [ScoredWindow(*window) for window in body.windows]
    if wrong := next((each for each in windows if each.score > 1 or each.start_s >= each.end_s), None):
        raise ConfigError(f"a window is {list(astuple(wrong))}; it is begin, a later end, and a score of 0 to 1")
    for before, window in pairwise(windows):
        if window.end_s <= before.end_s:
            raise ConfigError("windows are not in order; send them oldest first")
    given = {name: value for name, value in body.rule.model_dump().items() if value is not None}
    rule = replace(gateway.rule, **given)
    return Reply({"incidents": [_incident(each) for each in rehearse(windows, rule)], "rule": asdict(rule)})


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "start_s": incident.start / MICROSECONDS,
        "end_s": None if incident.open else incident.end / MICROSECONDS,
        "score": incident.score,
        "windows": incident.windows,
        "severity": incident.severity,
    }


async def _lines(windows: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """Times become Unix times by when the newest frame is: now."""
    begun = False
    now_s = time.time()
    async with aclosing(windows):
        try:
            async for each in windows:
                end_s = now_s - each.ago_s
                window = {
                    "start_s": round(end_s - (each.end - each.start) / MICROSECONDS, 3),
                    "end_s": round(end_s, 3),
                    "score": each.score if each.HasField("score") else None,
                    "done": each.done,
                    "total": each.total,
                }
                yield _json({"window": window})
                begun = True
        except SightlineError as error:
            if not begun:
                raise
            yield _json({"error": str(error)})


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"
