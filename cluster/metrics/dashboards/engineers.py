"""What engineers look at: where the time of a window goes, what is computed and what is not, and the machines."""

from __future__ import annotations

from cluster.metrics.dashboards.grafana import Dashboard, Panel, Row
from cluster.metrics.dashboards.node_tier import NODE_TIERS

RATE = "[$__rate_interval]"
COMPUTED = 'sightline_tokens_total{kind=~"refreshed|new|query"}'


def stage(quantile: float) -> str:
    """Quantile of the seconds in each stage, over the fleet."""
    return f"histogram_quantile({quantile}, sum by (le, stage) (rate(sightline_stage_seconds_bucket{RATE})))"


def tokens(kind: str) -> str:
    """Tokens a second of a kind, over the fleet."""
    return f'sum(rate(sightline_tokens_total{{kind="{kind}"}}{RATE}))'


ENGINE = Dashboard(
    uid="sightline-engine",
    title="Sightline / Engine",
    description="Where the time of a window goes, and what is computed and what is not.",
    rows=(
        Row(
            "Stages",
            (
                Panel("Median", [(stage(0.5), "{{stage}}")], "Seconds a window spends in each stage.", unit="s"),
                Panel("95 %", [(stage(0.95), "{{stage}}")], "Seconds a window spends in each stage.", unit="s"),
                Panel(
                    "Where the time goes",
                    [(f'sum by (stage) (rate(sightline_stage_seconds_sum{{stage!="total"}}{RATE}))', "{{stage}}")],
                    "Seconds of each stage per second, all windows together.",
                    unit="s",
                    stack=True,
                ),
                Panel(
                    "Windows in a batch, mean",
                    [
                        (
                            f"sum by (process) (rate(sightline_batch_windows_sum{RATE})) / "
                            f"clamp_min(sum by (process) (rate(sightline_batch_windows_count{RATE})), 1e-9)",
                            "{{process}}",
                        )
                    ],
                    "Windows that went through the engine together.",
                ),
                Panel(
                    "Batches by size",
                    [(f"sum by (le) (increase(sightline_batch_windows_bucket{RATE}))", "up to {{le}}")],
                    "Batches of at most so many windows.",
                ),
                Panel(
                    "Rows per second of LLM time",
                    [
                        (
                            f"sum(rate({COMPUTED}{RATE})) / "
                            f'clamp_min(sum(rate(sightline_stage_seconds_sum{{stage="llm"}}{RATE})), 1e-9)',
                            "rows",
                        )
                    ],
                    "How fast the attention and the layers' kernels are; falls when batches are too small.",
                ),
                Panel(
                    "Attention kernels",
                    [("count by (kernel, device) (sightline_attention_kernel)", "{{kernel}} {{device}}")],
                    "Replicas by what computes their attention.",
                    kind="table",
                    height=4,
                ),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel(
                    "Computed and reused",
                    [
                        (
                            f'sum by (kind) (rate(sightline_tokens_total{{kind=~"reused|refreshed|new|query"}}{RATE}))',
                            "{{kind}}",
                        )
                    ],
                    "Tokens of answered windows a second.",
                    stack=True,
                ),
                Panel(
                    "Saved",
                    [
                        (f"1 - {tokens('kept')} / clamp_min({tokens('full')}, 1e-9)", "pruned"),
                        (f"{tokens('reused')} / clamp_min({tokens('kept')}, 1e-9)", "reused of the kept"),
                    ],
                    "Shares of tokens: cut away before the tower, and taken over from the last window.",
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "Through the tower",
                    [(tokens("encoded"), "encoded")],
                    "Visual tokens encoded a second.",
                ),
            ),
        ),
        Row(
            "Video in",
            (
                Panel(
                    "Frames to replicas",
                    [
                        (f"sum(rate(sightline_frames_sent_total{RATE}))", "sent"),
                        (f"sum by (reason) (rate(sightline_frames_dropped_total{RATE}))", "dropped: {{reason}}"),
                    ],
                    "Frames that decoders sent, and those that they dropped instead.",
                    unit="reqps",
                    alert="SightlineFramesDropped",
                ),
                Panel(
                    "Decoding behind",
                    [
                        ("max by (process) (sightline_decode_behind_strides)", "strides: {{process}}"),
                        (
                            "sum by (process) (sightline_decode_keyframes_only_cameras)",
                            "keyframes only: {{process}}",
                        ),
                    ],
                    "How long the median camera's packets wait to be decoded, in strides, and cameras that gave way.",
                    alert="SightlineDecoderSlow",
                ),
                Panel(
                    "Pushed packets",
                    [
                        (f"sum(rate(sightline_ingest_packets_total{RATE}))", "taken"),
                        (
                            f"sum by (reason) (rate(sightline_ingest_packets_dropped_total{RATE}))",
                            "dropped: {{reason}}",
                        ),
                    ],
                    "Encoded packets of edge agents.",
                    unit="reqps",
                    alert="SightlineIngestDropped",
                ),
                Panel(
                    "Pushed bytes",
                    [(f"sum(rate(sightline_ingest_bytes_total{RATE}))", "taken")],
                    "Bytes of encoded packets.",
                    unit="Bps",
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                Panel(
                    "Moved",
                    [
                        (
                            f"sum by (tier, direction) (rate(sightline_tier_moved_bytes_total{RATE}))",
                            "{{tier}} {{direction}}",
                        )
                    ],
                    "Bytes into and out of each tier.",
                    unit="Bps",
                ),
                Panel(
                    "Blocks",
                    [(f"sum by (tier, event) (rate(sightline_tier_blocks_total{RATE}))", "{{tier}} {{event}}")],
                    "What became of blocks in each tier.",
                    unit="reqps",
                ),
                Panel(
                    "Prefetched",
                    [(f"sum by (event) (rate(sightline_prefetch_blocks_total{RATE}))", "{{event}}")],
                    "Used or wasted, and what had not been predicted.",
                    unit="reqps",
                ),
                Panel(
                    "Read by questions",
                    [(f"sum(rate(sightline_ask_read_bytes_total{RATE}))", "read")],
                    "Bytes of memory that free questions read.",
                    unit="Bps",
                ),
                Panel(
                    "Redis: held",
                    [('sum(sightline_tier_bytes{tier="redis"})', "values")],
                    "Bytes that memories hold in Redis, as the replicas count them.",
                    unit="bytes",
                    needs="redis",
                ),
                Panel(
                    "Redis: trouble",
                    [
                        (
                            'sum by (event) (rate(sightline_tier_blocks_total{tier="redis",event=~"retries|failures"}'
                            f"{RATE}))",
                            "{{event}}",
                        )
                    ],
                    "Blocks that Redis did not take or give when asked, and calls that failed.",
                    unit="reqps",
                    alert="SightlineTierDown",
                    needs="redis",
                ),
            ),
        ),
        NODE_TIERS,
    ),
)

MACHINES = Dashboard(
    uid="sightline-machines",
    title="Sightline / Machines",
    description="Processes, hosts, GPUs, and what the processes say of themselves.",
    rows=(
        Row(
            "Processes",
            (
                Panel(
                    "CPU",
                    [(f'rate(process_cpu_seconds_total{{process!=""}}{RATE})', "{{process}}")],
                    "Cores in use by each process.",
                ),
                Panel(
                    "Memory",
                    [('process_resident_memory_bytes{process!=""}', "{{process}}")],
                    "Resident memory of each process.",
                    unit="bytes",
                ),
                Panel(
                    "Open files",
                    [('process_open_fds{process!=""} / process_max_fds{process!=""}', "{{process}}")],
                    "Share of the file descriptors that a process may open.",
                    unit="percentunit",
                    limits=((0.8, "red"),),
                ),
                Panel(
                    "Messages logged",
                    [(f"sum by (level) (rate(sightline_log_records_total{RATE}))", "{{level}}")],
                    "Log messages a second, by level.",
                    unit="reqps",
                    alert="SightlineLogErrors",
                ),
                Panel(
                    "Spans",
                    [(f"sum by (result) (rate(sightline_spans_total{RATE}))", "{{result}}")],
                    "Spans of traces that were exported or dropped.",
                    unit="reqps",
                ),
                Panel(
                    "What runs",
                    [("count by (version, engine, model, config) (sightline_build_info)", "{{version}} {{config}}")],
                    "Processes by version and configuration; more than one line means that they differ.",
                    kind="table",
                    alert="SightlineConfigsDiffer",
                ),
            ),
        ),
        Row(
            "Gateway's HTTP",
            (
                Panel(
                    "Replies",
                    [(f"sum by (status) (rate(sightline_http_replies_total{RATE}))", "{{status}}")],
                    "Replies of the gateway's HTTP port by status.",
                    unit="reqps",
                ),
                Panel(
                    "Connections dropped",
                    [(f"sum by (reason) (rate(sightline_http_connections_dropped_total{RATE}))", "{{reason}}")],
                    "Refused because there were too many, or cut because they stalled.",
                    unit="reqps",
                ),
                Panel(
                    "Browsers that follow",
                    [
                        ("sum(sightline_http_readers)", "following"),
                        (f"sum(rate(sightline_http_events_missed_total{RATE}))", "events missed a second"),
                    ],
                    "Readers of the live events, and what they lost by reading too slowly.",
                ),
            ),
        ),
        Row(
            "Hosts (Ray)",
            (
                Panel(
                    "CPU of the host",
                    [("ray_node_cpu_utilization / 100", "{{ip}}")],
                    "Share of the host's cores in use, by whatever runs there.",
                    unit="percentunit",
                    top=1,
                    needs="ray",
                ),
                Panel(
                    "Memory of the host",
                    [("ray_node_mem_used / ray_node_mem_total", "{{ip}}")],
                    "Share of the host's memory in use.",
                    unit="percentunit",
                    top=1,
                    limits=((0.9, "red"),),
                    needs="ray",
                ),
                Panel(
                    "Actors",
                    [("sum by (State) (ray_actors)", "{{State}}")],
                    "Ray actors by state.",
                    needs="ray",
                ),
                Panel(
                    "Disk",
                    [("ray_node_disk_utilization_percentage / 100", "{{ip}}")],
                    "Share of the host's disk in use.",
                    unit="percentunit",
                    top=1,
                    limits=((0.9, "red"),),
                    needs="ray",
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                Panel(
                    "Busy",
                    [("DCGM_FI_DEV_GPU_UTIL / 100", "{{Hostname}} {{gpu}}")],
                    "Share of time in which a kernel ran (dcgm-exporter).",
                    unit="percentunit",
                    top=1,
                    needs="dcgm",
                ),
                Panel(
                    "Video decoder (NVDEC)",
                    [("DCGM_FI_DEV_DEC_UTIL / 100", "{{Hostname}} {{gpu}}")],
                    "Share of the decoder in use (dcgm-exporter).",
                    unit="percentunit",
                    top=1,
                    needs="dcgm",
                ),
                Panel(
                    "Tensor cores",
                    [("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "{{Hostname}} {{gpu}}")],
                    "Share of cycles in which tensor cores worked (dcgm-exporter).",
                    unit="percentunit",
                    top=1,
                    needs="dcgm",
                ),
                Panel(
                    "Memory in use",
                    [("DCGM_FI_DEV_FB_USED * 1048576", "{{Hostname}} {{gpu}}")],
                    "Memory of each GPU in use (dcgm-exporter).",
                    unit="bytes",
                    needs="dcgm",
                ),
                Panel(
                    "Power",
                    [("DCGM_FI_DEV_POWER_USAGE", "{{Hostname}} {{gpu}}")],
                    "Watts (dcgm-exporter).",
                    unit="watt",
                    needs="dcgm",
                ),
                Panel(
                    "As the replicas see them",
                    [
                        ("sightline_gpu_busy_ratio", "{{process}} {{gpu}} kernels"),
                        ("sightline_gpu_decoder_busy_ratio", "{{process}} {{gpu}} decoder"),
                        (
                            'sightline_gpu_memory_bytes{kind="used"} / ignoring(kind) '
                            'sightline_gpu_memory_bytes{kind="total"}',
                            "{{process}} {{gpu}} memory",
                        ),
                    ],
                    "From the management library in the replica's own process, where it is installed.",
                    unit="percentunit",
                    top=1,
                    needs="nvml",
                ),
            ),
        ),
    ),
)
