"""``gateway:`` — the ports the outside talks to."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class GatewayConfig(Section):
    """Addresses and limits of the gateway."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 opens it to the network."
    )
    port: int = Field(default=50051, ge=0, le=65535, description="gRPC port; 0 takes any free one.")
    metrics_port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="HTTP port: console, JSON, OpenAI's protocol, /metrics; 0 takes any free one.",
    )
    max_packet_bytes: int = Field(
        default=4 * 2**20,
        ge=1024,
        le=64 * 2**20,
        description="Largest encoded packet taken over gRPC, bytes (default 4 MiB).",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        le=65536,
        description="gRPC connections at once, and as many over HTTP with a token; a pushing camera has one of its "
        "own. Strangers can hold those of gRPC, up to 60 KiB each.",
    )
    credit: int = Field(
        default=256, ge=1, le=65536, description="Unacknowledged packets one pushing camera may have in flight."
    )
