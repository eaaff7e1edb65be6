"""``tracing:`` — traces of windows from packet to answer, for a collector that speaks OTLP."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class TracingConfig(Section):
    """OpenTelemetry traces; off without an endpoint."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+(:\d+)?/?$",
        description="OTLP/gRPC collector, like http://collector:4317 (https for TLS); null makes no traces.",
    )
    ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of windows that are traced, chosen by camera and time."
    )
    queue: int = Field(
        default=2048, ge=64, le=1_000_000, description="Most spans of one process that wait for the collector."
    )
    timeout_s: float = Field(default=5.0, gt=0, le=60, description="Seconds that the collector may take for a batch.")
