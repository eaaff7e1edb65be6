"""``cluster:``, ``gateway:``, ``scheduling:``, ``kubernetes:``, ``tracing:`` — processes, ports, queues, deadlines."""

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.problems import OneOf, Section
from cluster.registry import window_orders

METRICS_PORTS = 16
"""Ports for the /metrics of one node's processes."""


class GatewayConfig(Section):
    """Addresses and limits of the gateway."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 opens it to the network."""
    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 takes any free one."""
    http_port: int = Field(default=9464, ge=0, le=65535)
    """HTTP port: console, JSON, OpenAI's protocol, /metrics; 0 takes any free one."""
    max_packet_bytes: int = Field(default=4 * 2**20, ge=1024, le=64 * 2**20)
    """Largest encoded packet taken over gRPC, bytes (default 4 MiB)."""
    max_connections: int = Field(default=1024, ge=1, le=65536)
    """gRPC connections at once, and as many over HTTP with a token; a pushing camera has one of its own. Strangers can
    hold those of gRPC, up to 60 KiB each."""
    credit: int = Field(default=256, ge=1, le=65536)
    """Unacknowledged packets one pushing camera may have in flight."""


class KubernetesConfig(Section):
    """Which ``Camera`` resources are watched, and how often their status is written (docs/cameras.md)."""

    enabled: bool = False
    """Reconcile cameras with Camera resources."""
    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Namespace of the resources and of the Secrets they name; null: that of this pod."""
    kubeconfig: str | None = None
    """File that says where the API server is and who this is; null: as a pod is told, its service account."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    resync_s: float = Field(default=30.0, ge=1)
    """Seconds between two comparisons of all resources with all cameras, besides those after each change; also how soon
    a changed Secret is noticed."""
    status_s: float = Field(default=5.0, ge=0.1)
    """Least seconds between two writes of one status."""
    status_refresh_s: float = Field(default=60.0, ge=1)
    """Least seconds between two writes of a status in which only figures changed: lag, answers."""
    status_per_s: float = Field(default=20.0, gt=0)
    """Writes of statuses a second, of all cameras together, on average."""
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Timeout of one call to the API server, seconds."""
    idle_s: float = Field(default=90.0, gt=0)
    """Seconds without a word on a watch after which it is opened again; the server says something about once a
    minute."""


class SchedulingConfig(Section):
    """Admission and the quality ladder. Both need a cost model of the loaded model: without one every camera is
    accepted and runs at full quality, and late windows are dropped."""

    costs: str | None = None
    """Cost model of a replica: one that comes with Sightline, by name, or a file that `sightline bench cost --out`
    wrote; null takes the one that comes with the model, if there is one."""
    admission: bool = True
    """Refuse cameras whose windows or memories the replicas' memory does not hold, and those that do not fit even with
    all others at their lowest permitted rung; the latter only with costs named here, since those that come with a model
    were measured on another machine."""
    ladder: bool = True
    """Under load, lower cameras on the model's quality ladder, least loss of accuracy first."""
    ladder_file: str | None = None
    """Ladder as `sightline eval ladder` writes it; null takes the model's own, or a guess where it has none."""
    high: float = Field(default=0.97, gt=0, le=1.0)
    """Utilisation of a replica above which quality falls."""
    low: float = Field(default=0.92, gt=0, le=1.0)
    """Utilisation below which quality rises again."""
    order: Annotated[str, OneOf(window_orders)] = "deadline"
    """Order in which windows of one priority reach the engine: deadline (earliest deadline first), or arrival (first
    come, first served)."""
    step_budget_s: float = Field(default=1.0, gt=0)
    """Time limit of a replica's step, seconds, which bounds the wait of a critical camera."""


class TracingConfig(Section):
    """OpenTelemetry traces; off without an endpoint."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+(:\d+)?/?$")
    """OTLP/gRPC collector, like http://collector:4317 (https for TLS); null disables tracing."""
    ratio: float = Field(default=0.01, ge=0, le=1)
    """Share of windows that are traced, chosen by camera and time."""
    queue: int = Field(default=2048, ge=64, le=1_000_000)
    """Queue of spans in one process."""
    timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of exporting one batch, seconds."""


class PlacementConfig(Section):
    """Ray resources that select the nodes of each kind of process. Each process takes 1 of its resource."""

    control: str | None = Field(default=None, min_length=1)
    """Resource of nodes for controller, gateway and alerting; null is any."""
    gateway: str | None = Field(default=None, min_length=1)
    """Resource of nodes for gateways, one to a node where each offers 1; null is that of control."""
    decoder: str | None = Field(default=None, min_length=1)
    """Resource of nodes for decoders; null is any."""
    replica: str | None = Field(default=None, min_length=1)
    """Resource of nodes for replicas and their tiers, besides GPUs; null is any."""

    def of(self, role: Literal["control", "gateway", "decoder", "replica"]) -> str | None:
        if role == "gateway":
            return self.gateway or self.control
        own: str | None = getattr(self, role)
        return own


class ClusterConfig(Section):
    """Processes, queues and deadlines. Every queue is bounded; what does not fit is dropped and counted."""

    ray_address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Nodes of each kind of process in a Ray cluster."""
    gateways: int = Field(default=1, ge=1, le=16)
    """Gateway processes, all on the same ports: several need a node each (placement.gateway), or ports of 0. Limits of
    the gateway section, calls per second and the audit log are each gateway's own."""
    decoders: int = Field(default=2, ge=1)
    """Decoder processes; each runs many cameras, one thread per camera."""
    max_decoders: int | None = Field(default=None, ge=1)
    """Most decoder processes: from decoders up to so many run, as their load needs. null runs decoders."""
    decoders_hold_s: float = Field(default=30.0, gt=0)
    """Seconds of load after which a decoder is added; quiet of four times as long removes one."""
    decode: Literal["auto", "cuda", "cpu"] = "auto"
    """Where decoders decode: cuda is NVDEC, the decoder of NVIDIA's GPUs; auto takes it where there is one; cpu never
    does. A camera that the GPU cannot take is decoded on the CPU, and says why."""
    state_dir: str | None = None
    """Folder of what a restart must find: cameras added at run time, and incidents and clips where alerts.folder is
    null. null keeps it until the cluster stops; `sightline serve` sets one."""
    replicas: int = Field(default=1, ge=1)
    """Model replicas; each loads the model once."""
    max_batch: int = Field(default=8, ge=1)
    """Most windows answered in one forward pass of a replica."""
    packet_queue: int = Field(default=512, ge=1)
    """Packet queue of one pushing camera."""
    packet_queue_bytes: int = Field(default=32 * 2**20, ge=2**20)
    """Size limit of that queue, bytes (default 32 MiB)."""
    frame_queue: int = Field(default=64, ge=1)
    """Unacknowledged frames of one camera in flight to its replica."""
    window_queue: int = Field(default=2, ge=1)
    """Windows of one camera waiting at a replica; a newer one drops the oldest."""
    answer_queue: int = Field(default=256, ge=1)
    """Answer queue of one watching client; beyond it the oldest are dropped."""
    heartbeat_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two heartbeats of a process."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds without a heartbeat after which a process is gone and others take its cameras; above heartbeat_s."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds for one batch of windows, or without an answer, after which a process hangs and is restarted."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of starting a process, model loading included, seconds."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a stopping process is killed."""
    metrics_port: int | None = Field(default=None, ge=1024, le=65000)
    """First port of the processes' own /metrics: each takes the first free one of 16 on its node, for a Prometheus that
    does not ask the gateway alone. null takes any."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text for people, or one JSON object per line with time, level, process, camera and window."""
    log_dir: str | None = None
    """Folder for the processes' logs; null keeps Ray's own place."""

    @property
    def metrics_ports(self) -> range:
        """Ports of which a process takes the first free one for its ``/metrics``."""
        return range(1) if self.metrics_port is None else range(self.metrics_port, self.metrics_port + METRICS_PORTS)
