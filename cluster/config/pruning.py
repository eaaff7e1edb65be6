"""``pruning:`` — which patches of a sampled frame the model sees."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cluster.config.base import Section


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
