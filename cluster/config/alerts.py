"""``alerts:`` — when answers and cameras' states become incidents, and where people are told."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.config.problems import Problem
from cluster.config.quantity import Duration, Section, Size
from cluster.registry import sinks

Severity = Literal["info", "warning", "critical"]
EventKind = Literal["new", "update", "end"]


class SinkConfig(Section):
    """One place where people are told."""

    name: str = Field(
        min_length=1, max_length=64, pattern=r"^[\w.-]+$", description="Name of the sink: letters, digits, _ . -"
    )
    kind: str = Field(description="What it is: webhook, mqtt, kafka, alertmanager or log.")
    options: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Parameters of the sink, see docs/alerts.md."
    )
    min_severity: Severity = Field(default="info", description="Incidents below this severity are left out.")
    cameras: list[str] = Field(
        default_factory=list, description="Only incidents of cameras that match one of these, * and ? stand for any."
    )
    events: list[EventKind] = Field(
        default=["new", "update", "end"], min_length=1, description="Which events are sent."
    )

    @model_validator(mode="after")
    def _known(self) -> SinkConfig:
        from cluster.config.problems import ConflictError

        found = self._problems()
        if found:
            raise ConflictError(found)
        return self

    def _problems(self) -> list[Problem]:
        from cluster.config.policies import option_problems, policy_parameters

        if self.kind not in sinks:
            return [Problem(("kind",), sinks.unknown(self.kind))]
        sink = sinks.get(self.kind)
        needed = [name for name, each in inspect.signature(sink).parameters.items() if each.default is each.empty]
        if missing := [name for name in needed if name not in self.options]:
            return [Problem(("options", missing[0]), f"is missing; a {self.kind} sink cannot do without")]
        return option_problems(f"{self.kind} sink", sink, policy_parameters(sink), "options", self.options)


_AFTER = "How long it must last: seconds, or like 2m."
_SEVERITY = "Severity of its incidents."


class ConditionConfig(Section):
    """One state of a camera that is an incident by itself."""

    enabled: bool = Field(default=True, description="Whether it is looked for.")
    after_s: Duration = Field(default=30.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="warning", description=_SEVERITY)


class OfflineConfig(ConditionConfig):
    """No pictures come."""

    severity: Severity = Field(default="critical", description=_SEVERITY)


class FrozenConfig(ConditionConfig):
    """Pictures come, and nothing in them changes."""

    after_s: Duration = Field(default=60.0, gt=0, le=86_400, description=_AFTER)


class CoveredConfig(ConditionConfig):
    """The picture suddenly lost its contrast."""

    after_s: Duration = Field(default=5.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="critical", description=_SEVERITY)


class SceneChangeConfig(ConditionConfig):
    """The camera was turned."""

    after_s: Duration = Field(
        default=30.0,
        gt=0,
        le=240,
        description="How long it must last, at most 240: after 300 s the new scene is the usual one.",
    )


class UnansweredConfig(ConditionConfig):
    """Pictures come, and no window is answered."""

    after_s: Duration = Field(default=120.0, gt=0, le=86_400, description=_AFTER)
    severity: Severity = Field(default="critical", description=_SEVERITY)


class HealthConfig(Section):
    """Incidents of the cameras themselves, told from what decoders and replicas report."""

    offline: OfflineConfig = Field(default_factory=OfflineConfig, description="camera-offline: no pictures come.")
    frozen: FrozenConfig = Field(
        default_factory=FrozenConfig,
        description="frozen-image: pictures come, and nothing in them changes at all, not even by noise; after_s "
        "should be some of the camera's keyframe intervals.",
    )
    covered: CoveredConfig = Field(
        default_factory=CoveredConfig, description="covered-lens: the picture suddenly lost its contrast."
    )
    scene_change: SceneChangeConfig = Field(
        default_factory=SceneChangeConfig,
        description="scene-change: most of the picture shows another scene, the camera was turned.",
    )
    unanswered: UnansweredConfig = Field(
        default_factory=UnansweredConfig,
        description="camera-unanswered: pictures come, and no window is answered, for eight strides at least; a camera "
        "that the quality ladder sheds is none of these.",
    )
    clear_s: Duration = Field(
        default=10.0, ge=0, le=3600, description="How long a state must be over before its incident ends."
    )


class RetryConfig(Section):
    """Patience with a sink that does not take an alert."""

    first_s: Duration = Field(
        default=0.5, gt=0, le=60, description="Seconds before the second attempt; then twice that."
    )
    longest_s: Duration = Field(default=60.0, gt=0, le=3600, description="Longest wait between two attempts.")
    give_up_s: Duration = Field(
        default=86_400.0, gt=0, description="Age of an alert from which a failure makes it a dead letter: like 24h."
    )


class AlertsConfig(Section):
    """When answers become incidents, unless a question says otherwise, and where people are told."""

    enabled: bool = Field(default=True, description="Whether incidents are made at all.")
    folder: str | None = Field(
        default=None,
        description="Folder of the outbox and of the incidents' records; null keeps them until the cluster stops.",
    )
    consecutive: int = Field(
        default=2, ge=1, le=1000, description="Positive windows in a row that open an incident (CodecSight: 2)."
    )
    release: int = Field(default=2, ge=1, le=1000, description="Negative windows in a row that end it.")
    hysteresis: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="An open incident goes on down to the question's threshold less this, or half of it.",
    )
    cooldown_s: Duration = Field(
        default=60.0, ge=0, description="For so long after an incident its question opens none: seconds, or like 5m."
    )
    update_s: Duration = Field(default=60.0, gt=0, description="An open incident is told again as often.")
    stale_s: Duration = Field(
        default=300.0, gt=0, description="An incident ends when its camera has not been answered for so long."
    )
    severity: Severity = Field(default="warning", description="Severity of incidents of questions.")
    health: HealthConfig = Field(default_factory=HealthConfig, description="Incidents of the cameras themselves.")
    sinks: list[SinkConfig] = Field(default_factory=list, description="Where people are told.")
    retry: RetryConfig = Field(default_factory=RetryConfig, description="Patience with sinks.")
    max_events: int = Field(
        default=10_000, ge=100, description="Most alerts kept; beyond it the oldest delivered ones make room."
    )
    max_bytes: Size = Field(
        default=64 * 2**20, ge=2**20, description="Most bytes of their file: a number, or a size like 64MiB."
    )
    retention: Duration = Field(
        default=30 * 86_400.0, ge=60, description="Ended incidents are forgotten after so long: like 30d."
    )

    @field_validator("sinks")
    @classmethod
    def _one_of_each_name(cls, sinks: list[SinkConfig]) -> list[SinkConfig]:
        names = [sink.name for sink in sinks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sinks are called {name!r}; names must be unique")
        return sinks
