"""Panels of the nodes' tier processes: what they hold, what their callers get, and how soon."""

from __future__ import annotations

from cluster.metrics.dashboards.grafana import Panel, Row

RATE = "[$__rate_interval]"

NODE_TIERS = Row(
    "Node tiers",
    (
        Panel(
            "Full",
            [
                (
                    'sightline_node_tier_bytes{kind="held"} / ignoring (kind) sightline_node_tier_bytes{kind="limit"}',
                    "{{process}}",
                )
            ],
            "Bytes of blocks over tiers.node_bytes. A full one evicts what was unused longest.",
            unit="percentunit",
            top=1,
        ),
        Panel(
            "Held",
            [
                ("sum(sightline_node_tier_held_blocks)", "blocks"),
                ("sum(sightline_node_tier_cameras)", "cameras"),
            ],
            "Blocks in all nodes' tiers, and cameras they are of; a camera that moved counts at both nodes.",
        ),
        Panel(
            "Moved",
            [(f"sum by (direction) (rate(sightline_node_tier_moved_bytes_total{RATE}))", "{{direction}}")],
            "Bytes of blocks, as they travel, into and out of the nodes' tiers.",
            unit="Bps",
        ),
        Panel(
            "Calls by result",
            [(f"sum by (result) (rate(sightline_node_tier_requests_total{RATE}))", "{{result}}")],
            "late: the caller's deadline passed. left: it went earlier, as one does that needs no more.",
            unit="reqps",
            alert="SightlineNodeTierFailing",
        ),
        Panel(
            "Seconds of a call, 99 %",
            [
                (
                    "histogram_quantile(0.99, sum by (le, method) "
                    f"(rate(sightline_node_tier_request_seconds_bucket{RATE})))",
                    "{{method}}",
                )
            ],
            "Of stores and loads with the time in which the caller wrote or read; replicas wait tiers.deadline_s.",
            unit="s",
            alert="SightlineNodeTierFailing",
        ),
        Panel(
            "What was said of blocks",
            [
                (
                    f"sum by (method, outcome) (rate(sightline_node_tier_blocks_total{RATE}))",
                    "{{method}}: {{outcome}}",
                )
            ],
            "hit: there, or taken; miss; pending: on its way; retry: not now.",
            unit="reqps",
        ),
        Panel(
            "Evicted and damaged",
            [(f'sum by (event) (rate(sightline_node_tier_events_total{{event!="stored"}}{RATE}))', "{{event}}")],
            "Blocks evicted for others, dropped when asked to, damaged on their way, of another model, too large.",
            unit="reqps",
            alert="SightlineBlocksDamaged",
        ),
    ),
)
