"""``/metrics`` of one process, over HTTP."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from cluster.errors import SightlineError
from cluster.metrics.families import REGISTRY

if TYPE_CHECKING:
    from cluster.wire.tls import PeerTls

STALL_S = 10.0
"""A client may take so long for a request, its TLS handshake included."""


class MetricsServer:
    """``/metrics`` over HTTP on a thread of its own, until :meth:`close`.

    ``tls``: over HTTPS, and only for processes of this cluster.

    Raises:
        SightlineError: the port is taken or may not be opened.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        registry: CollectorRegistry = REGISTRY,
        *,
        tls: PeerTls | None = None,
    ) -> None:
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _server_class(host, tls), _Quiet)
        except OSError as error:
            raise SightlineError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; "
                "choose another gateway.metrics_port, or 0 for any free one"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(
    host: str = "127.0.0.1", port: int = 0, registry: CollectorRegistry = REGISTRY, *, tls: PeerTls | None = None
) -> str:
    """Serve ``/metrics`` for as long as the process lives; returns ``host:port``.

    Raises:
        SightlineError: the port is taken or may not be opened.
    """
    return MetricsServer(host, port, registry, tls=tls).address


class _Quiet(WSGIRequestHandler):
    timeout = STALL_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is nothing to write down."""


def _server_class(host: str, tls: PeerTls | None) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        request_queue_size = 64
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def get_request(self) -> Any:
            connection, client = super().get_request()
            if tls is not None:
                # The handshake follows on the request's own thread: who is slow holds up nobody.
                connection = tls.server_context().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, client

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that leave, or show no certificate, are no errors of ours."""

    return Server
