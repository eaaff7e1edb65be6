"""A small HTTP server on a thread of its own: one WSGI application, bounded requests, timeouts on sockets."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cluster.errors import SightlineError
from cluster.rpc.tls import Reloading, TlsFiles

log = logging.getLogger(__name__)

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[[str, list[tuple[str, str]]], Any]
Application: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_POLL_S = 0.1
_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\r\n"
    b'{"error": "too many requests are under way; try again"}\n'
)


class HttpServer:
    """Serves until :meth:`close`. ``refused`` counts requests that came when ``max_requests`` were under way.

    Args:
        host, port: where to listen; 0 takes any free port.
        application: answers; called on a thread per request.
        max_requests: at once; one more gets 503.
        stall_s: longest that a client may take to send or take anything.
        setting: what to change when the port cannot be had.
        tls: certificate of the port; without one it speaks plain HTTP.

    Raises:
        SightlineError: the port is taken or may not be opened.
    """

    def __init__(
        self,
        host: str,
        port: int,
        application: Application,
        *,
        max_requests: int = 64,
        stall_s: float = 30.0,
        setting: str = "gateway.metrics_port",
        tls: TlsFiles | None = None,
    ) -> None:
        reloading = None if tls is None else Reloading(tls)
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            handler = _handler_class(stall_s, reloading)
            self._server = _server_class(family)((str(where[0]), port), handler, max_requests)
        except OSError as error:
            raise SightlineError(
                f"cannot serve HTTP on {host}:{port}: {error.strerror or error}; "
                f"choose another {setting}, or 0 for any free one"
            ) from None
        self._server.set_app(application)
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="http", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        return self._server.refused

    def close(self) -> None:
        """Stop serving and free the port; requests under way end with their connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler], max_requests: int) -> None:
        self._free = threading.BoundedSemaphore(max_requests)
        self.refused = 0
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """As the base class does, without asking a name server for this machine's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = (str(self.server_address[0]), int(self.server_address[1]))
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        self.refused += 1
        try:
            request.settimeout(0.1)
            request.sendall(_BUSY)
        except OSError:
            log.debug("%s was gone before it was refused", client_address)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Clients that stall or leave are no errors of ours."""
        log.debug("the connection of %s broke", client_address, exc_info=True)


class _Complaints:
    """Where WSGI writes what went wrong in an application, or while its reply was written."""

    def write(self, text: str) -> int:
        if text.strip():
            log.warning("%s", text.rstrip())
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _server_class(family: int) -> type[_Server]:
    class Server(_Server):
        address_family = family

    return Server


def _handler_class(stall_s: float, tls: Reloading | None) -> type[WSGIRequestHandler]:
    class Handler(WSGIRequestHandler):
        timeout = stall_s

        def setup(self) -> None:
            if tls is not None:
                tls.changed()
                self.request.settimeout(stall_s)
                # On the request's own thread: who is slow to shake hands holds up nobody.
                self.request = tls.context.wrap_socket(self.request, server_side=True)
            super().setup()

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

        def get_stderr(self) -> Any:
            return _Complaints()

    return Handler
