"""``asking:`` — free questions about what a camera has seen, and what they may take from the standing ones."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class AskingConfig(Section):
    """Limits of free questions; windows, and with them alerts, come first."""

    share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of a replica's time that free questions may take while windows wait, 0..1; 0 lets them wait "
        "until none does.",
    )
    queue: int = Field(default=16, ge=1, le=4096, description="Most free questions waiting at a replica.")
    timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds after which a free question is given up, waiting included."
    )
    max_new_tokens: int = Field(default=48, ge=1, le=1024, description="Longest answer to a free question, in tokens.")
