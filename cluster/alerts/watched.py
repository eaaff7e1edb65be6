"""What alerting is told of the cameras once a second, and the rules that follow from their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.alerts.health import Condition, HealthRules
from cluster.alerts.tracker import Rule
from cluster.config import CameraConfig
from cluster.config.alerts import AlertsConfig, ConditionConfig
from cluster.types import CameraStatus, PictureHealth


@dataclass(frozen=True, slots=True)
class Watched:
    """All cameras as of now. ``settings`` only when they are not those of the ``version`` that was asked with."""

    version: int
    settings: tuple[CameraConfig, ...] | None
    statuses: tuple[CameraStatus, ...]
    pictures: Mapping[str, PictureHealth]


def question_rules(camera: CameraConfig, alerts: AlertsConfig) -> dict[str, Rule]:
    """By question: its own keys, else those of the section."""
    return {
        question.id: Rule(
            threshold=question.threshold,
            consecutive=question.consecutive or alerts.consecutive,
            release=alerts.release,
            hysteresis=alerts.hysteresis,
            cooldown_s=alerts.cooldown_s if question.cooldown_s is None else question.cooldown_s,
            update_s=alerts.update_s,
            severity=question.severity or alerts.severity,
            text=question.text,
        )
        for question in camera.questions
    }


def default_rule(alerts: AlertsConfig) -> Rule:
    """Of a question whose camera is not known yet."""
    return Rule(
        consecutive=alerts.consecutive,
        release=alerts.release,
        hysteresis=alerts.hysteresis,
        cooldown_s=alerts.cooldown_s,
        update_s=alerts.update_s,
        severity=alerts.severity,
    )


def health_rules(alerts: AlertsConfig) -> HealthRules:
    """As the monitor takes them."""

    def condition(given: ConditionConfig) -> Condition:
        return Condition(given.after_s, given.severity, given.enabled)

    health = alerts.health
    return HealthRules(
        offline=condition(health.offline),
        frozen=condition(health.frozen),
        covered=condition(health.covered),
        scene_change=condition(health.scene_change),
        clear_s=health.clear_s,
        update_s=alerts.update_s,
    )
