"""vLLM statistics: counters per engine core, and its Prometheus metrics for our exposition."""

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
    """Tokens looked up and found in vLLM's prefix cache since its engine core started."""

    queries: int = 0
    hits: int = 0


class StatsRecorder(StatLoggerBase):
    """Accumulates scheduler statistics into ``stats``; see ``AsyncLLM(stat_loggers=...)``."""

    def __init__(self, vllm_config: Any, engine_index: int = 0, *, stats: VllmStats | None = None) -> None:
        del vllm_config, engine_index
        self.stats = VllmStats() if stats is None else stats

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del iteration_stats, mm_cache_stats, engine_idx
        prefix = None if scheduler_stats is None else scheduler_stats.prefix_cache_stats
        if prefix is not None:
            self.stats.queries += prefix.queries
            self.stats.hits += prefix.hits

    def log_engine_initialized(self) -> None:
        return


class VllmCollector(Collector):
    """vLLM's Prometheus metrics of this process under their own names; register it beside ours."""

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for metric in REGISTRY.collect():
            if metric.name.startswith(PREFIX):
                yield metric
