"""All metrics that Sightline's processes update themselves; values read at scrape time have collectors instead.

Counters and gauges may have a camera label, histograms never: a thousand cameras times a dozen buckets would overload a
Prometheus server. The ``process`` label that the gateway adds distinguishes histograms.
"""

from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# `_created` series double every counter and histogram, and nothing here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
"""Registry behind this process's ``/metrics``."""

counter = partial(Counter, registry=REGISTRY)
gauge = partial(Gauge, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)

windows = counter(
    "sightline_windows",
    "Windows by result; late ones, answered after the next was due, are also done. reason is set when dropped.",
    ["result", "reason"],
)
tokens = counter(
    "sightline_tokens",
    "Tokens of answered windows: full (nothing pruned), kept = reused + refreshed + new, query, encoded by the tower.",
    ["kind"],
)
stage_seconds = histogram(
    "sightline_stage_seconds",
    "Seconds a window spent in each stage; total runs from the arrival of its last frame to its answer.",
    ["stage"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
batch_windows = histogram(
    "sightline_batch_windows",
    "Windows computed together in one step, without gated ones.",
    buckets=(1, 2, 4, 8, 16, 32, 64),
)
queue_depth = gauge("sightline_queue_depth", "Items waiting in a bounded queue.", ["queue"])
ladder_cameras = gauge("sightline_ladder_cameras", "Cameras on each rung of the quality ladder.", ["rung"])
ladder_steps = counter("sightline_ladder_steps", "Steps of cameras on the quality ladder, up or down.", ["direction"])
camera_state = gauge("sightline_camera_state", "1 for the state a camera is in, 0 for the others.", ["camera", "state"])
camera_last_frame_age = gauge(
    "sightline_camera_last_frame_age_seconds",
    "Seconds since a camera's last decoded frame; +Inf before its first.",
    ["camera"],
)
decode_errors = counter("sightline_decode_errors", "Packets the decoder could not use.", ["camera"])
stream_gaps = counter("sightline_stream_gaps", "Gaps in a camera's stream, each up to the next keyframe.", ["camera"])
ingest_packets = counter("sightline_ingest_packets", "Encoded packets received over gRPC.")
ingest_bytes = counter("sightline_ingest_bytes", "Bytes of encoded packets received over gRPC.")
ingest_dropped = counter("sightline_ingest_packets_dropped", "Pushed packets dropped, by reason.", ["reason"])
frames_sent = counter("sightline_frames_sent", "Frames a decoder sent to its replicas.")
frames_dropped = counter(
    "sightline_frames_dropped", "Frames a decoder dropped instead of sending, by reason.", ["reason"]
)
frames_lost = counter(
    "sightline_frames_lost",
    "Sent frames that no replica accepted: it refused them or an earlier one (refused), or the connection ended before "
    "they were acknowledged (unacknowledged).",
    ["reason"],
)
decode_busy = gauge(
    "sightline_decode_busy_ratio",
    "Share of a decoder's decode slots in use between two heartbeats; 1 while it reduces cameras to keyframes.",
)
decode_behind = gauge("sightline_decode_behind_strides", "Decode backlog of a decoder's median camera, in strides.")
decode_keyframes_only = gauge(
    "sightline_decode_keyframes_only_cameras",
    "Cameras that an overloaded decoder has reduced to keyframes; their windows are dropped as decoder_slow.",
)
answers_missed = counter(
    "sightline_answers_missed",
    "Answers lost on the way to watching clients or alerting: read too slowly, or the connection was down too long.",
)
incident_events = counter(
    "sightline_incident_events",
    "Events of incidents: kind is question or health; event is new, update or end.",
    ["kind", "event"],
)
incidents_open = gauge("sightline_incidents_open", "Open incidents by kind.", ["kind"])
alert_deliveries = counter(
    "sightline_alert_deliveries",
    "Delivery attempts of alerts: delivered, failed (retried), dead (given up).",
    ["sink", "result"],
)
alert_delivery_seconds = histogram(
    "sightline_alert_delivery_seconds",
    "Seconds from an incident's event to its delivery, including failed attempts. The answer before it took "
    "sightline_stage_seconds.",
    ["sink"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600),
)
answers_total = counter(
    "sightline_answers",
    "Answers by question and positive (yes, no); questions beyond the first 64 of a process count as 'other'.",
    ["question", "positive"],
)
certificate_expiry = gauge(
    "sightline_certificate_expiry_timestamp_seconds", "Unix time at which a serving certificate expires.", ["file"]
)
# Labelled: without labels every process would export it at 0, and the alert on full disks would fire.
disk_free_bytes = gauge("sightline_disk_free_bytes", "Free bytes on the disk of this process's files.", ["files"])
alerts_waiting = gauge("sightline_alerts_waiting", "Alerts queued for a sink.", ["sink"])
alerts_unwritten = gauge("sightline_alerts_unwritten", "Alerts in memory that could not be written to disk.")
alerts_lost = counter(
    "sightline_alerts_lost",
    "Alerts lost before delivery: memory was full while the disk failed, or they were older than alerts.retention.",
)
tokens_stale = gauge(
    "sightline_tokens_stale", "1 while the token file cannot be read, so that revoked tokens stay valid."
)
audit_lines_lost = counter("sightline_audit_lines_lost", "Lines of the audit log that could not be written.")
alerts_trimmed = counter("sightline_alerts_trimmed", "Delivered alerts deleted early to make room for newer ones.")
clips = counter("sightline_clips", "Clips of incidents by result: whole, part (incomplete), none.", ["result"])
footage_bytes = gauge("sightline_footage_bytes", "Bytes of snapshots and clips on disk.")
ring_bytes = gauge(
    "sightline_ring_bytes",
    "Bytes in a decoder's packet rings, from which clips take the video before their incident.",
)
rings_short = gauge("sightline_rings_short", "Cameras of a decoder whose packet ring is shorter than configured.")
restarts = counter("sightline_process_restarts", "Processes restarted after they died.", ["role"])
lag_strides = histogram(
    "sightline_lag_strides",
    "Seconds from a window's last frame to its answer, over its camera's stride: above 1, the next was already due.",
    buckets=(0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8),
)
build_info = gauge(
    "sightline_build_info",
    "Always 1; labels are version, engine, model and digest of the configuration.",
    ["version", "engine", "model", "config"],
)
attention_kernel = gauge(
    "sightline_attention_kernel", "Always 1; labels are a replica's attention kernels and device.", ["kernel", "device"]
)
log_records = counter("sightline_log_records", "Messages logged, by level.", ["level"])
spans = counter(
    "sightline_spans", "Trace spans: exported, or dropped because the collector was slow or down.", ["result"]
)
replica_busy_seconds = counter(
    "sightline_replica_busy_seconds", "Busy seconds of a replica's engine, windows and questions."
)
replica_backlog_seconds = gauge(
    "sightline_replica_backlog_seconds", "Predicted seconds of windows waiting at a replica."
)
replica_cameras = gauge("sightline_replica_cameras", "Cameras whose windows a replica holds.")
fleet_members = gauge("sightline_fleet_members", "Decoders and replicas with a current heartbeat.", ["role"])
camera_expected = gauge(
    "sightline_camera_expected",
    "1 for every camera of the controller that is not paused, whether or not a decoder runs it.",
    ["camera"],
)
fleet_wanted = gauge("sightline_fleet_wanted", "Decoders and replicas wanted by the configuration.", ["role"])
fleet_utilisation = gauge(
    "sightline_fleet_utilisation", "Predicted work of a replica over its capacity; 0 without a cost model.", ["replica"]
)
fleet_cameras = gauge("sightline_fleet_cameras", "Cameras that the controller placed on a replica.", ["replica"])
fleet_lowered = gauge("sightline_fleet_lowered_cameras", "Cameras of a replica below full quality.", ["replica"])
asks = counter("sightline_asks", "Free questions: answered, refused (queue full), failed.", ["result"])
ask_seconds = histogram(
    "sightline_ask_seconds",
    "Seconds from the start of computing a free question to its first token (first_token) and to its end (total).",
    ["stage"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ask_read_bytes = counter("sightline_ask_read_bytes", "Bytes of memory that free questions read from the tiers.")
decode_cameras = gauge("sightline_decode_cameras", "Cameras by the device that decodes them: cuda or cpu.", ["device"])
video_frames = counter(
    "sightline_video_frames",
    "Video frames that were decoded, or skipped by lazy decoding because nothing happened in them.",
    ["result"],
)
lazy_cameras = gauge(
    "sightline_lazy_cameras", "Cameras that decode lazily, by state: learning, on, suspended.", ["state"]
)
lazy_events = counter(
    "sightline_lazy_events",
    "Lazy decoding of a camera: keyframes awaited, keyframes with change, missed change, overflow of held packets.",
    ["camera", "event"],
)
nvdec_sessions = gauge("sightline_nvdec_sessions", "Sessions of the GPU's video decoder in use.")
camera_quality = gauge(
    "sightline_camera_quality",
    "Value of a camera's answers relative to full quality, by its rung of the ladder; 0 if shed.",
    ["camera"],
)
camera_lag = gauge(
    "sightline_camera_lag_seconds", "Seconds from the last frame of a camera's newest window to its answer.", ["camera"]
)
camera_answered = gauge(
    "sightline_camera_answered_timestamp_seconds", "Unix time of a camera's newest answer.", ["camera"]
)
camera_score = gauge(
    "sightline_camera_score", "Newest score of each of a camera's questions, 0 to 1.", ["camera", "question"]
)
camera_memory = gauge("sightline_camera_memory_bytes", "Bytes of KV in a camera's memory.", ["camera"])
camera_asked = gauge("sightline_camera_asked", "1 while any question of a camera is active (`when`).", ["camera"])
http_replies = counter(
    "sightline_http_replies", "Replies of the gateway's HTTP server, by class of status code.", ["status"]
)
http_dropped = counter(
    "sightline_http_connections_dropped",
    "HTTP connections: refused (too many with a token), evicted (without a token, for newer ones), cut (not reading).",
    ["reason"],
)
http_readers = gauge("sightline_http_readers", "Browsers subscribed to live events.")
http_events_missed = counter(
    "sightline_http_events_missed", "Live events dropped because a browser did not read them in time."
)
node_tier_requests = counter(
    "sightline_node_tier_requests",
    "Calls to a node's tier: ok, refused (overloaded, too large), invalid, late, left (the caller went away), failed.",
    ["method", "result"],
)
node_tier_seconds = histogram(
    "sightline_node_tier_request_seconds",
    "Seconds that a node's tier worked on a call, including the time in which the caller read or wrote a stream.",
    ["method"],
    buckets=(0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 5, 30),
)
node_tier_blocks = counter(
    "sightline_node_tier_blocks",
    "Blocks requested from a node's tier: hit, miss, retry (unavailable now).",
    ["method", "outcome"],
)
node_tier_moved_bytes = counter(
    "sightline_node_tier_moved_bytes", "Bytes of blocks, as transferred, into and out of a node's tier.", ["direction"]
)
camera_resources = gauge(
    "sightline_camera_resources",
    "Kubernetes Camera resources: accepted, conflict (another manager's), invalid, no_room, waiting (for a pass).",
    ["state"],
)
reconciler_pass_seconds = histogram(
    "sightline_reconciler_pass_seconds",
    "Seconds of a pass over all resources and cameras: done, unavailable (one side does not answer), failed.",
    ["result"],
    buckets=(0.01, 0.1, 0.5, 1, 5, 15, 60),
)
reconciler_changes = counter(
    "sightline_reconciler_changes", "Cameras added, changed or removed to match their resources.", ["change"]
)
reconciler_status_writes = counter(
    "sightline_reconciler_status_writes",
    "Writes of resource statuses: written, conflict (changed meanwhile, read again), gone, failed.",
    ["result"],
)
reconciler_watch_restarts = counter(
    "sightline_reconciler_watch_restarts",
    "Restarts of the watch on resources: ended (by the server, on time), broken (no connection, or refused), expired "
    "(410 Gone, listed again), failed.",
    ["reason"],
)
reconciler_age = gauge(
    "sightline_reconciler_age_seconds",
    "Seconds since the last list of the resources, and since the API server was last heard from; +Inf before.",
    ["since"],
)
ProcessCollector(registry=REGISTRY)
