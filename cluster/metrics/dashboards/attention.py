"""What operators look at when somebody must act: cameras in trouble, and whether alerts arrive."""

from __future__ import annotations

from cluster.metrics.dashboards.footage import FOOTAGE
from cluster.metrics.dashboards.grafana import Dashboard, Panel, Row
from cluster.metrics.dashboards.resources import RESOURCES

RATE = "[$__rate_interval]"

CAMERAS = Dashboard(
    uid="sightline-cameras",
    title="Sightline / Cameras",
    description="Which cameras need somebody, and how one of them does.",
    variables=(("camera", "sightline_camera_state", "camera"),),
    rows=(
        Row(
            "Needing attention",
            (
                Panel(
                    "Lost or failed",
                    [('sightline_camera_state{state=~"backoff|error"} == 1', "{{camera}} {{state}}")],
                    "Cameras without a working source; `sightline cameras list` says why.",
                    kind="table",
                    alert="SightlineCameraDown",
                ),
                Panel(
                    "Longest without a frame",
                    [("topk(10, sightline_camera_last_frame_age_seconds < +Inf)", "{{camera}}")],
                    "Seconds since the last decoded frame.",
                    unit="s",
                    kind="bargauge",
                    limits=((10, "orange"), (60, "red")),
                    alert="SightlineCameraSilent",
                ),
                Panel(
                    "Longest without an answer",
                    [("topk(10, time() - sightline_camera_answered_timestamp_seconds)", "{{camera}}")],
                    "Seconds since the newest answer.",
                    unit="s",
                    kind="bargauge",
                    limits=((60, "orange"), (300, "red")),
                    alert="SightlineCameraUnanswered",
                ),
                Panel(
                    "Damaged streams",
                    [
                        (
                            "topk(10, sum by (camera) (rate(sightline_stream_gaps_total[15m]) "
                            "+ rate(sightline_decode_errors_total[15m]))) * 60",
                            "{{camera}}",
                        )
                    ],
                    "Gaps and packets that cannot be decoded, a minute.",
                    limits=((2, "orange"),),
                    alert="SightlineStreamDamaged",
                ),
                Panel(
                    "Lowest quality",
                    [("bottomk(10, sightline_camera_quality)", "{{camera}}")],
                    "What answers are worth of full quality's, by the camera's rung.",
                    unit="percentunit",
                    top=1,
                    alert="SightlineShedding",
                ),
                Panel(
                    "Largest lag",
                    [("topk(10, sightline_camera_lag_seconds)", "{{camera}}")],
                    "Of the newest window.",
                    unit="s",
                    alert="SightlineAnswersLate",
                ),
            ),
        ),
        Row(
            "$camera",
            (
                Panel(
                    "Scores",
                    [('sightline_camera_score{camera=~"$camera"}', "{{camera}} {{question}}")],
                    "Newest score of each question.",
                    top=1,
                    width=12,
                ),
                Panel(
                    "Lag",
                    [('sightline_camera_lag_seconds{camera=~"$camera"}', "{{camera}}")],
                    "From the newest window's last frame to its answer.",
                    unit="s",
                    width=12,
                ),
                Panel(
                    "State",
                    [
                        (
                            'sum by (camera, state) (sightline_camera_state{camera=~"$camera"}) == 1',
                            "{{camera}} {{state}}",
                        )
                    ],
                    "The state that each camera is in.",
                    width=12,
                ),
                Panel(
                    "Remembered",
                    [('sightline_camera_memory_bytes{camera=~"$camera"}', "{{camera}}")],
                    "KV of the camera's memory.",
                    unit="bytes",
                    width=12,
                ),
            ),
        ),
        RESOURCES,
    ),
)

ALERTS = Dashboard(
    uid="sightline-alerts",
    title="Sightline / Alerts",
    description="Incidents, and whether people are told of them.",
    rows=(
        Row(
            "Incidents",
            (
                Panel(
                    "Open",
                    [("sum by (kind) (sightline_incidents_open)", "{{kind}}")],
                    "Incidents that go on: of questions, and of the cameras' own health.",
                ),
                Panel(
                    "Events",
                    [(f"sum by (kind, event) (rate(sightline_incident_events_total{RATE}))", "{{kind}} {{event}}")],
                    "Incidents that began, went on or ended.",
                    unit="reqps",
                ),
                Panel(
                    "Alerts of Sightline itself",
                    [('count(ALERTS{alertname=~"Sightline.*",alertstate="firing"}) or vector(0)', "firing")],
                    "Alert rules that fire now.",
                    kind="stat",
                    limits=((1, "red"),),
                ),
            ),
        ),
        Row(
            "Delivery",
            (
                Panel(
                    "Deliveries",
                    [(f"sum by (sink, result) (rate(sightline_alert_deliveries_total{RATE}))", "{{sink}} {{result}}")],
                    "Delivered, failed (tried again), dead (not tried again).",
                    unit="reqps",
                    alert="SightlineAlertsDead",
                ),
                Panel(
                    "Waiting",
                    [("sum by (sink) (sightline_alerts_waiting)", "{{sink}}")],
                    "Alerts that a sink has not taken yet.",
                    limits=((100, "red"),),
                    alert="SightlineAlertsUndelivered",
                ),
                Panel(
                    "Not on disk",
                    [("sum(sightline_alerts_unwritten)", "in memory only")],
                    "Alerts that the disk does not take.",
                    limits=((1, "red"),),
                    alert="SightlineAlertsUnwritten",
                ),
                Panel(
                    "Lost and trimmed",
                    [
                        (f"sum(rate(sightline_alerts_lost_total{RATE}))", "lost"),
                        (f"sum(rate(sightline_alerts_trimmed_total{RATE}))", "trimmed"),
                    ],
                    "Lost: neither written nor delivered. Trimmed: delivered, and forgotten early.",
                    unit="reqps",
                    alert="SightlineAlertsLost",
                ),
                Panel(
                    "Answers missed",
                    [("sum by (process) (increase(sightline_answers_missed_total[1h]))", "{{process}}")],
                    "Answers lost to watchers that read too slowly.",
                    alert="SightlineAnswersMissed",
                ),
            ),
        ),
        FOOTAGE,
    ),
)
