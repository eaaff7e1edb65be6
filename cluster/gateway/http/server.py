"""``HttpServer``: aiohttp behind a port of our own: bounded connections, deadlines for slow clients, renewed TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from functools import partial
from typing import Any

from aiohttp import web

from cluster.errors import SightlineError
from cluster.gateway.http.connections import CONNECTIONS, Connection, Connections
from cluster.gateway.http.quiet import server_log
from cluster.wire.tls import Reloading, TlsFiles

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
