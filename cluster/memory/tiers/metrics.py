"""Prometheus metrics of a node's tier process: blocks, bytes, and calls by result and duration."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.memory.tiers.base import Outcome
from cluster.metrics.families import node_tier_blocks, node_tier_requests, node_tier_seconds

if TYPE_CHECKING:
    from cluster.memory.tiers.arena import Arena
    from cluster.memory.tiers.server import KVServicer


NodeTierResult = Literal["ok", "refused", "invalid", "late", "left", "failed"]


_EVENTS = ("stored", "evicted", "dropped", "damaged", "foreign", "too_large")


class NodeTierCall:
    """Measures one call to the tier, from construction to :meth:`record_result`."""

    def __init__(self, method: str) -> None:
        self._method, self._began_s = method, time.monotonic()

    def record_result(self, result: NodeTierResult) -> None:
        node_tier_requests.labels(self._method, result).inc()
        node_tier_seconds.labels(self._method).observe(time.monotonic() - self._began_s)

    def record_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        for outcome, blocks in Counter(outcomes).items():
            node_tier_blocks.labels(self._method, outcome.value).inc(blocks)


class NodeTierCollector(Collector):
    """Collects the tier's metrics on scrape; register it with :data:`cluster.metrics.REGISTRY`.

    Args:
        limit_bytes: capacity of the tier.
        look: returns the arena and the service; ``None`` until a replica has announced its model. Both are replaced,
            with counters at zero, when the model changes.
    """

    def __init__(self, limit_bytes: int, look: Callable[[], tuple[Arena, KVServicer] | None]) -> None:
        self._limit_bytes, self._look = limit_bytes, look

    def collect(self) -> Iterator[Metric]:
        bytes_, counts = {"held": 0, "reserved": 0, "limit": self._limit_bytes}, dict.fromkeys(_EVENTS, 0)
        cameras = blocks = 0
        found = self._look()
        if found is not None:
            arena, service = found
            bytes_ |= {"held": arena.nbytes(), "reserved": arena.reserved}
            cameras, blocks = arena.contents()
            counted = arena.state().counts | service.wire_counts()
            counts |= {event: counted[event] for event in _EVENTS if event in counted}
        held = GaugeMetricFamily(
            "sightline_node_tier_bytes",
            "Memory of a node's tier by kind: held by blocks and manifests, reserved, and its limit.",
            labels=["kind"],
        )
        for kind, size in bytes_.items():
            held.add_metric([kind], size)
        yield held
        yield GaugeMetricFamily("sightline_node_tier_held_blocks", "Blocks held by a node's tier.", blocks)
        yield GaugeMetricFamily("sightline_node_tier_cameras", "Cameras with blocks in a node's tier.", cameras)
        events = CounterMetricFamily(
            "sightline_node_tier_events",
            "Blocks stored, evicted, dropped on request, damaged in transit, foreign (of another model) or too_large.",
            labels=["event"],
        )
        for event, many in counts.items():
            events.add_metric([event], many)
        yield events
