"""Panels of the reconciler: the ``Camera`` resources of Kubernetes, and whether they are followed."""

from __future__ import annotations

from cluster.metrics.dashboards.grafana import Panel, Row

RATE = "[$__rate_interval]"

RESOURCES = Row(
    "Camera resources of Kubernetes",
    (
        Panel(
            "By state",
            [("sum by (state) (sightline_camera_resources)", "{{state}}")],
            "Resources by what became of their spec; conflict: another manager has a camera of that name.",
            stack=True,
            alert="SightlineResourcesRefused",
            needs="kubernetes",
        ),
        Panel(
            "Age of what is known",
            [("max by (since) (sightline_reconciler_age_seconds < +Inf)", "since the last {{since}}")],
            "Seconds since the API server last said anything, and since the last list: that one may be days, as long "
            "as the watch goes on.",
            unit="s",
            alert="SightlineResourcesStale",
            needs="kubernetes",
        ),
        Panel(
            "Watches begun anew",
            [(f"sum by (reason) (increase(sightline_reconciler_watch_restarts_total{RATE}))", "{{reason}}")],
            "ended: by the server, as it does every five minutes. expired: 410 Gone, everything is listed again.",
            alert="SightlineResourcesStale",
            needs="kubernetes",
        ),
        Panel(
            "Passes",
            [(f"sum by (result) (rate(sightline_reconciler_pass_seconds_count{RATE}))", "{{result}}")],
            "Comparisons of all resources with all cameras.",
            unit="reqps",
            alert="SightlineReconcilerFailing",
            needs="kubernetes",
        ),
        Panel(
            "Seconds of a pass, 95 %",
            [
                (
                    f"histogram_quantile(0.95, sum by (le) (rate(sightline_reconciler_pass_seconds_bucket{RATE})))",
                    "pass",
                )
            ],
            "A pass that removes cameras waits until every replica has forgotten them.",
            unit="s",
            needs="kubernetes",
        ),
        Panel(
            "Changes and statuses",
            [
                (f"sum by (change) (rate(sightline_reconciler_changes_total{RATE}))", "cameras {{change}}"),
                (f"sum by (result) (rate(sightline_reconciler_status_writes_total{RATE}))", "statuses: {{result}}"),
            ],
            "Cameras changed for their resources, and statuses written back; conflict: changed meanwhile, tried again.",
            unit="reqps",
            needs="kubernetes",
        ),
    ),
)
