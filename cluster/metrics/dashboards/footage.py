"""Panels of snapshots and clips: what is made of incidents, what it takes, and whether clips can begin in time."""

from __future__ import annotations

from cluster.metrics.dashboards.grafana import Panel, Row

RATE = "[$__rate_interval]"

FOOTAGE = Row(
    "Snapshots and clips",
    (
        Panel(
            "Clips",
            [(f"sum by (result) (rate(sightline_clips_total{RATE}))", "{{result}}")],
            "Clips of incidents: whole, part (something is missing), none; the incident says why.",
            unit="reqps",
        ),
        Panel(
            "On the disk",
            [("sum(sightline_footage_bytes)", "snapshots and clips")],
            "Beyond clips.max_bytes the oldest go.",
            unit="bytes",
        ),
        Panel(
            "Packets held",
            [("sum by (process) (sightline_ring_bytes)", "{{process}}")],
            "Encoded packets that decoders hold so that clips can begin before their incident; clips.ring_bytes each.",
            unit="bytes",
        ),
        Panel(
            "Cameras with too short a past",
            [("sum by (process) (sightline_rings_short)", "{{process}}")],
            "Cameras whose held packets do not reach back to where their clips should begin.",
            limits=((1, "orange"),),
            alert="SightlineRingsShort",
        ),
    ),
)
