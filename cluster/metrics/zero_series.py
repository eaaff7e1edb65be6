"""Creates series at zero before the first scrape: ``rate()`` sees a first event only after a zero."""

from collections.abc import Sequence
from typing import Literal

from cluster.metrics.cameras import WATCH_ENDS, show_resources
from cluster.metrics.families import (
    alert_deliveries,
    ask_seconds,
    asks,
    clips,
    frames_dropped,
    http_dropped,
    http_replies,
    incident_events,
    incidents_open,
    ingest_dropped,
    ladder_steps,
    log_records,
    node_tier_blocks,
    node_tier_moved_bytes,
    node_tier_requests,
    node_tier_seconds,
    queue_depth,
    reconciler_changes,
    reconciler_pass_seconds,
    reconciler_status_writes,
    reconciler_watch_restarts,
    restarts,
    spans,
    stage_seconds,
    tokens,
    windows,
)

Role = Literal["controller", "decoder", "replica", "gateway", "alerting", "tier", "reconciler"]

DECODER_DROPS = ("shed", "decoder_slow", "replica_slow", "no_replica")


def create_zero_series(role: Role, sinks: Sequence[str] = ()) -> None:
    """Create the series with known labels that a process of this role counts; ``sinks`` of alerts by name."""
    for level in ("info", "warning", "error"):
        log_records.labels(level)
    if role in ("decoder", "replica", "alerting"):
        for result in ("exported", "dropped"):
            spans.labels(result)
    if role in ("decoder", "replica"):
        for reason in DECODER_DROPS if role == "decoder" else ("replaced", "late", "failed"):
            windows.labels("dropped", reason)
    if role in ("controller", "decoder", "replica"):
        windows.labels("lost", "")
    if role == "decoder":
        for reason in (*DECODER_DROPS, "not_asked"):
            frames_dropped.labels(reason)
        ingest_dropped.labels("queue_full")
    elif role == "replica":
        for result in ("done", "gated", "late"):
            windows.labels(result, "")
        for kind in ("full", "kept", "refreshed", "reused", "new", "query", "encoded"):
            tokens.labels(kind)
        for stage in ("queue", "vision", "plan", "llm", "total"):
            stage_seconds.labels(stage)
        for result in ("answered", "refused", "failed"):
            asks.labels(result)
        for until in ("first_token", "total"):
            ask_seconds.labels(until)
        for queue in ("windows", "frames", "questions"):
            queue_depth.labels(queue)
    elif role == "gateway":
        for status in ("2xx", "4xx", "5xx"):
            http_replies.labels(status)
        for reason in ("refused", "cut"):
            http_dropped.labels(reason)
    elif role == "controller":
        for member in ("decoder", "replica"):
            restarts.labels(member)
        for direction in ("up", "down"):
            ladder_steps.labels(direction)
    elif role == "alerting":
        for kind in ("question", "health"):
            incidents_open.labels(kind)
            for event in ("new", "update", "end"):
                incident_events.labels(kind, event)
        for made in ("whole", "part", "none"):
            clips.labels(made)
        for sink in sinks:
            for outcome in ("delivered", "failed", "dead"):
                alert_deliveries.labels(sink, outcome)
    elif role == "tier":
        for method in ("lookup", "store", "load", "drop", "list", "put_manifest", "get_manifest", "usage"):
            node_tier_seconds.labels(method)
            for result in ("ok", "refused", "invalid", "late", "left", "failed"):
                node_tier_requests.labels(method, result)
        for method in ("lookup", "store", "load"):
            for outcome in ("hit", "miss", "pending", "retry"):
                node_tier_blocks.labels(method, outcome)
        for direction in ("in", "out"):
            node_tier_moved_bytes.labels(direction)
    elif role == "reconciler":
        show_resources(())
        for change in ("added", "changed", "removed"):
            reconciler_changes.labels(change)
        for result in ("done", "unavailable", "failed"):
            reconciler_pass_seconds.labels(result)
        for result in ("written", "conflict", "gone", "failed"):
            reconciler_status_writes.labels(result)
        for why in WATCH_ENDS:
            reconciler_watch_restarts.labels(why)
