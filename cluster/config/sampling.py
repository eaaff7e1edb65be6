"""``sampling:`` — which frames of a camera are looked at."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class SamplingConfig(Section):
    """Frames sampled from the decoded stream; every packet is decoded all the same."""

    fps: float = Field(default=2.0, gt=0, le=60, description="Frames sampled per second of the camera's clock.")
    anchor_interval_s: float = Field(
        default=8.0,
        gt=0,
        description="Seconds between anchors, the samples that keep every patch; must not exceed window.length_s.",
    )
