"""``source:`` — how cameras are connected to, and how they are reconnected."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class BackoffConfig(Section):
    """Waiting between two attempts to reach a source: doubled each time up to a bound, spread by jitter."""

    initial_s: float = Field(default=0.5, gt=0, description="Seconds before the first new attempt.")
    max_s: float = Field(default=30.0, gt=0, description="Longest wait in seconds; must not be below initial_s.")
    jitter: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of the wait that is random, 0..1, so that cameras do not return in step.",
    )


class SourceConfig(Section):
    """Timeouts and playback of sources; a camera overrides them under ``source_options``."""

    connect_timeout_s: float = Field(default=5.0, gt=0, description="Seconds an RTSP camera may take to connect.")
    frozen_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds without a packet after which a camera counts as frozen."
    )
    backoff: BackoffConfig = Field(default_factory=BackoffConfig, description="Waiting between attempts to reconnect.")
    loop: bool = Field(default=False, description="Files: start again at the end, with timestamps going on.")
    realtime: bool = Field(
        default=False, description="Files: deliver packets at the pace of their timestamps instead of at once."
    )
    speed: float = Field(
        default=1.0, gt=0, le=1000, description="Files with realtime: playback speed, 1 is the recorded pace."
    )
    decoded_bytes: int = Field(
        default=192 * 2**20,
        ge=2**20,
        description="Bytes of decoded pictures that a camera's decoder may hold: in 8 bit 2.25 a pixel (H.264, HEVC) "
        "for each reference that its stream asks for and two more. A stream that asks for more is not decoded, and the "
        "camera says so. Default 192 MiB: 4K with 8 references; 8K with 4 takes 430 MiB.",
    )
