"""``HttpServer``: aiohttp behind a port of our own: bounded connections, deadlines for slow clients."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from cluster import metrics
from cluster.errors import SightlineError, UnavailableError
from cluster.gateway.http.replies import reply
from cluster.security.limits import StrangerPool
from cluster.wire.tls import Reloading, TlsFiles

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


class _Theirs(logging.Filter):
    """Lets everything through but what clients do to themselves; whoever wants to see that asks for DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            return True
        log.debug("%s: %r", record.getMessage(), error)
        return False


server_log = logging.getLogger("cluster.gateway.http.aiohttp")
"""For aiohttp's server, which logs every request that it cannot read with a traceback, at ERROR."""
server_log.addFilter(_Theirs())


async def expect(request: web.Request) -> web.Response | None:
    """``Expect: 100-continue`` is answered; anything else is refused, and not quoted: it may be no text at all."""
    if request.version != HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return reply({"error": "of Expect only 100-continue is known"}, 417)
    writer: Any = request.writer
    await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # What is counted is the reply.
    writer.output_size = 0
    return None


log = logging.getLogger(__name__)

_BACKLOG = 256


class HttpServer:
    """Serves ``application`` from :meth:`start` to :meth:`stop` on the running event loop.

    Args:
        application: answers; its handlers are cancelled when their client leaves.
        max_connections: of callers that were let in, at once; one more gets 503.
        max_strangers: connections of everybody else, at once, those that still shake hands included; a new one ends an
            old one. Under TLS each takes 0.3 MiB.
        header_s: longest from a new connection, or from a finished reply, to the next complete request head.
        stall_s: longest that a client may take to shake hands, or to take anything of a reply.
        setting: what to change when the port cannot be had.
        tls: certificate of the port; without one it speaks plain HTTP.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        max_connections: int = 1024,
        max_strangers: int = 128,
        header_s: float = 30.0,
        stall_s: float = 30.0,
        setting: str = "gateway.metrics_port",
        tls: TlsFiles | None = None,
    ) -> None:
        self.application = application
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=server_log,
            handler_cancellation=True,
            handle_signals=False,
            # Also how long aiohttp waits for the first request's head.
            keepalive_timeout=header_s,
            lingering_time=1.0,
            shutdown_timeout=1.0,
        )
        self._tls = None if tls is None else _Renewing.of(tls)
        self._connections = Connections(max_connections, max_strangers, stall_s)
        application[CONNECTIONS] = self._connections
        self._stall_s = stall_s
        self._setting = setting
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._shaking: set[asyncio.Task[None]] = set()

    @property
    def refused(self) -> int:
        """Requests that came over one more connection than may be."""
        return self._connections.refused

    @property
    def evicted(self) -> int:
        """Connections of strangers that ended for newer ones."""
        return self._connections.evicted

    @property
    def cut(self) -> int:
        """Connections that were closed because their client took nothing of a reply."""
        return self._connections.cut

    async def start(self, host: str, port: int) -> str:
        """Listen; returns ``host:port``, where port 0 took any free one.

        Raises:
            SightlineError: the port is taken or may not be opened.
        """
        try:
            # A name server may take its time.
            loop = asyncio.get_running_loop()
            family, _, _, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            listener = socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # Python adds where it was, in words of its own.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise SightlineError(
                f"cannot serve HTTP on {host}:{port}: {reason}; choose another {self._setting}, or 0 for any free one"
            ) from None
        listener.setblocking(False)
        self._listener = listener
        await self._runner.setup()
        self._accepting = asyncio.create_task(self._accept(listener), name="http accept")
        self._connections.start()
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Free the port; requests under way get a second."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting, *self._shaking], timeout=0.1)
        if self._listener is not None:
            self._listener.close()
        for task in self._shaking:
            task.cancel()
        self._connections.stop()
        await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors: those who are served go on, and free some.
                log.warning("no connection can be taken: %s", error)
                await asyncio.sleep(1.0)
                continue
            connection = self._connections.add(str(address[0]))
            task = asyncio.create_task(self._connect(client, connection), name="http handshake")
            connection.shaking = task
            self._shaking.add(task)
            task.add_done_callback(partial(self._shaken, client, connection))
            # With connections waiting, accepting does not wait: those that were taken must get their turn.
            await asyncio.sleep(0)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {"ssl": self._tls, "ssl_handshake_timeout": self._stall_s, "ssl_shutdown_timeout": 1.0}
        try:
            protocol_factory: Any = self._runner.server
            transport, _ = await loop.connect_accepted_socket(protocol_factory, client, **secure)
        except (OSError, ssl.SSLError) as error:
            log.debug("a connection was not made: %s", error)
            return
        self._connections.opened(connection, transport)

    def _shaken(self, client: socket.socket, connection: Connection, task: asyncio.Task[None]) -> None:
        self._shaking.discard(task)
        # Else all that a failed handshake had, 0.3 MiB, stays until Python looks for cycles.
        connection.shaking = None
        if connection.transport is None:
            self._connections.failed(connection)
            client.close()


class _Renewing(ssl.SSLContext):
    """Looks for new files with every connection, which asyncio asks it to wrap."""

    reloading: Reloading

    @classmethod
    def of(cls, files: TlsFiles) -> _Renewing:
        """Raises ``ConfigError`` when the files are of no use."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files.load(context)
        context.reloading = Reloading(files)
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        if self.reloading.changed():
            self.reloading.files.load(self)
        return super().wrap_bio(*arguments, **options)
