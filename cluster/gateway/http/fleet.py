"""Replicas and the fleet over HTTP: capacity, lag and the quality ladder, added up from what was seen last."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from sightline.v1 import replicas_pb2

from cluster.gateway.http.body import Body, read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.cameras import name_of
from cluster.gateway.http.forms import Fleet, Replicas, Route
from cluster.gateway.http.live import Live
from cluster.gateway.http.replies import plain, reply
from cluster.security.roles import FLEET, current
from cluster.types import CameraStatus
from cluster.types.reports import ReplicaStatus
from cluster.wire.convert import replica_from_proto

_WINDOWS = ("done", "gated", "dropped", "lost")
_TOKENS = ("full", "kept", "computed")


class Drain(Body):
    """``undo``: the replica takes cameras again."""

    undo: bool = False


class FleetRoutes:
    """See :meth:`routes`."""

    def __init__(self, calls: Calls, live: Live) -> None:
        self._calls = calls
        self._live = live

    def routes(self) -> list[Route]:
        service = "/sightline.v1.Replicas/"
        return [
            Route("GET", "/v1/replicas", f"{service}List", self.list, "The replicas.", Replicas),
            Route(
                "POST",
                "/v1/replicas/{name}/drain",
                f"{service}Drain",
                self.drain,
                "Take the cameras off a replica, or let it have some again.",
                ReplicaStatus,
                body=Drain,
                errors=(409,),
            ),
            Route("GET", "/v1/fleet", FLEET, self.fleet, "Capacity, lag and the ladder.", Fleet),
        ]

    async def list(self, _request: web.Request) -> web.Response:
        found = await self._calls.unary("/sightline.v1.Replicas/List", replicas_pb2.ListReplicasRequest())
        return reply({"replicas": [plain(replica_from_proto(each)) for each in found.replicas]})

    async def drain(self, request: web.Request) -> web.Response:
        body = await read(request, Drain)
        asked = replicas_pb2.DrainReplicaRequest(name=name_of(request), undo=body.undo)
        return reply(plain(replica_from_proto(await self._calls.unary("/sightline.v1.Replicas/Drain", asked))))

    async def fleet(self, _request: web.Request) -> web.Response:
        live, sees = self._live, current().sees
        body = summary([status for name, status in live.cameras.items() if sees(name)])
        ago_s = time.monotonic() - live.seen_s
        body["replicas"] = plain(list(live.replicas))
        body["seen_ago_s"] = round(ago_s, 3) if math.isfinite(ago_s) else None
        body["trouble"] = live.trouble
        return reply(body)


def summary(cameras: Sequence[CameraStatus]) -> dict[str, Any]:
    """Cameras added up; lags are of those that run and have answered."""
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
    """The smallest value that ``share`` of all do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
