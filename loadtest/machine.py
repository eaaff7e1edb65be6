"""Resource use of a load test's machine, by process role, and readings of the ``/metrics`` page."""

import http.client
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import SightlineError
from cluster.hosts import is_loopback
from cluster.metrics.gpu import gpu_collector
from cluster.wire.channel import split_address
from cluster.wire.tls import ClientCredentials

Page = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""(sample name, sorted labels) -> value."""

PAGE_S = 5.0
"""Timeout of a page, in seconds."""


def read_page(address: str, credentials: ClientCredentials | None = None) -> Page:
    """Fetch the page at ``host:port`` with the client's token and TLS.

    Raises:
        ConfigError: a credentials file cannot be read, or the token would be sent in clear text.
        OSError, ValueError: nothing answers there, the request is refused, or the page is not Prometheus text.
    """
    credentials = credentials or ClientCredentials()
    context = credentials.http_context()
    request = urllib.request.Request(f"{'https' if context else 'http'}://{address}/metrics")
    for name, value in credentials.metadata(loopback=is_loopback(split_address(address)[0])):
        # Not forwarded on a redirect, which may lead to another machine.
        request.add_unredirected_header(name.capitalize(), value)
    try:
        with urllib.request.urlopen(request, timeout=PAGE_S, context=context) as reply:
            return parse(reply.read().decode())
    except http.client.HTTPException as error:
        raise ValueError(f"not an HTTP response: {type(error).__name__}") from None


def fetch(address: str, credentials: ClientCredentials | None = None) -> Page:
    """Like :func:`read_page`, but empty if the page cannot be read, which an injected fault may cause."""
    try:
        return read_page(address, credentials)
    except (SightlineError, OSError, ValueError):
        return {}


def parse(text: str) -> Page:
    """Parse Prometheus' text format. Raises ``ValueError`` for anything else."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(before: Page, after: Page, name: str, label: str, where: Mapping[str, str] | None = None) -> Counter[str]:
    """Increase of the counter ``name``, summed by ``label``, over the samples with labels ``where``.

    A counter that decreased was reset by a restart, so its value counts. Without a page ``before`` the result is empty.
    """
    total: Counter[str] = Counter()
    if not before:
        return total
    for (sample, labels), value in after.items():
        held = dict(labels)
        if sample != name or any(held.get(key) != wanted for key, wanted in (where or {}).items()):
            continue
        earlier = before.get((sample, labels), 0.0)
        growth = value - earlier if value >= earlier else value
        if growth:
            total[held.get(label, "")] += round(growth)
    return total


def level(page: Page, name: str, label: str) -> dict[str, float]:
    """Value of the gauge ``name``, summed by ``label``."""
    total: dict[str, float] = {}
    for (sample, labels), value in page.items():
        if sample == name:
            key = dict(labels).get(label, "")
            total[key] = total.get(key, 0.0) + value
    return total


GENERATOR = "generator"


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Means since the previous sample. ``cores``: by role (``replica``, ``decoder``, ``generator`` …); ``busy``: share
    of all cores in use by anyone; ``others``: cores used by processes that are not sampled; ``network_bytes_s``: all
    interfaces, both directions; ``gpus``: utilisation (:func:`gpu_shares`)."""

    cores: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    busy: float = 0.0
    others: float = 0.0
    network_bytes_s: float = 0.0
    gpus: dict[str, float] = field(default_factory=dict)


class Machine:
    """Samples the machine at every :meth:`look`; processes may come and go in between."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._network = _network_bytes()
        self._at_s = time.monotonic()
        self._gpus = gpu_collector()
        psutil.cpu_percent()

    def look(self, processes: Mapping[str, int]) -> MachineUse:
        """Sample now. ``processes``: ids by name; the part before a dash is the role. Blocks for some milliseconds."""
        now_s = time.monotonic()
        passed = max(1e-3, now_s - self._at_s)
        cores: dict[str, float] = {}
        memory: dict[str, int] = {}
        known, self._processes = self._processes, {}
        for name, pid in {**processes, GENERATOR: os.getpid()}.items():
            role = name.split("-")[0]
            try:
                process = self._processes[pid] = known.get(pid) or psutil.Process(pid)
                memory[role] = memory.get(role, 0) + process.memory_info().rss
                # Since its previous sample; 0 for a new process.
                cores[role] = cores.get(role, 0.0) + process.cpu_percent() / 100
            except psutil.Error:
                continue
        network, busy = _network_bytes(), psutil.cpu_percent() / 100
        use = MachineUse(
            cores=cores,
            memory_bytes=memory,
            busy=busy,
            others=max(0.0, busy * (psutil.cpu_count() or 1) - sum(cores.values())),
            network_bytes_s=(network - self._network) / passed,
            gpus=gpu_shares(self._gpus.collect()) if self._gpus is not None else {},
        )
        self._network, self._at_s = network, now_s
        return use


_GPU_WORDS = {"sightline_gpu_busy_ratio": "computing", "sightline_gpu_decoder_busy_ratio": "decoding"}


def gpu_shares(found: Iterable[Metric]) -> dict[str, float]:
    """Utilisation of GPUs for computing and decoding, from the cluster's GPU metrics."""
    return {
        f"GPU {sample.labels['gpu']} {_GPU_WORDS[each.name]}": sample.value
        for each in found
        if each.name in _GPU_WORDS
        for sample in each.samples
    }


def _network_bytes() -> int:
    counters = psutil.net_io_counters()
    return int(counters.bytes_sent + counters.bytes_recv) if counters else 0
