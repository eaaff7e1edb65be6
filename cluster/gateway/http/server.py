"""``HttpServer``: uvicorn's HTTP behind a port of our own: bounded connections, heads and reads, deadlines for slow
clients.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from functools import partial
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cluster import metrics
from cluster.errors import SightlineError, UnavailableError
from cluster.security.limits import AnonymousPool
from cluster.wire.tls import Reloading, TlsFiles

SWEEP_S = 0.5
READ_BYTES = 16 * 2**10
"""Read at once of a connection; a head that is longer, and not finished, is refused."""
AHEAD_S = 0.2
"""A request that was sent before its client had the reply to the one before waits so long, while others are served."""
STOP_S = 1.0
"""Requests under way get so long when the server stops."""
_BACKLOG = 1024

log = logging.getLogger(__name__)

_uvicorn_log = logging.getLogger("cluster.gateway.http.uvicorn")
# It warns of what clients do to themselves: heads that are none, upgrades to what is not spoken here.
_uvicorn_log.setLevel(logging.ERROR)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client, from when its connection is taken; ``task`` shakes hands, then answers a request.

    h11 keeps at most one request in hand: those that a client sends ahead wait as bytes, of which no more are read.
    """

    # What was read is parsed before anybody reads again.
    _read = bytearray(READ_BYTES)

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {})
        self.logger, self.access_log = _uvicorn_log, False
        self._application, self.app = self.app, self._answer
        self._server = server
        self.task: asyncio.Task[None] | None = None
        self.idle_s = self.taken_s = self.loop.time()
        self.unsent = 0

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._read)[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``: whatever is done for this client ends."""
        super().connection_lost(exc)
        self._server.discard(self)
        if self.task is not None and self.cycle is not None and not self.cycle.response_complete:
            self.task.cancel()
        # uvicorn leaves its timer, and with it the connection, where the client broke off; and what refers to itself,
        # with 0.3 MiB of TLS, would stay until Python looks for cycles.
        self._unset_keepalive_if_required()
        del self.app

    @property
    def made(self) -> bool:
        return bool(self.transport)

    def on_response_complete(self) -> None:
        ahead, _ = self.conn.trailing_data
        if ahead:
            self.loop.call_later(AHEAD_S, super().on_response_complete)
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """See ``H11Protocol``: in place of the reply to a request that breaks off, and never into the middle of one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            # Whatever is said to it from here on is dropped.
            self.cycle.disconnected = True

    def admit(self) -> None:
        self._server.admit(self)

    def end(self) -> None:
        if self.made:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def check(self, now_s: float, header_s: float, stall_s: float) -> bool:
        """Ends it where its client is late with a head; whether it takes nothing of a reply."""
        if self.task is None and now_s - self.idle_s > header_s:
            self.transport.close()
        unsent = self.transport.get_write_buffer_size()
        if not unsent or not self.unsent or unsent < self.unsent:
            self.taken_s = now_s
        self.unsent = unsent
        return bool(unsent) and now_s - self.taken_s > stall_s

    async def drop_rest(self, receive: Any) -> None:
        """Reads the rest of a body for a second: closing with bytes unread would take the reply back."""
        try:
            async with asyncio.timeout(STOP_S):
                while self.cycle.more_body and not self.transport.is_closing():
                    await receive()
        except TimeoutError:
            pass

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["connection"] = self
        task = self.task = asyncio.current_task()
        try:
            await self._application(scope, receive, send)
        except asyncio.CancelledError:
            if not self.transport.is_closing():
                raise
        finally:
            del scope["state"]["connection"]
            self.rest(task)

    def rest(self, task: asyncio.Task[None] | None) -> None:
        """What it did is done; the next request, sent ahead, may have begun already."""
        self.idle_s = self.loop.time()
        if self.task is task:
            self.task = None


class HttpServer:
    """Serves ``application`` from :meth:`start` to :meth:`stop` on the running event loop.

    Connections are of two kinds: of callers that had a request let through that not everybody may make, at most
    ``max_connections``; and of strangers, at most ``max_strangers``: a new one takes the place of an old one. A probe
    is a stranger, and gets in whatever others hold.

    Args:
        application: answers (ASGI); cancelled when its client leaves.
        max_connections: of callers that were let in, at once; one more gets 503.
        max_strangers: connections of everybody else, at once, those that still shake hands included; a new one ends an
            old one. Under TLS each takes 0.3 MiB.
        header_s: longest from a new connection, or from a finished reply, to the next complete request head.
        stall_s: longest that a client may take to shake hands, or to take anything of a reply.
        tls: certificate of the port; without one it speaks plain HTTP.
    """

    def __init__(
        self,
        application: Any,
        *,
        max_connections: int = 1024,
        max_strangers: int = 128,
        header_s: float = 30.0,
        stall_s: float = 30.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.application = application
        self.config = Config(
            application,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=round(header_s) + 1,
            h11_max_incomplete_event_size=READ_BYTES - 1,
            # A request begins with nothing of the one before it on its connection, whoever that was for.
            reset_contextvars=True,
        )
        self.config.load()
        self.state = ServerState()
        self._tls = None if tls is None else Reloading(tls, tls.context)
        self._max_connections = max_connections
        # What a handshake held is freed only some turns after it was ended.
        self._at_once = 1 if tls else max(1, max_strangers // 32)
        self._strangers: AnonymousPool[Connection] = AnonymousPool(max_strangers)
        self._known: set[Connection] = set()
        self._open: set[Connection] = set()
        self._header_s, self._stall_s = header_s, stall_s
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> str:
        """Listen; returns ``host:port``, where port 0 took any free one. Raises ``SightlineError``: the port is
        taken or may not be opened."""
        try:
            # A name server may take its time.
            loop = asyncio.get_running_loop()
            family, _, _, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            listener = socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # Python adds where it was, in words of its own.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise SightlineError(
                f"cannot serve HTTP on {host}:{port}: {reason}; choose another gateway.http_port, or 0 for any free one"
            ) from None
        listener.setblocking(False)
        self._listener = listener
        self._tasks = [
            asyncio.create_task(self._accept(listener), name="http accept"),
            asyncio.create_task(self._sweep(), name="http connections"),
        ]
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Free the port; requests under way get a second."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            await asyncio.wait(self._tasks, timeout=0.1)
            self._listener.close()
        for connection in list(self._open):
            if not connection.made:
                connection.end()
            elif connection.task is None:
                connection.transport.close()
            else:
                connection.cycle.keep_alive = False
        await self._settled(STOP_S)
        for connection in list(self._open):
            connection.end()
        await self._settled(0.1)

    async def _settled(self, timeout_s: float) -> None:
        tasks = [connection.task for connection in self._open if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def admit(self, connection: Connection) -> None:
        """Its caller is no stranger any more. Raises ``UnavailableError``: as many as may be are there already."""
        if connection not in self._strangers:
            return
        if len(self._known) >= self._max_connections:
            metrics.http_dropped.labels("refused").inc()
            raise UnavailableError("too many connections are open; try again")
        self._strangers.discard(connection)
        self._known.add(connection)

    def discard(self, connection: Connection) -> None:
        self._strangers.discard(connection)
        self._known.discard(connection)
        self._open.discard(connection)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        taken = 0
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors: those who are served go on, and free some.
                log.warning("no connection can be taken: %s", error)
                await asyncio.sleep(1.0)
                continue
            connection = Connection(self)
            evicted = self._strangers.add(connection, str(address[0]))
            if evicted is not None:
                metrics.http_dropped.labels("evicted").inc()
                evicted.end()
            self._open.add(connection)
            task = connection.task = asyncio.create_task(self._connect(client, connection), name="http handshake")
            task.add_done_callback(partial(self._shaken, client, connection))
            # With connections waiting, accepting does not wait: those that were taken must get their turn.
            taken += 1
            if taken % self._at_once == 0:
                await asyncio.sleep(0)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        # Head and body are written one after the other; asyncio does this for sockets that it made itself.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {"ssl": self._tls.newest(), "ssl_handshake_timeout": self._stall_s, "ssl_shutdown_timeout": 1.0}
        try:
            await connection.loop.connect_accepted_socket(lambda: connection, client, **secure)
        except (OSError, ssl.SSLError) as error:
            log.debug("a connection was not made: %s", error)

    def _shaken(self, client: socket.socket, connection: Connection, task: asyncio.Task[None]) -> None:
        # Else all that a failed handshake had, 0.3 MiB, stays until Python looks for cycles.
        connection.rest(task)
        if not connection.made:
            self.discard(connection)
            client.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_S, self._stall_s / 4, self._header_s / 4))
            for connection in [each for each in self._open if each.made]:
                if connection.check(loop.time(), self._header_s, self._stall_s):
                    metrics.http_dropped.labels("cut").inc()
                    connection.end()
