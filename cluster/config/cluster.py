"""``cluster:``, ``gateway:``, ``scheduling:``, ``kubernetes:``, ``tracing:`` — processes, ports, queues, deadlines."""

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.problems import OneOf, Section
from cluster.registry import window_orders

METRICS_PORTS = 16
"""Size of the port range for the ``/metrics`` of one node's processes."""


class GatewayConfig(Section):
    """Addresses and limits of the gateway."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 opens it to the network."""
    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 takes any free one."""
    http_port: int = Field(default=9464, ge=0, le=65535)
    """HTTP port: console, JSON, OpenAI's protocol, /metrics; 0 takes any free one."""
    max_packet_bytes: int = Field(default=4 * 2**20, ge=1024, le=64 * 2**20)
    """Maximum size of an encoded packet accepted over gRPC, bytes (default 4 MiB)."""
    max_connections: int = Field(default=1024, ge=1, le=65536)
    """Maximum concurrent gRPC connections, and as many authenticated HTTP connections. Each pushing camera uses one.
    Unauthenticated clients can occupy gRPC connections, at up to 60 KiB of memory each."""
    credit: int = Field(default=256, ge=1, le=65536)
    """Maximum unacknowledged packets in flight from one pushing camera."""


class KubernetesConfig(Section):
    """Watching ``Camera`` resources and writing their status (docs/cameras.md)."""

    enabled: bool = False
    """Reconcile cameras with Camera resources."""
    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Namespace of the resources and of the Secrets they reference; null takes the pod's."""
    kubeconfig: str | None = None
    """Kubeconfig file for reaching the API server; null uses the pod's service account."""
    context: str | None = None
    """Context of the kubeconfig; null takes its current one."""
    resync_s: float = Field(default=30.0, ge=1)
    """Seconds between full reconciliations of resources and cameras, besides those after each change; changes of
    Secrets are noticed only then."""
    status_s: float = Field(default=5.0, ge=0.1)
    """Minimum seconds between writes of one status."""
    status_refresh_s: float = Field(default=60.0, ge=1)
    """Minimum seconds between writes of a status in which only figures (lag, answers) changed."""
    status_per_s: float = Field(default=20.0, gt=0)
    """Average rate limit of status writes for all cameras together, per second."""
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Timeout of one call to the API server, seconds."""
    idle_s: float = Field(default=90.0, gt=0)
    """Seconds without an event on a watch after which it is reopened; the server sends a bookmark about once a
    minute."""


class SchedulingConfig(Section):
    """Admission and the quality ladder. Both need a cost model of the loaded model; without one every camera is
    accepted and runs at full quality, and late windows are dropped."""

    costs: str | None = None
    """Cost model of a replica: the name of one shipped with Sightline, or a file written by `sightline bench cost
    --out`; null takes the one shipped with the model, if any."""
    admission: bool = True
    """Refuse cameras whose windows or memories do not fit into the replicas' memory and, if costs is set, those that do
    not fit even with all others at their lowest permitted rung (costs shipped with a model were measured on another
    machine)."""
    ladder: bool = True
    """Under load, step cameras down the model's quality ladder, smallest loss of accuracy first."""
    ladder_file: str | None = None
    """Quality ladder written by `sightline eval ladder`; null takes the model's own, or an unmeasured default."""
    high: float = Field(default=0.97, gt=0, le=1.0)
    """Replica utilisation above which quality is lowered."""
    low: float = Field(default=0.92, gt=0, le=1.0)
    """Replica utilisation below which quality is raised again."""
    order: Annotated[str, OneOf(window_orders)] = "deadline"
    """Order in which windows of one priority class reach the engine: deadline (earliest deadline first) or arrival
    (first come, first served)."""
    step_budget_s: float = Field(default=1.0, gt=0)
    """Maximum predicted time of a replica's step, seconds; bounds how long a critical camera waits."""


class TracingConfig(Section):
    """OpenTelemetry traces; off without an endpoint."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+(:\d+)?/?$")
    """OTLP/gRPC collector, like http://collector:4317 (https for TLS); null disables tracing."""
    ratio: float = Field(default=0.01, ge=0, le=1)
    """Fraction of windows to trace, chosen by camera and time."""
    queue: int = Field(default=2048, ge=64, le=1_000_000)
    """Maximum spans queued for export in one process."""
    timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of exporting one batch, seconds."""


class PlacementConfig(Section):
    """Ray resources that select the nodes for each kind of process. Each process takes 1 of its resource."""

    control: str | None = Field(default=None, min_length=1)
    """Resource of nodes for controller, gateway and alerting; null allows any node."""
    gateway: str | None = Field(default=None, min_length=1)
    """Resource of nodes for gateways, one gateway per node if each offers 1; null takes control."""
    decoder: str | None = Field(default=None, min_length=1)
    """Resource of nodes for decoders; null allows any node."""
    replica: str | None = Field(default=None, min_length=1)
    """Resource of nodes for replicas and their tiers, besides GPUs; null allows any node."""

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
    """Gateway processes, all on the same ports: several need a node each (placement.gateway), or ports set to 0. Limits
    of the gateway section, call rates and the audit log apply per gateway."""
    decoders: int = Field(default=2, ge=1)
    """Decoder processes; each runs many cameras, one thread per camera."""
    max_decoders: int | None = Field(default=None, ge=1)
    """Maximum decoder processes: their number follows load between decoders and this. null keeps it at decoders."""
    decoders_hold_s: float = Field(default=30.0, gt=0)
    """Seconds of high load after which a decoder is added; low load for four times as long removes one."""
    decode: Literal["auto", "cuda", "cpu"] = "auto"
    """Where video is decoded: cuda uses NVDEC, the decoder of NVIDIA GPUs; auto uses it if present; cpu never does. A
    camera that NVDEC cannot decode falls back to the CPU and reports why."""
    state_dir: str | None = None
    """Folder for state that survives restarts: cameras added at run time and, if alerts.folder is null, incidents and
    clips. null discards it when the cluster stops; `sightline serve` sets one."""
    replicas: int = Field(default=1, ge=1)
    """Model replicas; each loads the model once."""
    max_batch: int = Field(default=8, ge=1)
    """Maximum windows answered in one forward pass of a replica."""
    packet_queue: int = Field(default=512, ge=1)
    """Maximum packets queued for one pushing camera."""
    packet_queue_bytes: int = Field(default=32 * 2**20, ge=2**20)
    """Size limit of that queue, bytes (default 32 MiB)."""
    frame_queue: int = Field(default=64, ge=1)
    """Maximum unacknowledged frames of one camera in flight to its replica."""
    window_queue: int = Field(default=2, ge=1)
    """Maximum windows of one camera waiting at a replica; a newer one drops the oldest."""
    answer_queue: int = Field(default=256, ge=1)
    """Maximum answers queued for one watching client; beyond it the oldest are dropped."""
    heartbeat_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between heartbeats of a process."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds without a heartbeat after which a process is dead and its cameras move; must exceed heartbeat_s."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one batch of windows may take, or a process may not respond, before it is restarted as hung."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout for starting a process, model loading included, seconds."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a stopping process is killed."""
    metrics_port: int | None = Field(default=None, ge=1024, le=65000)
    """First port for the processes' own /metrics, for a Prometheus that scrapes them directly: each process takes the
    first free one of 16 on its node. null takes any free port."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text for people, or one JSON object per line with time, level, process, camera and window."""
    log_dir: str | None = None
    """Folder for the processes' logs; null keeps Ray's default."""

    @property
    def metrics_ports(self) -> range:
        """Candidate ports for a process's ``/metrics``; it takes the first free one."""
        return range(1) if self.metrics_port is None else range(self.metrics_port, self.metrics_port + METRICS_PORTS)
