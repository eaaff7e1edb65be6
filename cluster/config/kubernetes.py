"""``kubernetes:`` — cameras as resources of a Kubernetes cluster."""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import Section


class KubernetesConfig(Section):
    """Which ``Camera`` resources are watched, and how often their status is written (docs/cameras.md)."""

    enabled: bool = Field(default=False, description="Run the cameras that Camera resources describe.")
    namespace: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="Namespace of the resources and of the Secrets they name; null: the one this runs in.",
    )
    kubeconfig: str | None = Field(
        default=None,
        description="File that says where the API server is and who this is; null: as a pod is told, its service "
        "account.",
    )
    context: str | None = Field(default=None, description="Context of the kubeconfig; null: its current one.")
    resync_s: float = Field(
        default=30.0,
        ge=1,
        description="Seconds between two comparisons of all resources with all cameras, besides those after each "
        "change; also how soon a changed Secret is noticed.",
    )
    status_s: float = Field(default=5.0, ge=0.1, description="Least seconds between two writes of one status.")
    status_refresh_s: float = Field(
        default=60.0,
        ge=1,
        description="Least seconds between two writes of a status in which only figures changed: lag, answers.",
    )
    status_per_s: float = Field(
        default=20.0, gt=0, description="Writes of statuses a second, of all cameras together, on average."
    )
    timeout_s: float = Field(default=10.0, gt=0, le=300, description="Seconds one call to the API server may take.")
    idle_s: float = Field(
        default=90.0,
        gt=0,
        description="Seconds without a word on a watch after which it is opened again; the server says something "
        "about once a minute.",
    )
