"""What the memories of a replica do: bytes and blocks of each tier, and how much of their loading nobody waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from cluster.memory.prefetch import PrefetchStats
    from cluster.memory.tiers.stack import TierStack

_BYTES = {"bytes_in": "in", "bytes_out": "out"}
_EVENTS = ("hits", "misses", "retries", "stored", "evicted", "damaged")
"""Shown from the first scrape on, so that a rate has a zero to begin with; others when they happen."""

_PREFETCHED = ("predicted", "used", "late", "wasted", "missed", "expired")


class MemoryCollector(Collector):
    """Reads the tiers of one process at a scrape; register it beside :data:`cluster.metrics.REGISTRY`'s own.

    Args:
        tiers: of the process.
        prefetched: what its prefetchers did so far.
    """

    def __init__(self, tiers: TierStack, prefetched: Callable[[], PrefetchStats]) -> None:
        self._tiers, self._prefetched = tiers, prefetched
        self._bytes = {tier.name: 0 for tier in tiers.tiers}

    def refresh(self) -> None:
        """Ask the tiers how much they hold, which may take each its deadline: not for a scrape to wait for."""
        self._bytes = {tier.name: tier.nbytes() for tier in self._tiers.tiers}

    def describe(self) -> list[Metric]:
        """Nothing, which keeps registration from collecting."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield from self._of_tiers()
        yield from self._of_stack()
        yield from self._of_prefetch()

    def _of_tiers(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("sightline_tier_bytes", "KV that a tier holds.", labels=["tier"])
        up = GaugeMetricFamily("sightline_tier_up", "1 when a tier works.", labels=["tier"])
        blocks = CounterMetricFamily(
            "sightline_tier_blocks", "Blocks of a tier by what became of them.", labels=["tier", "event"]
        )
        moved = CounterMetricFamily(
            "sightline_tier_moved_bytes", "Bytes into and out of a tier.", labels=["tier", "direction"]
        )
        for name, state in self._tiers.states().items():
            held.add_metric([name], self._bytes[name])
            up.add_metric([name], float(state.up))
            for event, count in ({**dict.fromkeys(_EVENTS, 0), **state.counts}).items():
                if event not in _BYTES:
                    blocks.add_metric([name, event], count)
            for event, direction in _BYTES.items():
                moved.add_metric([name, direction], state.counts.get(event, 0))
        yield from (held, up, blocks, moved)

    def _of_stack(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "sightline_memory_blocks",
            "Blocks of all tiers together: stored, promoted (copied up), refused.",
            labels=["event"],
        )
        for event, count in dict(self._tiers.counts).items():
            events.add_metric([event], count)
        yield events
        yield GaugeMetricFamily(
            "sightline_memory_deletions", "Cameras that a tier has not deleted yet.", len(self._tiers.deleting)
        )

    def _of_prefetch(self) -> Iterator[Metric]:
        stats = self._prefetched()
        blocks = CounterMetricFamily(
            "sightline_prefetch_blocks",
            "Blocks that questions read: predicted, of these used, late or wasted; missed were not predicted.",
            labels=["event"],
        )
        for event in _PREFETCHED:
            blocks.add_metric([event], getattr(stats, event))
        yield blocks
        yield CounterMetricFamily(
            "sightline_prefetch_transfer_seconds", "Seconds in which blocks were being loaded.", stats.transfer_s
        )
        yield CounterMetricFamily(
            "sightline_prefetch_waited_seconds", "Seconds of them in which the computation stood still.", stats.waited_s
        )
