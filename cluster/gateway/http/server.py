"""uvicorn's HTTP protocol behind our own listener, with limits on connections, request heads and slow clients
(``HttpServer``).
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
"""Read buffer, and limit of an incomplete request head: longer ones are refused."""
AHEAD_S = 0.2
"""Delay, in seconds, of a pipelined request, so that others are served in between."""
STOP_S = 1.0
"""Grace period of running requests when the server stops, in seconds."""
_BACKLOG = 1024

log = logging.getLogger(__name__)

_uvicorn_log = logging.getLogger("cluster.gateway.http.uvicorn")
# Its warnings are about client errors: malformed heads, unsupported upgrades.
_uvicorn_log.setLevel(logging.ERROR)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client connection from accept on; ``task`` is its TLS handshake, later the running request.

    h11 handles one request at a time: pipelined ones wait as bytes, and reading pauses.
    """

    # Shared by all connections: data is parsed before the next read.
    _read = bytearray(READ_BYTES)

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {})
        self.logger, self.access_log = _uvicorn_log, False
        self._application, self.app = self.app, self._answer
        self._server = server
        self.task: asyncio.Task[None] | None = None
        self.idle_s = self.progress_s = self.loop.time()
        self.unsent = 0

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._read)[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``; cancels the running request."""
        super().connection_lost(exc)
        self._server.discard(self)
        if self.task is not None and self.cycle is not None and not self.cycle.response_complete:
            self.task.cancel()
        # uvicorn leaves its keep-alive timer running, which holds the connection; and ``app`` is a reference cycle that
        # would keep 0.3 MiB of TLS state until the next garbage collection.
        self._unset_keepalive_if_required()
        del self.app

    @property
    def established(self) -> bool:
        return bool(self.transport)

    def on_response_complete(self) -> None:
        ahead, _ = self.conn.trailing_data
        if ahead:
            self.loop.call_later(AHEAD_S, super().on_response_complete)
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """See ``H11Protocol``; sent only in place of a reply, never in the middle of one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            # Discards everything that the application still sends.
            self.cycle.disconnected = True

    def admit(self) -> None:
        self._server.admit(self)

    def end(self) -> None:
        if self.established:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def check(self, now_s: float, header_s: float, stall_s: float) -> bool:
        """Close the connection if its request head is overdue; returns whether it has stopped reading a reply."""
        if self.task is None and now_s - self.idle_s > header_s:
            self.transport.close()
        unsent = self.transport.get_write_buffer_size()
        if not unsent or not self.unsent or unsent < self.unsent:
            self.progress_s = now_s
        self.unsent = unsent
        return bool(unsent) and now_s - self.progress_s > stall_s

    async def drop_rest(self, receive: Any) -> None:
        """Read the rest of a body for a second: closing with unread bytes resets the connection, losing the reply."""
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
            self.finish(task)

    def finish(self, task: asyncio.Task[None] | None) -> None:
        """Mark ``task`` as finished, unless a pipelined request has already replaced it."""
        self.idle_s = self.loop.time()
        if self.task is task:
            self.task = None


class HttpServer:
    """Serves ``application`` from :meth:`start` to :meth:`stop` on the running event loop.

    A connection is anonymous until a request for a route that is not public has been admitted. New anonymous
    connections evict old ones, so probes get in whatever others hold.

    Args:
        application: ASGI application; cancelled when its client disconnects.
        max_connections: limit of admitted connections; beyond it requests get 503.
        max_anonymous: limit of anonymous connections, including those in their handshake. Under TLS each takes 0.3 MiB.
        header_s: longest time from a new connection, or a finished reply, to the next complete request head.
        stall_s: longest time for a handshake, or without the client reading any of a reply.
        tls: certificate of the port; None: plain HTTP.
    """

    def __init__(
        self,
        application: Any,
        *,
        max_connections: int = 1024,
        max_anonymous: int = 128,
        header_s: float = 30.0,
        stall_s: float = 30.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.config = Config(
            application,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=round(header_s) + 1,
            h11_max_incomplete_event_size=READ_BYTES - 1,
            # Requests on one connection must not inherit context variables, e.g. the principal, from each other.
            reset_contextvars=True,
        )
        self.config.load()
        self.state = ServerState()
        self._tls = None if tls is None else Reloading(tls, tls.context)
        self._max_connections = max_connections
        # TLS state is freed only some loop iterations after its handshake ended, so fewer are accepted at once.
        self._at_once = 1 if tls else max(1, max_anonymous // 32)
        self._anonymous: AnonymousPool[Connection] = AnonymousPool(max_anonymous)
        self._admitted: set[Connection] = set()
        self._open: set[Connection] = set()
        self._header_s, self._stall_s = header_s, stall_s
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> str:
        """Listen; returns ``host:port`` (port 0 takes any free one). Raises ``SightlineError``: the port is in use or
        may not be opened."""
        try:
            # Resolved asynchronously: DNS may be slow.
            loop = asyncio.get_running_loop()
            family, _, _, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            listener = socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # Not ``strerror`` alone: Python appends the address to it.
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

    async def run(self) -> None:
        """Wait until accepting connections fails, and raise its exception."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Free the port; running requests get a second to finish."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            await asyncio.wait(self._tasks, timeout=0.1)
            self._listener.close()
        for connection in list(self._open):
            if not connection.established:
                connection.end()
            elif connection.task is None:
                connection.transport.close()
            else:
                connection.cycle.keep_alive = False
        await self._wait_for_tasks(STOP_S)
        for connection in list(self._open):
            connection.end()
        await self._wait_for_tasks(0.1)

    async def _wait_for_tasks(self, timeout_s: float) -> None:
        tasks = [connection.task for connection in self._open if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def admit(self, connection: Connection) -> None:
        """Mark a connection as admitted. Raises ``UnavailableError``: ``max_connections`` is reached."""
        if connection not in self._anonymous:
            return
        if len(self._admitted) >= self._max_connections:
            metrics.http_dropped.labels("refused").inc()
            raise UnavailableError("too many connections are open; try again")
        self._anonymous.discard(connection)
        self._admitted.add(connection)

    def discard(self, connection: Connection) -> None:
        self._anonymous.discard(connection)
        self._admitted.discard(connection)
        self._open.discard(connection)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors: wait for open connections to free some.
                log.warning("cannot accept connections: %s", error)
                await asyncio.sleep(1.0)
                continue
            connection = Connection(self)
            evicted = self._anonymous.add(connection, str(address[0]))
            if evicted is not None:
                metrics.http_dropped.labels("evicted").inc()
                evicted.end()
            self._open.add(connection)
            task = connection.task = asyncio.create_task(self._connect(client, connection), name="http handshake")
            task.add_done_callback(partial(self._handshake_done, client, connection))
            # sock_accept does not yield while connections are waiting: let accepted ones run.
            accepted += 1
            if accepted % self._at_once == 0:
                await asyncio.sleep(0)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        # Head and body are separate writes; asyncio sets this only on sockets that it created.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure: dict[str, Any] = {}
        if self._tls is not None:
            secure = {"ssl": self._tls.newest(), "ssl_handshake_timeout": self._stall_s, "ssl_shutdown_timeout": 1.0}
        try:
            await connection.loop.connect_accepted_socket(lambda: connection, client, **secure)
        except (OSError, ssl.SSLError) as error:
            log.debug("a handshake failed: %s", error)

    def _handshake_done(self, client: socket.socket, connection: Connection, task: asyncio.Task[None]) -> None:
        # Otherwise a failed handshake's 0.3 MiB would stay until the next garbage collection.
        connection.finish(task)
        if not connection.established:
            self.discard(connection)
            client.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_S, self._stall_s / 4, self._header_s / 4))
            for connection in [each for each in self._open if each.established]:
                if connection.check(loop.time(), self._header_s, self._stall_s):
                    metrics.http_dropped.labels("cut").inc()
                    connection.end()
