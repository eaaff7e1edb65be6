"""What an incident is, what is told of it, and the JSON form that every sink sends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from cluster.errors import UnknownIncidentError

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")

Kind = Literal["question", "health"]
"""What an incident rests on: the answers to a standing question, or the state of the camera itself."""

EventKind = Literal["new", "update", "end"]
EventCause = Literal["", "acknowledged", "clip"]
"""Why it is told: somebody has seen to it; its clip is there, or cannot be had; empty: it began, goes on or is over."""

ClipState = Literal["", "waiting", "whole", "part", "none"]
"""Of an incident's clip: none is kept, being made, there, there but not whole, not there."""

EVENT_KINDS: tuple[EventKind, ...] = ("new", "update", "end")

FORMAT = 1
"""Version of the JSON form; a key is only ever added to it."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that goes on, or went on, at one camera; overlapping windows are one incident.

    * ``subject``: the question's id, or one of :data:`HEALTH_SUBJECTS`
    * ``start``, ``end``: the stretch of the camera's own clock it covers so far, microseconds
    * ``score``: highest so far, 0..1; ``windows``: windows that said so (0 for a camera's state)
    * ``opened_s``, ``updated_s``, ``ended_s``: seconds since 1970; ``ended_s`` is None while it goes on
    * ``text``: what the newest positive window said, or what is wrong with the camera; ``reason``: why it ended
    * ``events``: how many were made of it; ``announced``: at least one of them was for the sinks
    * ``snapshot_url``, ``clip_url``: where they are served once they are there, empty where none are kept
    * ``clip``: how far it is, ``footage_note``: what is missing and why
    """

    id: str
    camera: str
    kind: Kind
    subject: str
    severity: Severity
    start: int
    end: int
    score: float
    windows: int
    opened_s: float
    updated_s: float
    ended_s: float | None = None
    text: str = ""
    reason: str = ""
    acknowledged_by: str = ""
    acknowledged_s: float | None = None
    muted: bool = False
    events: int = 0
    announced: bool = False
    snapshot_url: str = ""
    clip_url: str = ""
    clip: ClipState = ""
    footage_note: str = ""

    @property
    def open(self) -> bool:
        return self.ended_s is None


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """One thing to tell of an incident, which is as it was then.

    ``key`` is the same however often it is sent and whoever sends it: receivers drop what they have seen. ``quiet``:
    muted, for the records only. Of the causes, ``clip`` is for followers only: see :func:`clip_settled`.
    """

    key: str
    kind: EventKind
    at_s: float
    incident: Incident
    quiet: bool = False
    cause: EventCause = ""

    def body(self) -> dict[str, Any]:
        """The JSON form: what every sink sends, ``docs/alerts.md`` describes it."""
        incident = self.incident
        return {
            "format": FORMAT,
            "key": self.key,
            "event": self.kind,
            "at": utc(self.at_s),
            "incident": {
                "id": incident.id,
                "camera": incident.camera,
                "kind": incident.kind,
                "subject": incident.subject,
                "severity": incident.severity,
                "state": "open" if incident.open else "ended",
                "start_us": incident.start,
                "end_us": incident.end,
                "score": round(incident.score, 4),
                "windows": incident.windows,
                "opened_at": utc(incident.opened_s),
                "updated_at": utc(incident.updated_s),
                "ended_at": None if incident.ended_s is None else utc(incident.ended_s),
                "text": incident.text,
                "reason": incident.reason,
                "acknowledged_by": incident.acknowledged_by,
                "snapshot_url": incident.snapshot_url,
                "clip_url": incident.clip_url,
                "clip": incident.clip,
                "footage_note": incident.footage_note,
            },
        }


@dataclass(frozen=True, slots=True)
class Mute:
    """Nothing is told of ``camera`` and ``subject`` (``*`` stands for all) until ``until_s``, seconds since 1970."""

    camera: str
    subject: str
    until_s: float
    by: str = ""

    def covers(self, camera: str, subject: str, now_s: float) -> bool:
        """Whether it silences an incident now."""
        return now_s < self.until_s and self.camera in ("*", camera) and self.subject in ("*", subject)


def incident_id(salt: str, camera: str, subject: str, serial: int) -> str:
    """Name of a camera's ``serial``-th incident of one subject: made again from the same state, it is the same."""
    return hashlib.blake2b(f"{salt}\n{camera}\n{subject}\n{serial}".encode(), digest_size=8).hexdigest()


def event_key(incident: str, number: int) -> str:
    """Idempotency key of an incident's ``number``-th event, counted from 1."""
    return f"{incident}-{number}"


def clip_settled(incident: Incident, now_s: float) -> AlertEvent:
    """What followers are told when the clip of ``incident`` is there, or is known never to be.

    Neither recorded nor sent to a sink: the incident has it, for whoever was not there to be told. It happens once to
    an incident, so that its key needs no number.
    """
    return AlertEvent(f"{incident.id}-clip", "update", now_s, incident, incident.muted, "clip")


def unknown_incident(incident: str) -> UnknownIncidentError:
    """The same for one that is not there and for one that the caller may not see: ids are nobody's business either."""
    return UnknownIncidentError(f"there is no incident {incident!r}, or it is forgotten already")


def incident_to_dict(incident: Incident) -> dict[str, Any]:
    """All fields, for the store."""
    return asdict(incident)


def incident_from_dict(body: Mapping[str, Any]) -> Incident:
    """The inverse of :func:`incident_to_dict`; raises ``TypeError`` for another set of fields."""
    return Incident(**body)


def utc(seconds: float) -> str:
    """``2030-01-31T12:00:00.250Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
