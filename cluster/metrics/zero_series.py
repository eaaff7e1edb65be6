"""Creates series at zero before the first scrape: ``rate()`` counts a series' first event only after a zero."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

from cluster.metrics import families
from cluster.metrics.cameras import WATCH_ENDS, show_resources

Role = Literal["controller", "decoder", "replica", "gateway", "alerting", "tier", "reconciler"]
Series = tuple[Any, *tuple[Sequence[str], ...]]
"""A family and the values of each label."""

_DECODER_DROPS = ("shed", "decoder_slow", "replica_slow", "no_replica")
_TIER_CALLS = ("store", "load", "drop", "list", "put_manifest", "get_manifest", "usage")
_LOST: Series = (families.windows, ("lost",), ("",))
_SPANS: Series = (families.spans, ("exported", "dropped"))

_SERIES: Mapping[Role, Sequence[Series]] = {
    "controller": [_LOST, (families.restarts, ("decoder", "replica")), (families.ladder_steps, ("up", "down"))],
    "decoder": [
        _LOST,
        _SPANS,
        (families.windows, ("dropped",), _DECODER_DROPS),
        (families.frames_dropped, (*_DECODER_DROPS, "not_asked", "refused", "closed")),
        (families.frames_lost, ("refused", "unacknowledged")),
        (families.ingest_dropped, ("queue_full",)),
    ],
    "replica": [
        _LOST,
        _SPANS,
        (families.windows, ("dropped",), ("replaced", "overflow", "late", "failed")),
        (families.windows, ("done", "gated", "late"), ("",)),
        (families.tokens, ("full", "kept", "refreshed", "reused", "new", "query", "encoded")),
        (families.stage_seconds, ("queue", "vision", "plan", "llm", "total")),
        (families.asks, ("answered", "refused", "failed")),
        (families.ask_seconds, ("first_token", "total")),
        (families.queue_depth, ("windows", "frames", "questions")),
    ],
    "gateway": [(families.http_replies, ("2xx", "4xx", "5xx")), (families.http_dropped, ("refused", "evicted", "cut"))],
    "alerting": [
        _SPANS,
        (families.incidents_open, ("question", "health")),
        (families.incident_events, ("question", "health"), ("new", "update", "end")),
        (families.clips, ("whole", "part", "none")),
    ],
    "tier": [
        (families.node_tier_requests, _TIER_CALLS, ("ok", "refused", "invalid", "late", "left", "failed")),
        (families.node_tier_seconds, _TIER_CALLS),
        (families.node_tier_blocks, ("store", "load"), ("hit", "miss", "retry")),
        (families.node_tier_moved_bytes, ("in", "out")),
    ],
    "reconciler": [
        (families.reconciler_changes, ("added", "changed", "removed")),
        (families.reconciler_pass_seconds, ("done", "unavailable", "failed")),
        (families.reconciler_status_writes, ("written", "conflict", "gone", "failed")),
        (families.reconciler_watch_restarts, WATCH_ENDS),
    ],
}


def create_zero_series(role: Role, sinks: Sequence[str] = ()) -> None:
    """Create the series with known labels of a process of this role; ``sinks``: names of alert sinks."""
    series = [(families.log_records, ("info", "warning", "error")), *_SERIES[role]]
    if role == "alerting":
        series.append((families.alert_deliveries, sinks, ("delivered", "failed", "dead")))
    elif role == "reconciler":
        show_resources(())
    for family, *labels in series:
        for values in product(*labels):
            family.labels(*values)
