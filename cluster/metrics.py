"""Every metric of a Sightline process, in one place, and how the gateway shows those of all processes.

Counters and gauges may carry a camera; histograms never do (a thousand cameras times a dozen buckets is what kills a
Prometheus server): they are told apart by the ``process`` label that :class:`FederatedCollector` adds.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.errors import SightlineError
from cluster.types import Answer

# `_created` series double every counter and histogram, and nothing here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
"""What this process exposes."""

STATES = ("waiting", "connecting", "running", "backoff", "error", "ended")
WindowResult = Literal["done", "gated", "late", "dropped", "lost"]
Stage = Literal["queue", "vision", "plan", "llm", "total"]

windows = Counter(
    "sightline_windows",
    "Windows by result; late ones were answered after the next was due and are also done. reason is set when dropped.",
    ["result", "reason"],
    registry=REGISTRY,
)
tokens = Counter(
    "sightline_tokens",
    "Tokens of answered windows: full (nothing pruned), kept = reused + refreshed + new, query, encoded by the tower.",
    ["kind"],
    registry=REGISTRY,
)
stage_seconds = Histogram(
    "sightline_stage_seconds",
    "Seconds a window spent in each stage; total runs from the arrival of its last frame to its answer.",
    ["stage"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
batch_windows = Histogram(
    "sightline_batch_windows",
    "Windows answered together in one forward pass.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
    registry=REGISTRY,
)
queue_depth = Gauge("sightline_queue_depth", "Items waiting in a bounded queue.", ["queue"], registry=REGISTRY)
ladder_cameras = Gauge(
    "sightline_ladder_cameras", "Cameras on each rung of the quality ladder.", ["rung"], registry=REGISTRY
)
ladder_steps = Counter(
    "sightline_ladder_steps", "Steps of cameras on the quality ladder, up or down.", ["direction"], registry=REGISTRY
)
camera_state = Gauge(
    "sightline_camera_state",
    "1 for the state a camera is in, 0 for the others.",
    ["camera", "state"],
    registry=REGISTRY,
)
camera_last_frame_age = Gauge(
    "sightline_camera_last_frame_age_seconds",
    "Seconds since a camera's last decoded frame; +Inf before its first.",
    ["camera"],
    registry=REGISTRY,
)
decode_errors = Counter("sightline_decode_errors", "Packets the decoder could not use.", ["camera"], registry=REGISTRY)
stream_gaps = Counter(
    "sightline_stream_gaps",
    "Holes in a camera's stream; what follows waits for a keyframe.",
    ["camera"],
    registry=REGISTRY,
)
ingest_packets = Counter("sightline_ingest_packets", "Encoded packets taken over gRPC.", registry=REGISTRY)
ingest_bytes = Counter("sightline_ingest_bytes", "Bytes of encoded packets taken over gRPC.", registry=REGISTRY)
ingest_dropped = Counter(
    "sightline_ingest_packets_dropped", "Pushed packets dropped, by reason.", ["reason"], registry=REGISTRY
)
frames_sent = Counter("sightline_frames_sent", "Frames a decoder sent to its replicas.", registry=REGISTRY)
frames_dropped = Counter(
    "sightline_frames_dropped", "Frames a decoder dropped instead of sending, by reason.", ["reason"], registry=REGISTRY
)
answers_missed = Counter(
    "sightline_answers_missed", "Answers lost to watching clients that read too slowly.", registry=REGISTRY
)
incident_events = Counter(
    "sightline_incident_events",
    "Events of incidents: kind is question or health; event is new, update or end.",
    ["kind", "event"],
    registry=REGISTRY,
)
incidents_open = Gauge("sightline_incidents_open", "Incidents that go on, by kind.", ["kind"], registry=REGISTRY)
alert_deliveries = Counter(
    "sightline_alert_deliveries",
    "Attempts to hand an alert to a sink: delivered, failed (tried again), dead (not tried again).",
    ["sink", "result"],
    registry=REGISTRY,
)
alerts_waiting = Gauge("sightline_alerts_waiting", "Alerts a sink has not taken yet.", ["sink"], registry=REGISTRY)
alerts_unwritten = Gauge(
    "sightline_alerts_unwritten", "Alerts that the disk does not take: they are in memory only.", registry=REGISTRY
)
alerts_lost = Counter(
    "sightline_alerts_lost", "Alerts that were neither written nor delivered when memory was full.", registry=REGISTRY
)
alerts_trimmed = Counter(
    "sightline_alerts_trimmed", "Delivered alerts forgotten early to make room for newer ones.", registry=REGISTRY
)
restarts = Counter(
    "sightline_process_restarts", "Processes started again after they died.", ["role"], registry=REGISTRY
)
ProcessCollector(registry=REGISTRY)


def record_window(answer: Answer, *, late: bool = False) -> None:
    """Count one answered window: its result, tokens and stage latencies. Call once per window, not per question."""
    windows.labels("gated" if answer.gated else "done", "").inc()
    if late:
        windows.labels("late", "").inc()
    for kind in ("full", "kept", "refreshed", "reused", "new", "query", "encoded"):
        tokens.labels(kind).inc(getattr(answer.tokens, kind))
    timing = answer.timing
    if not answer.gated:
        for stage in ("queue", "vision", "plan", "llm"):
            stage_seconds.labels(stage).observe(getattr(timing, f"{stage}_s"))
    stage_seconds.labels("total").observe(timing.latency_s)


def drop_window(reason: str, count: int = 1) -> None:
    """Count windows that were dropped on purpose."""
    windows.labels("dropped", reason).inc(count)


def lose_window(count: int = 1) -> None:
    """Count windows that went down with a process."""
    windows.labels("lost", "").inc(count)


class CameraMetrics:
    """One camera's series, so that they appear together and are gone when the camera is removed."""

    def __init__(self, camera: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.camera = camera
        self._clock = clock
        self._last_frame: float | None = None
        self.decode_errors = decode_errors.labels(camera)
        self.gaps = stream_gaps.labels(camera)
        camera_last_frame_age.labels(camera).set_function(self.age_s)
        self.state("waiting")

    def state(self, state: str) -> None:
        """Set the camera's state, one of :data:`STATES`.

        Raises:
            ValueError: no such state.
        """
        if state not in STATES:
            raise ValueError(f"unknown camera state {state!r}; there are: {', '.join(STATES)}")
        for name in STATES:
            camera_state.labels(self.camera, name).set(name == state)

    def frame(self, arrived_s: float | None = None) -> None:
        """A frame was decoded, now or at ``arrived_s`` of the clock."""
        self._last_frame = self._clock() if arrived_s is None else arrived_s

    def age_s(self) -> float:
        """Seconds since the last frame."""
        return float("inf") if self._last_frame is None else max(0.0, self._clock() - self._last_frame)

    def remove(self) -> None:
        """Forget the camera's series."""
        for name in STATES:
            camera_state.remove(self.camera, name)
        for family in (camera_last_frame_age, decode_errors, stream_gaps):
            family.remove(self.camera)


class MetricsServer:
    """``/metrics`` over HTTP on a thread of its own, until :meth:`close`.

    Raises:
        SightlineError: the port is taken or may not be opened.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, registry: CollectorRegistry = REGISTRY) -> None:
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise SightlineError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; "
                "choose another gateway.metrics_port, or 0 for any free one"
            ) from None
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(host: str = "127.0.0.1", port: int = 0, registry: CollectorRegistry = REGISTRY) -> str:
    """Serve ``/metrics`` for as long as the process lives; returns ``host:port``.

    Raises:
        SightlineError: the port is taken or may not be opened.
    """
    return MetricsServer(host, port, registry).address


class FederatedCollector(Collector):
    """The metrics of other processes, each sample with a ``process`` label, gathered when scraped.

    ``addresses()`` gives process name -> ``host:port`` of its ``/metrics``. ``own`` adds registries of this process
    under their names. A process that does not answer within ``timeout_s`` is left out, and
    ``sightline_process_up{process}`` is 0 for it.
    """

    MAX_BYTES = 16 * 2**20

    def __init__(
        self,
        addresses: Callable[[], dict[str, str]],
        own: Mapping[str, CollectorRegistry] | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        self._addresses = addresses
        self._own = dict(own or {})
        self._timeout_s = timeout_s

    def describe(self) -> list[Metric]:
        """Nothing is known before a scrape; also keeps registration from scraping."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of all processes, merged by name."""
        merged: dict[str, Metric] = {}
        for process, registry in self._own.items():
            _merge(merged, process, registry.collect())
        up = GaugeMetricFamily("sightline_process_up", "1 when a process answered the scrape.", labels=["process"])
        addresses = self._addresses()
        for process, page in self._scrape(addresses).items():
            try:
                _merge(merged, process, list(text_string_to_metric_families(page)))
                up.add_metric([process], 1)
            except ValueError:
                up.add_metric([process], 0)
        for process in addresses.keys() - {sample.labels["process"] for sample in up.samples}:
            up.add_metric([process], 0)
        yield from merged.values()
        if addresses:
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
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=self._timeout_s) as reply:
            body: bytes = reply.read(self.MAX_BYTES + 1)
        if len(body) > self.MAX_BYTES:
            raise ValueError(f"the metrics page of {address} is larger than {self.MAX_BYTES} bytes")
        return body.decode()


def _merge(merged: dict[str, Metric], process: str, families: Iterable[Metric]) -> None:
    for family in families:
        target = merged.get(family.name)
        if target is None:
            target = merged[family.name] = Metric(family.name, family.documentation, family.type)
        target.samples += [
            Sample(sample.name, {**sample.labels, "process": process}, sample.value) for sample in family.samples
        ]
