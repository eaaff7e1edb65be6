"""All metrics that Sightline's processes count themselves; values read at scrape time have collectors instead.

Counters and gauges may have a camera label, histograms never: a thousand cameras times a dozen buckets would overload a
Prometheus server. Histograms are told apart by the ``process`` label that the gateway adds.
"""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# `_created` series double every counter and histogram, and nothing here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
"""Registry behind this process's ``/metrics``."""

windows = Counter(
    "sightline_windows",
    "Windows by result; late ones were answered after the next was due and are also done. reason is set when dropped.",
    ["result", "reason"],
    registry=REGISTRY,
)
tokens = Counter(
    "sightline_tokens",
    "Tokens of answered windows: full (nothing pruned), kept = reused + refreshed + new, query, encoded by the tower.",
    ["kind"],
    registry=REGISTRY,
)
stage_seconds = Histogram(
    "sightline_stage_seconds",
    "Seconds a window spent in each stage; total runs from the arrival of its last frame to its answer.",
    ["stage"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
batch_windows = Histogram(
    "sightline_batch_windows",
    "Windows answered together in one forward pass.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
    registry=REGISTRY,
)
queue_depth = Gauge("sightline_queue_depth", "Items waiting in a bounded queue.", ["queue"], registry=REGISTRY)
ladder_cameras = Gauge(
    "sightline_ladder_cameras", "Cameras on each rung of the quality ladder.", ["rung"], registry=REGISTRY
)
ladder_steps = Counter(
    "sightline_ladder_steps", "Steps of cameras on the quality ladder, up or down.", ["direction"], registry=REGISTRY
)
camera_state = Gauge(
    "sightline_camera_state",
    "1 for the state a camera is in, 0 for the others.",
    ["camera", "state"],
    registry=REGISTRY,
)
camera_last_frame_age = Gauge(
    "sightline_camera_last_frame_age_seconds",
    "Seconds since a camera's last decoded frame; +Inf before its first.",
    ["camera"],
    registry=REGISTRY,
)
decode_errors = Counter("sightline_decode_errors", "Packets the decoder could not use.", ["camera"], registry=REGISTRY)
stream_gaps = Counter(
    "sightline_stream_gaps",
    "Gaps in a camera's stream, each up to the next keyframe.",
    ["camera"],
    registry=REGISTRY,
)
ingest_packets = Counter("sightline_ingest_packets", "Encoded packets received over gRPC.", registry=REGISTRY)
ingest_bytes = Counter("sightline_ingest_bytes", "Bytes of encoded packets received over gRPC.", registry=REGISTRY)
ingest_dropped = Counter(
    "sightline_ingest_packets_dropped", "Pushed packets dropped, by reason.", ["reason"], registry=REGISTRY
)
frames_sent = Counter("sightline_frames_sent", "Frames a decoder sent to its replicas.", registry=REGISTRY)
frames_dropped = Counter(
    "sightline_frames_dropped", "Frames a decoder dropped instead of sending, by reason.", ["reason"], registry=REGISTRY
)
decode_behind = Gauge(
    "sightline_decode_behind_strides",
    "Decode backlog of a decoder's median camera, in strides.",
    registry=REGISTRY,
)
decode_keyframes_only = Gauge(
    "sightline_decode_keyframes_only_cameras",
    "Cameras that an overloaded decoder reduces to keyframes; their windows are dropped as decoder_slow.",
    registry=REGISTRY,
)
answers_missed = Counter(
    "sightline_answers_missed", "Answers lost to watching clients that read too slowly.", registry=REGISTRY
)
incident_events = Counter(
    "sightline_incident_events",
    "Events of incidents: kind is question or health; event is new, update or end.",
    ["kind", "event"],
    registry=REGISTRY,
)
incidents_open = Gauge("sightline_incidents_open", "Open incidents by kind.", ["kind"], registry=REGISTRY)
alert_deliveries = Counter(
    "sightline_alert_deliveries",
    "Delivery attempts of alerts: delivered, failed (retried), dead (given up).",
    ["sink", "result"],
    registry=REGISTRY,
)
alerts_waiting = Gauge("sightline_alerts_waiting", "Alerts queued for a sink.", ["sink"], registry=REGISTRY)
alerts_unwritten = Gauge(
    "sightline_alerts_unwritten", "Alerts in memory that could not be written to disk.", registry=REGISTRY
)
alerts_lost = Counter(
    "sightline_alerts_lost",
    "Alerts lost before delivery: memory was full while the disk failed, or they were older than alerts.retention.",
    registry=REGISTRY,
)
alerts_trimmed = Counter(
    "sightline_alerts_trimmed", "Delivered alerts deleted early to make room for newer ones.", registry=REGISTRY
)
clips = Counter(
    "sightline_clips",
    "Clips of incidents by result: whole, part (something is missing), none.",
    ["result"],
    registry=REGISTRY,
)
footage_bytes = Gauge("sightline_footage_bytes", "Bytes of snapshots and clips on the disk.", registry=REGISTRY)
ring_bytes = Gauge(
    "sightline_ring_bytes",
    "Bytes of the packet rings of a decoder process, from which clips begin before their incident.",
    registry=REGISTRY,
)
rings_short = Gauge(
    "sightline_rings_short",
    "Cameras of a decoder process whose packet ring is shorter than configured.",
    registry=REGISTRY,
)
restarts = Counter(
    "sightline_process_restarts", "Processes started again after they died.", ["role"], registry=REGISTRY
)
lag_strides = Histogram(
    "sightline_lag_strides",
    "Seconds from a window's last frame to its answer, over its camera's stride: above 1 the next one was due already.",
    buckets=(0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8),
    registry=REGISTRY,
)
build_info = Gauge(
    "sightline_build_info",
    "Always 1; labels are version, engine, model and digest of the configuration.",
    ["version", "engine", "model", "config"],
    registry=REGISTRY,
)
attention_kernel = Gauge(
    "sightline_attention_kernel",
    "Always 1; labels are a replica's attention kernels and device.",
    ["kernel", "device"],
    registry=REGISTRY,
)
log_records = Counter("sightline_log_records", "Messages logged, by level.", ["level"], registry=REGISTRY)
spans = Counter(
    "sightline_spans",
    "Spans of traces: exported, or dropped because the collector was slow or down.",
    ["result"],
    registry=REGISTRY,
)
replica_busy_seconds = Counter(
    "sightline_replica_busy_seconds",
    "Busy seconds of a replica's engine, windows and questions.",
    registry=REGISTRY,
)
replica_backlog_seconds = Gauge(
    "sightline_replica_backlog_seconds", "Predicted seconds of windows waiting at a replica.", registry=REGISTRY
)
replica_cameras = Gauge("sightline_replica_cameras", "Cameras whose windows a replica holds.", registry=REGISTRY)
fleet_members = Gauge(
    "sightline_fleet_members", "Decoders and replicas with a current heartbeat.", ["role"], registry=REGISTRY
)
camera_expected = Gauge(
    "sightline_camera_expected",
    "1 for every camera that the controller has, whether a decoder runs it or not.",
    ["camera"],
    registry=REGISTRY,
)
fleet_wanted = Gauge(
    "sightline_fleet_wanted", "Decoders and replicas that the configuration asks for.", ["role"], registry=REGISTRY
)
fleet_utilisation = Gauge(
    "sightline_fleet_utilisation",
    "Predicted work of a replica over its capacity; 0 without a cost model.",
    ["replica"],
    registry=REGISTRY,
)
fleet_cameras = Gauge(
    "sightline_fleet_cameras", "Cameras that the controller placed on a replica.", ["replica"], registry=REGISTRY
)
fleet_lowered = Gauge(
    "sightline_fleet_lowered_cameras", "Those of them below full quality.", ["replica"], registry=REGISTRY
)
asks = Counter(
    "sightline_asks", "Free questions: answered, refused (too many wait), failed.", ["result"], registry=REGISTRY
)
ask_seconds = Histogram(
    "sightline_ask_seconds",
    "Seconds of answered free questions: first_token from the start of the computation, total.",
    ["stage"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
ask_read_bytes = Counter(
    "sightline_ask_read_bytes", "Bytes of memory that free questions read from the tiers.", registry=REGISTRY
)
decode_cameras = Gauge(
    "sightline_decode_cameras",
    "Cameras by the device that decodes them: cuda or cpu.",
    ["device"],
    registry=REGISTRY,
)
nvdec_sessions = Gauge("sightline_nvdec_sessions", "Sessions of the GPU's decoder in use.", registry=REGISTRY)
camera_quality = Gauge(
    "sightline_camera_quality",
    "Value of a camera's answers relative to full quality, by its rung of the ladder; 0 when it is shed.",
    ["camera"],
    registry=REGISTRY,
)
camera_lag = Gauge(
    "sightline_camera_lag_seconds",
    "Seconds from the last frame of a camera's newest window to its answer.",
    ["camera"],
    registry=REGISTRY,
)
camera_answered = Gauge(
    "sightline_camera_answered_timestamp_seconds",
    "Unix time of a camera's newest answer.",
    ["camera"],
    registry=REGISTRY,
)
camera_score = Gauge(
    "sightline_camera_score",
    "Newest score of each of a camera's questions, 0 to 1.",
    ["camera", "question"],
    registry=REGISTRY,
)
camera_memory = Gauge(
    "sightline_camera_memory_bytes", "Bytes of KV in a camera's memory.", ["camera"], registry=REGISTRY
)
http_replies = Counter(
    "sightline_http_replies",
    "Replies of the gateway's HTTP, by the first digit of their status.",
    ["status"],
    registry=REGISTRY,
)
http_dropped = Counter(
    "sightline_http_connections_dropped",
    "HTTP connections: refused (too many with a token), evicted (of strangers, for newer ones), cut (took no reply).",
    ["reason"],
    registry=REGISTRY,
)
http_readers = Gauge("sightline_http_readers", "Browsers subscribed to live events.", registry=REGISTRY)
http_events_missed = Counter(
    "sightline_http_events_missed",
    "Live events dropped because a browser did not read them in time.",
    registry=REGISTRY,
)
node_tier_requests = Counter(
    "sightline_node_tier_requests",
    "Calls to a node's tier: ok, refused (too much to do, too large), invalid, late, left (the caller went), failed.",
    ["method", "result"],
    registry=REGISTRY,
)
node_tier_seconds = Histogram(
    "sightline_node_tier_request_seconds",
    "Seconds that a node's tier worked on a call, the time in which its caller read or wrote a stream included.",
    ["method"],
    buckets=(0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 5, 30),
    registry=REGISTRY,
)
node_tier_blocks = Counter(
    "sightline_node_tier_blocks",
    "Blocks that a node's tier was asked for, by what it said: hit, miss, pending (on its way), retry (not now).",
    ["method", "outcome"],
    registry=REGISTRY,
)
node_tier_moved_bytes = Counter(
    "sightline_node_tier_moved_bytes",
    "Bytes of blocks, as they travel, into and out of a node's tier.",
    ["direction"],
    registry=REGISTRY,
)
camera_resources = Gauge(
    "sightline_camera_resources",
    "Camera resources of Kubernetes: accepted, conflict (another manager's), invalid, no_room, waiting (for a pass).",
    ["state"],
    registry=REGISTRY,
)
reconciler_pass_seconds = Histogram(
    "sightline_reconciler_pass_seconds",
    "Seconds of comparing all resources with all cameras: done, unavailable (a side does not answer), failed.",
    ["result"],
    buckets=(0.01, 0.1, 0.5, 1, 5, 15, 60),
    registry=REGISTRY,
)
reconciler_changes = Counter(
    "sightline_reconciler_changes",
    "Cameras that were added, changed or removed for their resources.",
    ["change"],
    registry=REGISTRY,
)
reconciler_status_writes = Counter(
    "sightline_reconciler_status_writes",
    "Statuses of resources: written, conflict (changed meanwhile, read again), gone, failed.",
    ["result"],
    registry=REGISTRY,
)
reconciler_watch_restarts = Counter(
    "sightline_reconciler_watch_restarts",
    "Restarted watches of the resources:  ended (by the server, in time), broken (no connection, or refused), "
    "expired (410 Gone, listed anew), failed.",
    ["reason"],
    registry=REGISTRY,
)
reconciler_age = Gauge(
    "sightline_reconciler_age_seconds",
    "Seconds since the newest list of the resources, and since the newest word of the API server; +Inf before it.",
    ["since"],
    registry=REGISTRY,
)
ProcessCollector(registry=REGISTRY)
