"""Replicas and fleet totals (capacity, lag, quality ladder) over HTTP, from the last known state; live events as
server-sent events.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import Query, Request
from sightline.v1 import replicas_pb2

from cluster.gateway.http.forms import Fleet, Replicas
from cluster.gateway.http.replies import SSE, Reply, Stream
from cluster.gateway.http.request_guard import names
from cluster.gateway.http.routes import Backend, Body, Gateway, Routes
from cluster.security.roles import EVENTS, FLEET, current_principal
from cluster.types import CameraStatus
from cluster.types.reports import ReplicaStatus
from cluster.wire.mapping import from_message

SERVICE = "/sightline.v1.Replicas/"
PACE_S = 0.1
"""Interval, in seconds, over which events are batched."""
_WINDOWS = ("done", "gated", "dropped", "lost")
_TOKENS = ("full", "kept", "computed")
router = Routes()


class Drain(Body):
    """``undo``: let the replica take cameras again."""

    undo: bool = False


@router.on("GET /v1/replicas", f"{SERVICE}List", Replicas)
async def list_replicas(gateway: Gateway) -> Reply:
    """The replicas."""
    found = await gateway.calls.unary(f"{SERVICE}List", replicas_pb2.ListReplicasRequest())
    return Reply({"replicas": [from_message(ReplicaStatus, each) for each in found.replicas]})


@router.on("POST /v1/replicas/{name}/drain", f"{SERVICE}Drain", ReplicaStatus, errors=(404, 409))
async def drain(name: str, body: Drain, gateway: Gateway) -> Reply:
    """Move all cameras off a replica, or end its drain."""
    asked = replicas_pb2.DrainReplicaRequest(name=name, undo=body.undo)
    return Reply(from_message(ReplicaStatus, await gateway.calls.unary(f"{SERVICE}Drain", asked)))


@router.on("GET /v1/fleet", FLEET, Fleet)
async def fleet(gateway: Gateway) -> Reply:
    """Capacity, lag and quality ladder of all cameras."""
    live, sees = gateway.live, current_principal().sees
    body = summary([status for name, status in live.cameras.items() if sees(name)])
    # Infinite (JSON: null) before the first poll.
    seen_ago_s = round(time.monotonic() - live.seen_s, 3)
    return Reply({**body, "replicas": live.replicas, "seen_ago_s": seen_ago_s, "trouble": live.trouble})


def summary(cameras: Sequence[CameraStatus]) -> dict[str, Any]:
    """Totals over cameras; lags are of running cameras that have answered."""
    lags = sorted(status.latency_s for status in cameras if status.state == "running" and status.latency_s > 0)
    return {
        "cameras": len(cameras),
        "states": Counter(status.state for status in cameras),
        "rungs": Counter(status.rung for status in cameras),
        "priorities": Counter(status.priority for status in cameras),
        "windows_per_s": round(sum(status.windows_per_s for status in cameras), 4),
        "lag": {
            "cameras": len(lags),
            "median_s": _quantile(lags, 0.5),
            "p95_s": _quantile(lags, 0.95),
            "highest_s": _quantile(lags, 1.0),
            "expected_highest_s": max((status.expected_lag_s for status in cameras), default=0.0),
        },
        "windows": {key: sum(getattr(status, f"windows_{key}") for status in cameras) for key in _WINDOWS},
        "tokens": {key: sum(getattr(status, f"tokens_{key}") for status in cameras) for key in _TOKENS},
        "memory_bytes": sum(status.memory_bytes for status in cameras),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Smallest value that the share ``share`` does not exceed (nearest rank); 0 if empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


Only = Annotated[str, Query(description="Comma-separated names; default: all that the token may see.")]


@router.on("GET /v1/events", EVENTS, media=SSE)
async def events(request: Request, gateway: Gateway, cameras: Only = "") -> Stream:
    """Live events: camera (a changed CameraStatus), answer, incident, removed, trouble (why the gateway cannot see the
    cameras), and missed (how many events a slow reader lost). Fetch the cameras after the first event to miss
    nothing.
    """
    pieces = _events(gateway, frozenset(names(cameras)), request)
    return await Stream.begin(pieces, SSE, {"X-Accel-Buffering": "no"})


async def _events(gateway: Backend, wanted: frozenset[str], request: Request) -> AsyncGenerator[bytes, None]:
    principal = current_principal()
    loop = asyncio.get_running_loop()
    with gateway.live.feed.read(
        lambda camera: not camera or ((not wanted or camera in wanted) and principal.sees(camera))
    ) as reader:
        yield b"retry: 2000\nevent: hello\ndata: {}\n\n" + gateway.live.trouble_event().data
        gateway.live.look()
        checked_s = loop.time()
        while (piece := await reader.take(gateway.ping_s)) is not None:
            if loop.time() - checked_s >= gateway.ping_s:
                checked_s = loop.time()
                if (still := await gateway.request_guard.recheck(request, principal)) is None:
                    return
                # Filters by the token's current permissions.
                principal = still
            yield piece or b": ping\n\n"
            await asyncio.sleep(PACE_S)
