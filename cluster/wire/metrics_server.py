"""``/metrics`` over HTTP: of one process, or of all on one page, each sample labelled with its process."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.errors import SightlineError
from cluster.metrics.families import REGISTRY

if TYPE_CHECKING:
    from cluster.wire.tls import PeerTls

STALL_S, REFUSED_S = 10.0, 1.0
"""Timeout, in seconds, of a client's request, its TLS handshake included; pause after a connection that could not be
accepted."""


def _merge(merged: dict[str, Metric], process: str, families: Iterable[Metric]) -> None:
    """Merge a process's families into those of others, by name, with a label ``process``."""
    for family in families:
        target = merged.get(family.name)
        if target is None:
            target = merged[family.name] = Metric(family.name, family.documentation, family.type)
        target.samples += [
            Sample(sample.name, {**sample.labels, "process": process}, sample.value) for sample in family.samples
        ]


class FederatedCollector(Collector):
    """Gathers the metrics of several processes when scraped, each sample with a ``process`` label.

    ``addresses``: process name -> ``host:port`` of its ``/metrics``, empty if unknown. ``own``: registries of this
    process by name. A process that does not answer within ``timeout_s`` is left out, with
    ``sightline_process_up{process}`` at 0. ``others``: processes that publish their own page, of which only whether
    they are up is shown. ``tls``: of this cluster's processes.
    """

    MAX_BYTES = 16 * 2**20

    def __init__(
        self,
        addresses: Callable[[], dict[str, str]],
        own: Callable[[], Mapping[str, CollectorRegistry]] = dict,
        others: Callable[[], Mapping[str, bool]] = dict,
        timeout_s: float = 1.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._addresses, self._own, self._others = addresses, own, others
        self._timeout_s, self._tls = timeout_s, tls

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for process, registry in self._own().items():
            _merge(merged, process, registry.collect())
        up = GaugeMetricFamily("sightline_process_up", "1 when a process answered the scrape.", labels=["process"])
        addresses = self._addresses()
        answered = dict.fromkeys(addresses, False)
        for process, page in self._scrape(addresses).items():
            with contextlib.suppress(ValueError):
                _merge(merged, process, list(text_string_to_metric_families(page)))
                answered[process] = True
        for process, answers in (answered | dict(self._others())).items():
            up.add_metric([process], int(answers))
        yield from merged.values()
        if up.samples:
            yield up

    def _scrape(self, addresses: dict[str, str]) -> dict[str, str]:
        """Pages of the processes that answered in time."""
        if not addresses:
            return {}
        pool = ThreadPoolExecutor(max_workers=min(32, len(addresses)), thread_name_prefix="scrape")
        pages: dict[Future[str], str] = {pool.submit(self._fetch, where): name for name, where in addresses.items()}
        done, _ = wait(pages, timeout=2 * self._timeout_s)
        # A process that sends byte by byte may keep its thread busy; the scrape does not wait for it.
        pool.shutdown(wait=False, cancel_futures=True)
        return {pages[future]: future.result() for future in done if future.exception() is None}

    def _fetch(self, address: str) -> str:
        connection = _Connection(address, self._timeout_s, self._tls)
        try:
            connection.request("GET", "/metrics")
            reply = connection.getresponse()
            if reply.status != http.client.OK:
                raise ValueError(f"the metrics page of {address} answers {reply.status}")
            body: bytes = reply.read(self.MAX_BYTES + 1)
        finally:
            connection.close()
        if len(body) > self.MAX_BYTES:
            raise ValueError(f"the metrics page of {address} is larger than {self.MAX_BYTES} bytes")
        return body.decode()


class _Connection(http.client.HTTPConnection):
    """Connection to a process whose certificate is for the cluster's name, not for its address."""

    def __init__(self, address: str, timeout_s: float, tls: PeerTls | None) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host.strip("[]"), int(port), timeout=timeout_s)
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), self.timeout)
        if self._tls is not None:
            self.sock = self._tls.client_context().wrap_socket(self.sock, server_hostname=self._tls.name)


class MetricsServer:
    """``/metrics`` over HTTP on a thread of its own, until :meth:`close`.

    ``ports``: the first free one is taken; ``tls``: serve HTTPS, to processes of this cluster only. Raises
    ``SightlineError``: no port is free, or none may be opened."""

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
    """Serve this process's ``/metrics``, each sample labelled with its name, as long as it lives. Raises
    ``SightlineError``: no port is free, or none may be opened."""
    page = CollectorRegistry(auto_describe=False)
    page.register(FederatedCollector(dict, lambda: {process(): REGISTRY}))
    return MetricsServer(host, ports, page, tls=tls)


class _Quiet(WSGIRequestHandler):
    timeout = STALL_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


def _server_class(host: str, tls: PeerTls | None) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        request_queue_size = 64
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def get_request(self) -> Any:
            try:
                connection, client = super().get_request()
            except OSError:
                # Out of file descriptors: it would be tried again at once, for as long as the client waits.
                time.sleep(REFUSED_S)
                raise
            if tls is not None:
                # The handshake happens on the request's own thread, so that a slow client blocks no other.
                connection = tls.server_context().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, client

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that disconnect or show no certificate."""

    return Server
