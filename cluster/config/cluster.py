"""``cluster:`` — how many processes, how large their queues, how long anything may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.base import Section


class PlacementConfig(Section):
    """Which nodes of a Ray cluster run what: names of Ray resources that nodes offer. Each process takes 1 of its."""

    control: str | None = Field(
        default=None,
        min_length=1,
        description="Resource of nodes for controller, gateway and alerting; null is any.",
    )
    decoder: str | None = Field(default=None, min_length=1, description="Resource of nodes for decoders; null is any.")
    replica: str | None = Field(
        default=None,
        min_length=1,
        description="Resource of nodes for replicas and their tiers, besides GPUs; null is any.",
    )


class ClusterConfig(Section):
    """Processes, queues and deadlines. Every queue is bounded; what does not fit is dropped and counted."""

    ray_address: str | None = Field(
        default=None, description="Address of a running Ray cluster; null starts one on this machine."
    )
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="Which nodes of a Ray cluster run what."
    )
    decoders: int = Field(
        default=2, ge=1, description="Decoder processes; each runs many cameras, one thread per camera."
    )
    replicas: int = Field(default=1, ge=1, description="Model replicas; each loads the model once.")
    max_batch: int = Field(default=8, ge=1, description="Most windows answered in one forward pass of a replica.")
    packet_queue: int = Field(
        default=512, ge=1, description="Packets a decoder holds of one pushing camera before it drops."
    )
    packet_queue_bytes: int = Field(
        default=32 * 2**20,
        ge=2**20,
        description="Bytes a decoder holds of one pushing camera before it drops (default 32 MiB).",
    )
    frame_queue: int = Field(
        default=64,
        ge=1,
        description="Frames of one camera a decoder may have under way to its replica, not yet acknowledged.",
    )
    window_queue: int = Field(
        default=2, ge=1, description="Windows of one camera waiting at a replica; a newer one drops the oldest."
    )
    answer_queue: int = Field(
        default=256, ge=1, description="Answers held for one watching client before it loses the oldest."
    )
    heartbeat_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between two heartbeats of a process.")
    heartbeat_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds without a heartbeat after which a process is restarted; above heartbeat_s.",
    )
    stall_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds a replica may take for one batch of windows before it counts as stuck and is replaced.",
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds a process may take to start, model loading included."
    )
    stop_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds a process may take to stop before it is killed."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="How processes log: text for people, or one JSON object a line with time, level, process, camera "
        "and window.",
    )
    log_dir: str | None = Field(default=None, description="Folder for the processes' logs; null keeps Ray's own place.")
