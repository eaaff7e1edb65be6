"""What operators look at first: is everyone there, are answers in time, how much room is left."""

from __future__ import annotations

from cluster.metrics.dashboards.grafana import Dashboard, Panel, Row

RATE = "[$__rate_interval]"
ANSWERED = 'sightline_windows_total{result=~"done|gated"}'


def lag(quantile: float) -> str:
    """Quantile of the lag in strides, over the fleet."""
    return f"histogram_quantile({quantile}, sum by (le) (rate(sightline_lag_strides_bucket{RATE})))"


FLEET = Dashboard(
    uid="sightline-fleet",
    title="Sightline / Fleet",
    description="Is everyone there, are answers in time, how much room is left.",
    rows=(
        Row(
            "Now",
            (
                Panel(
                    "Cameras running",
                    [('sum(sightline_camera_state{state="running"})', "running")],
                    "Cameras that decode pictures.",
                    kind="stat",
                    width=4,
                    height=4,
                    alert="SightlineManyCamerasDown",
                ),
                Panel(
                    "Cameras in trouble",
                    [('sum(sightline_camera_state{state=~"backoff|error"})', "in trouble")],
                    "Cameras that lost their source or cannot go on.",
                    kind="stat",
                    width=4,
                    height=4,
                    limits=((1, "orange"), (10, "red")),
                    alert="SightlineCameraDown",
                ),
                Panel(
                    "Answers",
                    [(f"sum(rate({ANSWERED}{RATE}))", "windows")],
                    "Windows answered a second, gated ones included.",
                    unit="reqps",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    "In time",
                    [
                        (
                            f'sum(rate(sightline_lag_strides_bucket{{le="1.0"}}{RATE})) '
                            f"/ sum(rate(sightline_lag_strides_count{RATE}))",
                            "in time",
                        )
                    ],
                    "Share of windows answered before the camera's next one was due: the objective.",
                    unit="percentunit",
                    kind="stat",
                    width=4,
                    height=4,
                    top=1,
                    alert="SightlineAnswersLate",
                ),
                Panel(
                    "Processes missing",
                    [("count(sightline_process_up == 0) or vector(0)", "missing")],
                    "Processes that do not answer the gateway's scrape.",
                    kind="stat",
                    width=4,
                    height=4,
                    limits=((1, "red"),),
                    alert="SightlineProcessDown",
                ),
                Panel(
                    "Restarts, 1 h",
                    [("sum(increase(sightline_process_restarts_total[1h]))", "restarts")],
                    "Processes started again after they died.",
                    kind="stat",
                    width=4,
                    height=4,
                    limits=((1, "orange"), (5, "red")),
                    alert="SightlineRestarts",
                ),
            ),
        ),
        Row(
            "Lag against objective",
            (
                Panel(
                    "Lag in strides",
                    [(lag(0.5), "median"), (lag(0.95), "95 %"), (lag(0.99), "99 %")],
                    "From a window's last frame to its answer, over the camera's stride. Above 1 the next one was due.",
                    limits=((1, "red"),),
                    alert="SightlineAnswersLate",
                ),
                Panel(
                    "Lag by replica, 95 %",
                    [
                        (
                            "histogram_quantile(0.95, sum by (le, process) "
                            f'(rate(sightline_stage_seconds_bucket{{stage="total"}}{RATE})))',
                            "{{process}}",
                        )
                    ],
                    "Seconds from a window's last frame to its answer.",
                    unit="s",
                    alert="SightlineAnswersLate",
                ),
                Panel(
                    "Windows by result",
                    [(f"sum by (result) (rate(sightline_windows_total{RATE}))", "{{result}}")],
                    "Late ones are also done; lost ones went down with a process.",
                    unit="reqps",
                    alert="SightlineWindowsDropped",
                ),
                Panel(
                    "Dropped, by reason",
                    [(f'sum by (reason) (rate(sightline_windows_total{{result="dropped"}}{RATE}))', "{{reason}}")],
                    "Windows given up on purpose.",
                    unit="reqps",
                    alert="SightlineWindowsDropped",
                ),
                Panel(
                    "Waiting",
                    [("sum by (queue) (sightline_queue_depth)", "{{queue}}")],
                    "Frames, windows and questions in the replicas' queues.",
                    alert="SightlineReplicaBehind",
                ),
                Panel(
                    "Backlog",
                    [("sightline_replica_backlog_seconds", "{{process}}")],
                    "Seconds of windows that wait at each replica.",
                    unit="s",
                    limits=((30, "red"),),
                    alert="SightlineReplicaBehind",
                ),
            ),
        ),
        Row(
            "Capacity and ladder",
            (
                Panel(
                    "Predicted load",
                    [("sightline_fleet_utilisation", "{{replica}}")],
                    "Work over capacity of each replica; the ladder acts above 0.95. 0 where costs are not known.",
                    unit="percentunit",
                    limits=((0.95, "red"),),
                    alert="SightlineFull",
                ),
                Panel(
                    "Busy",
                    [(f"rate(sightline_replica_busy_seconds_total{RATE})", "{{process}}")],
                    "Share of time in which a replica's engine worked.",
                    unit="percentunit",
                    top=1,
                    alert="SightlineFull",
                ),
                Panel(
                    "Cameras by replica",
                    [
                        ("sightline_fleet_cameras", "{{replica}}"),
                        ("sightline_fleet_lowered_cameras", "{{replica}} lowered"),
                    ],
                    "Placed on it, and of these below full quality.",
                ),
                Panel(
                    "Cameras by rung",
                    [("sum by (rung) (sightline_ladder_cameras)", "{{rung}}")],
                    "Quality ladder: cameras on each rung.",
                    stack=True,
                    alert="SightlineShedding",
                ),
                Panel(
                    "Steps on the ladder",
                    [(f"sum by (direction) (rate(sightline_ladder_steps_total{RATE}))", "{{direction}}")],
                    "Both rising together: a load at the edge.",
                    unit="reqps",
                ),
                Panel(
                    "Members",
                    [("sightline_fleet_members", "{{role}}"), ("sightline_fleet_wanted", "{{role}} wanted")],
                    "Decoders and replicas that the controller hears of, and how many there should be.",
                    alert="SightlineMembersMissing",
                ),
            ),
        ),
        Row(
            "Tiers and prefetch",
            (
                Panel(
                    "Held",
                    [("sum by (tier) (sightline_tier_bytes)", "{{tier}}")],
                    "KV of memories by tier.",
                    unit="bytes",
                ),
                Panel(
                    "Hit share",
                    [
                        (
                            f'sum by (tier) (rate(sightline_tier_blocks_total{{event="hits"}}{RATE})) / clamp_min('
                            f'sum by (tier) (rate(sightline_tier_blocks_total{{event=~"hits|misses"}}{RATE})), 1e-9)',
                            "{{tier}}",
                        )
                    ],
                    "Blocks found over blocks asked for; 0 while nobody asks.",
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "Tiers that work",
                    [("min by (tier) (sightline_tier_up)", "{{tier}}")],
                    "1 when every replica reaches the tier.",
                    top=1,
                    alert="SightlineTierDown",
                ),
                Panel(
                    "Not deleted yet",
                    [("sum(sightline_memory_deletions)", "cameras")],
                    "Cameras that a tier which is down has not deleted yet.",
                    alert="SightlineTierDown",
                ),
                Panel(
                    "Given up",
                    [
                        (
                            f'sum by (event) (rate(sightline_memory_blocks_total{{event="refused"}}{RATE}))',
                            "{{event}}",
                        )
                    ],
                    "Blocks of memories that no tier had room for.",
                    unit="reqps",
                    alert="SightlineMemoryLost",
                ),
                Panel(
                    "Loading hidden",
                    [
                        (
                            "clamp_min(1 - sum(sightline_prefetch_waited_seconds_total) / "
                            "clamp_min(sum(sightline_prefetch_transfer_seconds_total), 1e-9), 0)",
                            "hidden",
                        )
                    ],
                    "Share of the loading time of questions behind which computing went on, since the replicas began.",
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "Questions",
                    [(f"sum by (result) (rate(sightline_asks_total{RATE}))", "{{result}}")],
                    "Free questions about the past.",
                    unit="reqps",
                    alert="SightlineAsksFailing",
                ),
                Panel(
                    "Time to an answer, mean",
                    [
                        (
                            "sum by (stage) (sightline_ask_seconds_sum) / "
                            "clamp_min(sum by (stage) (sightline_ask_seconds_count), 1)",
                            "{{stage}}",
                        )
                    ],
                    "Seconds of free questions: until the first token, and in all.",
                    unit="s",
                ),
            ),
        ),
    ),
)
