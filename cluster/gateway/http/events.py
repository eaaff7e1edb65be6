"""``/v1/events``: cameras, answers and incidents as they happen, for browsers (server-sent events)."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cluster.errors import SightlineError
from cluster.gateway.http.door import Door, names
from cluster.gateway.http.forms import Query, Route
from cluster.gateway.http.live import Live
from cluster.security.roles import EVENTS, Role, current

PING_S = 15.0
PACE_S = 0.1
"""Events of so long go out as one piece."""


class EventRoutes:
    """See :meth:`routes`. ``ping_s``: between signs of life, when the token is looked at again as well."""

    def __init__(self, door: Door, live: Live, *, ping_s: float = PING_S) -> None:
        self._door = door
        self._live = live
        self._ping_s = ping_s

    def routes(self) -> list[Route]:
        query = (Query("cameras", "Only these, with commas between them; all that the token may see unless given."),)
        text = (
            "Events as they happen: camera (a CameraStatus that changed), answer, incident, removed, and missed (how "
            "many events a slow reader lost). Ask for the cameras after the first event, and nothing is missed."
        )
        return [Route("GET", "/v1/events", EVENTS, self.events, text, media="text/event-stream", query=query)]

    async def events(self, request: web.Request) -> web.StreamResponse:
        wanted, principal = frozenset(names(request, "cameras")), current()
        loop = asyncio.get_running_loop()
        with self._live.feed.read(
            lambda camera: not camera or ((not wanted or camera in wanted) and principal.sees(camera))
        ) as reader:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            )
            await response.prepare(request)
            await response.write(b"retry: 2000\nevent: hello\ndata: {}\n\n")
            self._live.look()
            checked_s = loop.time()
            while True:
                piece = await reader.take(self._ping_s)
                if piece is None:
                    break
                if loop.time() - checked_s >= self._ping_s:
                    checked_s = loop.time()
                    try:
                        # A token that was revoked, or has expired, sees no more; one that was changed, what it is for.
                        principal = self._door.identify(request)
                        principal.require(Role.VIEW)
                    except SightlineError:
                        break
                await response.write(piece or b": ping\n\n")
                await asyncio.sleep(PACE_S)
            await response.write_eof()
            return response
