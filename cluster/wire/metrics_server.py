"""``/metrics`` of one process over HTTP, each sample with the process that it is of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.errors import SightlineError
from cluster.metrics.families import REGISTRY

if TYPE_CHECKING:
    from cluster.wire.tls import PeerTls

STALL_S = 10.0
"""A client may take so long for a request, its TLS handshake included."""


def merge_families(merged: dict[str, Metric], process: str, families: Iterable[Metric]) -> None:
    """Add a process's families to those of others, by name, with a label ``process``."""
    for family in families:
        target = merged.get(family.name)
        if target is None:
            target = merged[family.name] = Metric(family.name, family.documentation, family.type)
        target.samples += [
            Sample(sample.name, {**sample.labels, "process": process}, sample.value) for sample in family.samples
        ]


class _LabelledCollector(Collector):
    """The process's metrics with a label ``process``, as the gateway shows them."""

    def __init__(self, process: Callable[[], str]) -> None:
        self._process = process

    def describe(self) -> list[Metric]:
        """Keeps registration from collecting."""
        return []

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        merge_families(merged, self._process(), REGISTRY.collect())
        yield from merged.values()


class MetricsServer:
    """``/metrics`` over HTTP on a thread of its own, until :meth:`close`.

    ``ports``: the first free one is taken; ``tls``: over HTTPS, and only for processes of this cluster.

    Raises:
        SightlineError: no port is free, or it may not be opened.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        ports: Iterable[int] = (0,),
        registry: CollectorRegistry = REGISTRY,
        *,
        tls: PeerTls | None = None,
    ) -> None:
        reason = ""
        for port in ports:
            try:
                self._server = make_server(host, port, make_wsgi_app(registry), _server_class(host, tls), _Quiet)
                break
            except OSError as error:
                reason = f"{host}:{port}: {error.strerror or error}"
        else:
            raise SightlineError(f"cannot serve metrics on {reason}; choose another cluster.metrics_port, or null")
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(
    host: str, ports: Iterable[int], process: Callable[[], str], *, tls: PeerTls | None = None
) -> MetricsServer:
    """Serve this process's ``/metrics``, each sample with its name, for as long as it lives.

    Raises:
        SightlineError: no port is free, or it may not be opened.
    """
    page = CollectorRegistry(auto_describe=False)
    page.register(_LabelledCollector(process))
    return MetricsServer(host, ports, page, tls=tls)


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
