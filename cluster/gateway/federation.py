"""The metrics of all processes on one page, each sample with the process it is of."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.wire.metrics_server import merge_families

if TYPE_CHECKING:
    from cluster.wire.tls import PeerTls


class FederatedCollector(Collector):
    """The metrics of other processes, each sample with a ``process`` label, gathered when scraped.

    ``addresses()``: process name -> ``host:port`` of its ``/metrics``, empty where nobody knows it. ``own`` adds
    registries of this process under their names. A process that does not answer within ``timeout_s`` is left out, and
    ``sightline_process_up{process}`` is 0 for it. ``others``: processes with a public page of their own, and whether
    they are up, which is all that is shown of them. ``tls``: of this cluster's processes.
    """

    MAX_BYTES = 16 * 2**20

    def __init__(
        self,
        addresses: Callable[[], dict[str, str]],
        own: Mapping[str, CollectorRegistry] | None = None,
        others: Callable[[], Mapping[str, bool]] = dict,
        timeout_s: float = 1.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._addresses = addresses
        self._own = dict(own or {})
        self._others = others
        self._timeout_s = timeout_s
        self._tls = tls

    def describe(self) -> list[Metric]:
        """Nothing is known before a scrape; also keeps registration from scraping."""
        return []

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for process, registry in self._own.items():
            merge_families(merged, process, registry.collect())
        up = GaugeMetricFamily("sightline_process_up", "1 when a process answered the scrape.", labels=["process"])
        addresses = self._addresses()
        for process, page in self._scrape(addresses).items():
            try:
                merge_families(merged, process, list(text_string_to_metric_families(page)))
                up.add_metric([process], 1)
            except ValueError:
                up.add_metric([process], 0)
        for process in addresses.keys() - {sample.labels["process"] for sample in up.samples}:
            up.add_metric([process], 0)
        others = self._others()
        for process, answers in others.items():
            up.add_metric([process], int(answers))
        yield from merged.values()
        if addresses or others:
            yield up

    def _scrape(self, addresses: dict[str, str]) -> dict[str, str]:
        """Pages by process, of those that answered in time."""
        if not addresses:
            return {}
        pool = ThreadPoolExecutor(max_workers=min(32, len(addresses)), thread_name_prefix="scrape")
        pages: dict[Future[str], str] = {pool.submit(self._fetch, where): name for name, where in addresses.items()}
        done, _ = wait(pages, timeout=2 * self._timeout_s)
        # A process that drips bytes may keep its thread for longer; the scrape does not wait for it.
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
    """To a process at an address, which has a certificate for the cluster's name and not for where it is."""

    def __init__(self, address: str, timeout_s: float, tls: PeerTls | None) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host.strip("[]"), int(port), timeout=timeout_s)
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), self.timeout)
        if self._tls is not None:
            self.sock = self._tls.client_context().wrap_socket(self.sock, server_hostname=self._tls.name)
