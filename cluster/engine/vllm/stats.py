"""vLLM's own numbers: counted per engine as its steps report them, and its Prometheus metrics for our exposition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import StatLoggerBase

PREFIX = "vllm:"


@dataclass(slots=True)
class VllmStats:
    """What vLLM did since its engine core began. ``queries`` and ``hits`` are tokens of its prefix cache,
    ``connector_queries`` and ``connector_hits`` of its KV connector; the others are how things stand now."""

    queries: int = 0
    hits: int = 0
    connector_queries: int = 0
    connector_hits: int = 0
    preempted: int = 0
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that its prefix cache had."""
        return self.hits / self.queries if self.queries else 0.0


class StatsRecorder(StatLoggerBase):
    """Adds up what the scheduler reports into ``stats``; see ``AsyncLLM(stat_loggers=...)``."""

    def __init__(self, vllm_config: Any, engine_index: int = 0, *, stats: VllmStats | None = None) -> None:
        del vllm_config, engine_index
        self.stats = VllmStats() if stats is None else stats

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del iteration_stats, mm_cache_stats, engine_idx
        if scheduler_stats is None:
            return
        stats, prefix = self.stats, scheduler_stats.prefix_cache_stats
        stats.kv_usage = float(scheduler_stats.kv_cache_usage)
        stats.running, stats.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        if prefix is not None:
            stats.queries += prefix.queries
            stats.hits += prefix.hits
            stats.preempted += prefix.preempted_requests
        connector = scheduler_stats.connector_prefix_cache_stats
        if connector is not None:
            stats.connector_queries += connector.queries
            stats.connector_hits += connector.hits

    def log_engine_initialized(self) -> None:
        return


class VllmCollector(Collector):
    """vLLM's Prometheus metrics of this process, as it names them; register it beside ours."""

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for metric in REGISTRY.collect():
            if metric.name.startswith(PREFIX):
                yield metric
