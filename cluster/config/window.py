"""``window:``, ``sampling:``, ``pruning:`` — what of a camera the model looks at, and what is computed again."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cluster.config.quantity import Section


class PruningConfig(Section):
    """The pruning policy and its parameters."""

    policy: str = Field(
        default="replenish",
        description="replenish (ours: keeps cells that differ from when they were last encoded), codecsight (as "
        "published) or none.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of the policy by name; its own defaults stand for what is left out.",
    )


class SamplingConfig(Section):
    """Frames sampled from the decoded stream; every packet is decoded all the same."""

    fps: float = Field(default=2.0, gt=0, le=60, description="Frames sampled per second of the camera's clock.")
    anchor_interval_s: float = Field(
        default=8.0,
        gt=0,
        description="Seconds between anchors, the samples that keep every patch; must not exceed window.length_s.",
    )


class WindowConfig(Section):
    """Length, stride and refresh of every camera's window."""

    length_s: float = Field(default=40.0, gt=0, le=3600, description="Seconds of video a question is answered on.")
    stride_s: float = Field(default=8.0, gt=0, description="Seconds between two answers; must not exceed length_s.")
    refresh: str = Field(
        default="anchors",
        description="Which reused tokens are computed again: all, none, anchors, anchors_last (in the order vLLM "
        "forces), first_n, shifted, random, topk_deviation (CacheBlend), first_percent (VLCache), budget (ours) or "
        "budget_last (ours in the order vLLM forces).",
    )
    refresh_budget: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of the reused tokens to compute again, 0..1; null leaves it to the policy.",
    )
    static_gate: bool = Field(
        default=True, description="Let the last answer stand, computing nothing, while nothing moves in the stride."
    )
    max_idle_s: float = Field(
        default=60.0, ge=0, description="Longest time in seconds the static gate may hold an answer."
    )
