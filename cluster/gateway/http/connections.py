"""Every open connection: not more than may be, and none whose client does not take what it asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cluster import metrics
from cluster.errors import UnavailableError
from cluster.security.limits import StrangerPool

SWEEP_S = 0.5


@dataclass(slots=True, eq=False)
class Connection:
    """From when it is taken; ``shaking`` ends with its ``transport``.

    ``unsent``: bytes that the client has not taken, ``since`` when there were last none, or fewer.
    """

    shaking: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None
    unsent: int = 0
    since: float = 0.0

    @property
    def gone(self) -> bool:
        return self.transport is not None and self.transport.is_closing()

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self.shaking is not None:
            self.shaking.cancel()


class Connections:
    """Connections of two kinds: of callers that had a request let through that not everybody may make, at most
    ``limit``; and of strangers, at most ``strangers``: a new one takes the place of an old one. A probe is a stranger,
    and gets in whatever others hold.

    Also closes those whose client takes nothing for ``stall_s``: aiohttp itself waits for ever.
    """

    def __init__(self, limit: int, strangers: int, stall_s: float) -> None:
        self._limit, self._most_strangers = limit, strangers
        self._stall_s = stall_s
        self._strangers: StrangerPool[Connection] = StrangerPool(strangers)
        self._known: set[Connection] = set()
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.refused = 0
        self.evicted = 0
        self.cut = 0

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Begin to look after them, on the running loop."""
        self._sweeping = asyncio.create_task(self._sweep(), name="http connections")

    def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    def add(self, peer: str) -> Connection:
        """A new one, of a stranger; an older one may end for it."""
        if len(self._strangers) >= self._most_strangers:
            self._drop_closed()
        connection = Connection()
        evicted = self._strangers.add(connection, peer)
        if evicted is not None:
            self.evicted += 1
            metrics.http_dropped.labels("evicted").inc()
            evicted.end()
        return connection

    def opened(self, connection: Connection, transport: asyncio.Transport) -> None:
        """Hands are shaken."""
        connection.transport = transport
        self._open[transport] = connection

    def failed(self, connection: Connection) -> None:
        """There will be no transport."""
        self._strangers.discard(connection)

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Its caller is no stranger any more.

        Raises:
            UnavailableError: as many as may be are there already.
        """
        connection = None if transport is None else self._open.get(transport)
        if connection is None or connection not in self._strangers:
            return
        if len(self._known) >= self._limit:
            self._drop_closed()
        if len(self._known) >= self._limit:
            self.refused += 1
            metrics.http_dropped.labels("refused").inc()
            raise UnavailableError("too many connections are open; try again")
        self._strangers.discard(connection)
        self._known.add(connection)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_S, self._stall_s / 4))
            self._drop_closed()
            now = loop.time()
            for transport, one in self._open.items():
                unsent = transport.get_write_buffer_size() if isinstance(transport, asyncio.WriteTransport) else 0
                if not unsent or not one.unsent or unsent < one.unsent:
                    one.since = now
                one.unsent = unsent
                if unsent and now - one.since > self._stall_s:
                    self.cut += 1
                    metrics.http_dropped.labels("cut").inc()
                    one.end()

    def _drop_closed(self) -> None:
        for transport, connection in [item for item in self._open.items() if item[1].gone]:
            del self._open[transport]
            self._strangers.discard(connection)
            self._known.discard(connection)


CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections", Connections)


def admit(request: web.Request) -> None:
    """See :meth:`Connections.admit`; an application that no ``HttpServer`` serves has no limits."""
    connections: Any = request.app.get(CONNECTIONS)
    if connections is not None:
        connections.admit(request.transport)
