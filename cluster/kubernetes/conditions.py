"""The ``status`` of a ``Camera`` resource: what became of its spec, and how the camera does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.control.cameras.managed import KUBERNETES
from cluster.kubernetes.resource import CameraResource
from cluster.redaction import redact
from cluster.types import CameraStatus

Truth = Literal["True", "False", "Unknown"]

MESSAGE_CHARS = 1024
"""Longest sentence of a condition: it is stored with every status."""

_VOLATILE = frozenset({"lagSeconds", "lastAnswer", "answers", "reason"})
"""What changes with every window; not worth a write of its own at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a spec.

    * ``accepted``: the camera runs with it; else ``reason`` (a word) and ``message`` (a sentence) say why not
    * ``conflict``: who else has the camera, as a sentence; empty without one
    """

    accepted: Truth
    reason: str
    message: str = ""
    conflict: str = ""


ACCEPTED = Outcome("True", "Accepted")


def status_of(
    resource: CameraResource, outcome: Outcome, camera: CameraStatus | None, now: str, before: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole status.

    Args:
        camera: as the cluster sees it; ``None`` where it has none of that name.
        now: RFC 3339, for conditions that changed.
        before: the status there is.
    """
    # What another manager runs under this name is none of this resource's business.
    own = camera if camera is not None and camera.manager == KUBERNETES else None
    running: tuple[Truth, str, str]
    if own is None:
        running = ("False", "NotRunning", "the cluster runs no camera for this resource")
    else:
        running = ("True" if own.state == "running" else "False", own.state.capitalize(), own.reason)
    conflict: tuple[Truth, str, str] = ("True", "ManagedElsewhere", outcome.conflict)
    if not outcome.conflict:
        conflict = ("False", "None", "")
    found = {
        "Accepted": (outcome.accepted, outcome.reason, outcome.message),
        "Running": running,
        "Conflict": conflict,
    }
    known = _by_type(before)
    status: dict[str, Any] = {
        "observedGeneration": resource.generation,
        "conditions": [
            _condition(kind, *value, now=now, generation=resource.generation, before=known.get(kind, {}))
            for kind, value in found.items()
        ],
    }
    if camera is not None:
        status["manager"] = camera.manager
    return status | (_seen(own) if own is not None else {})


def worth_writing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Literal["nothing", "later", "soon"]:
    """``soon``: something changed that people wait for; ``later``: figures that change with every window."""
    if before == after:
        return "nothing"
    return "later" if _steady(before) == _steady(after) else "soon"


def _steady(status: Mapping[str, Any]) -> dict[str, Any]:
    """Without what changes all the time, which in the message of a condition is the seconds until something."""
    kept = {key: value for key, value in status.items() if key not in _VOLATILE}
    kept["conditions"] = {
        kind: (each.get("status"), each.get("reason"), "" if kind == "Running" else each.get("message"))
        for kind, each in _by_type(status).items()
    }
    return kept


def _by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    conditions = status.get("conditions")
    if not isinstance(conditions, list):
        return {}
    return {str(each.get("type")): each for each in conditions if isinstance(each, Mapping)}


def _condition(
    kind: str, status: Truth, reason: str, message: str, *, now: str, generation: int, before: Mapping[str, Any]
) -> dict[str, Any]:
    same = before.get("status") == status and isinstance(before.get("lastTransitionTime"), str)
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": redact(message)[:MESSAGE_CHARS],
        "lastTransitionTime": before["lastTransitionTime"] if same else now,
        "observedGeneration": generation,
    }


def _seen(camera: CameraStatus) -> dict[str, Any]:
    lag_s = camera.latency_s or camera.expected_lag_s
    answers = [
        {"question": each.question, "score": round(each.score, 2), "positive": each.positive}
        for each in camera.last_answers
    ]
    told = " · ".join(
        f"{each['question']} {each['score']:.2f} {'yes' if each['positive'] else 'no'}" for each in answers
    )
    texts = {
        "state": camera.state,
        "reason": redact(camera.reason)[:MESSAGE_CHARS],
        "source": redact(camera.source),
        "decoder": camera.decoder,
        "replica": camera.replica,
        "rung": camera.rung,
        "rungReason": camera.rung_reason,
        "lastAnswer": told,
    }
    figures: dict[str, Any] = {"lagSeconds": round(lag_s, 2)} if lag_s else {}
    return {key: value for key, value in texts.items() if value} | figures | ({"answers": answers} if answers else {})
