"""What the connector counts, as vLLM gathers, logs and exports it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loads": "Requests whose prompt began with blocks from outside.",
    "loaded_tokens": "Prompt tokens that blocks stood for instead of being computed.",
    "failed_loads": "Loads that found less than was promised; their requests end with an error and are asked again.",
    "saved_blocks": "Blocks of computed KV that were kept.",
    "lost_blocks": "Blocks that could not be kept, or must not be since their request's load failed.",
    "refused_requests": "Requests whose transfer made no sense; they end with an error.",
}


class ConnectorStats(KVConnectorStats):
    """Counts since the last report, by the names in ``COUNTERS``."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per name, beside vLLM's own: ``vllm:sightline_reuse_<name>``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:sightline_reuse_{name}", documentation=text, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
