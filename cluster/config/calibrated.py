"""``calibrated:`` — what the engine for load tests stands in for, with ``engine: calibrated``."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class CalibratedConfig(Section):
    """Where the calibrated engine's times and answers come from; the model it stands in for is ``model.name``."""

    costs: str | None = Field(
        default=None,
        description="Cost model that says how long a step takes: one that comes with Sightline, by name, or a file "
        "written by `sightline bench cost`. It must be of model.name.",
    )
    scores: str | None = Field(
        default=None,
        description="JSON of `sightline eval accuracy` whose scores are drawn as answers; null takes recorded ones of "
        "the bundled model.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the answers and of how steps scatter.")
