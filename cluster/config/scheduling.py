"""``scheduling:`` — which camera runs when, where and at what quality."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class SchedulingConfig(Section):
    """Admission and the quality ladder. Both need to know what a window costs: without a cost model of the model that
    is loaded, every camera is taken and runs at full quality, and what is too late is dropped."""

    costs: str | None = Field(
        default=None,
        description="Cost model of a replica: one that comes with Sightline, by name, or a file that "
        "`sightline bench cost --out` wrote; null takes the one that comes with the model, if there is one.",
    )
    admission: bool = Field(
        default=True,
        description="Refuse cameras that do not fit even when every other one is as low on the ladder as it may be; "
        "only with costs named here, since those that come with a model were measured on another machine.",
    )
    ladder: bool = Field(
        default=True,
        description="Under load, walk cameras down the model's quality ladder, those first whose answers lose least.",
    )
    ladder_file: str | None = Field(
        default=None,
        description="Ladder as `sightline eval ladder` writes it; null takes the model's own, or a guess "
        "where it has none.",
    )
    high: float = Field(default=0.97, gt=0, le=1.0, description="Utilisation of a replica above which quality falls.")
    low: float = Field(default=0.92, gt=0, le=1.0, description="Utilisation below which quality rises again.")
    step_budget_s: float = Field(
        default=1.0,
        gt=0,
        description="Longest step of a replica, seconds: what a critical camera waits for at most before its turn.",
    )
