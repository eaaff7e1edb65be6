"""Types of incidents and their events, and the JSON form that every sink sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from cluster.config.alerts import EventKind, Severity
from cluster.errors import NotFoundError
from cluster.security.roles import EVERY, in_scope

Kind = Literal["question", "health"]
"""Source of an incident: answers to a standing question, or the state of the camera itself."""

EventCause = Literal["", "acknowledged", "clip", "review"]
"""Cause of an update: acknowledged; clip finished or failed; confirmed or rejected; empty: opened, ongoing or ended."""

Verdict = Literal["", "confirmed", "rejected"]
VERDICTS: tuple[Verdict, ...] = ("", "confirmed", "rejected")
"""What a person says of an incident; empty: nothing (yet)."""

UNREVIEWED = "unreviewed"
"""In a filter: incidents without a verdict; an empty filter matches all."""

ClipState = Literal["", "waiting", "whole", "part", "none"]
"""State of an incident's clip: none kept, in progress, complete, partial, missing."""

FORMAT = 1
"""Version of the JSON form; keys are only ever added."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One ongoing or ended incident at a camera; overlapping windows belong to one incident.

    * ``subject``: the question's id, or one of :data:`HEALTH_SUBJECTS`
    * ``start``, ``end``: period on the camera's own clock, microseconds
    * ``score``: highest so far, 0..1; ``windows``: positive windows (0 for a camera's state)
    * ``level``: highest threshold at which it would have opened, that is, the lowest score of a run that opens one
    * ``opened_s``, ``updated_s``, ``ended_s``: seconds since 1970; ``ended_s`` is None while it is open
    * ``text``: of the newest positive window, or what is wrong with the camera; ``reason``: why it ended
    * ``events``: number of its events; ``announced_s``, ``told_s``: when the first and the newest of them that were for
      the sinks happened, None before
    * ``snapshot_url``, ``clip_url``: where they are served, empty where none are kept
    * ``clip``: its state; ``footage_note``: what is missing and why
    * ``question``: its text, empty for a camera's state
    * ``verdict``: of the person ``reviewed_by``, at ``reviewed_s``; also set where it was taken back
    * ``memory_shift``: microseconds from the camera's clock to its memory's, when it opened
    """

    id: str
    camera: str
    kind: Kind
    subject: str
    severity: Severity
    start: int = 0
    end: int = 0
    score: float = 0.0
    windows: int = 0
    opened_s: float = 0.0
    updated_s: float = 0.0
    ended_s: float | None = None
    text: str = ""
    reason: str = ""
    acknowledged_by: str = ""
    acknowledged_s: float | None = None
    muted: bool = False
    events: int = 0
    announced_s: float | None = None
    told_s: float | None = None
    snapshot_url: str = ""
    clip_url: str = ""
    clip: ClipState = ""
    footage_note: str = ""
    question: str = ""
    verdict: Verdict = ""
    reviewed_by: str = ""
    reviewed_s: float | None = None
    level: float = 0.0
    memory_shift: int = 0

    @property
    def open(self) -> bool:
        return self.ended_s is None


def newest_first(incident: Incident) -> tuple[float, str]:
    """Key to sort by; incidents of one moment are in the order of their ids."""
    return -incident.opened_s, incident.id


@dataclass(frozen=True, slots=True)
class IncidentQuery:
    """Which incidents are listed, newest first: of cameras that match ``scope``; empty strings match all.

    ``verdict``: a :data:`Verdict` or :data:`UNREVIEWED`; ``since_s``: Unix time of the first; ``clip``: its state;
    ``before``: time of opening and id of one, after which those of the next page come.
    """

    camera: str = ""
    subject: str = ""
    only_open: bool = False
    since_s: float = 0.0
    before: tuple[float, str] = (math.inf, "")
    verdict: str = ""
    limit: int = 100
    scope: Sequence[str] = EVERY
    clip: str = ""

    def matches(self, incident: Incident) -> bool:
        """Whether it is one of them, were there no limit."""
        named = self.camera in ("", incident.camera) and self.subject in ("", incident.subject)
        said = self.verdict in ("", incident.verdict or UNREVIEWED) and self.clip in ("", incident.clip)
        recent = incident.opened_s >= self.since_s and (incident.open or not self.only_open)
        due = newest_first(incident) > (-self.before[0], self.before[1])
        return named and said and recent and due and in_scope(incident.camera, self.scope)


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """One event of an incident, with the incident's state at that time.

    ``key`` is the idempotency key: receivers drop events they have seen. ``silent``: recorded, and sent to no sink.
    ``before_s``: when the incident's event before it that was for the sinks happened, None for the first. Events with
    causes ``clip`` and ``review`` go to followers only, see :func:`clip_settled`.
    """

    key: str
    kind: EventKind = field(metadata={"wire": "event"})
    at_s: float
    incident: Incident
    silent: bool = False
    cause: EventCause = ""
    before_s: float | None = None

    def body(self) -> dict[str, Any]:
        """JSON form sent by every sink; described in ``docs/alerts.md``."""
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
                "question": incident.question,
            },
        }


@dataclass(frozen=True, slots=True)
class Mute:
    """Suppresses alerts of ``camera`` and ``subject`` (``*``: all) until ``until_s``, seconds since 1970."""

    camera: str
    subject: str
    until_s: float
    by: str = ""

    def covers(self, camera: str, subject: str, now_s: float) -> bool:
        return now_s < self.until_s and self.camera in ("*", camera) and self.subject in ("*", subject)


def clip_settled(incident: Incident, now_s: float) -> AlertEvent:
    """Event for followers when the clip of ``incident`` is complete or known to be missing.

    It is neither stored nor sent to sinks, since the incident has the state. It happens once, and needs no number.
    """
    return AlertEvent(f"{incident.id}-clip", "update", now_s, incident, incident.muted, "clip")


def reviewed(incident: Incident, now_s: float) -> AlertEvent:
    """Event for followers when a person has confirmed or rejected ``incident``, or taken that back; as above."""
    key = f"{incident.id}-review-{round(1000 * (incident.reviewed_s or now_s))}"
    return AlertEvent(key, "update", now_s, incident, incident.muted, "review")


def unknown_incident(incident: str) -> NotFoundError:
    """The same error for a missing incident and one the caller may not see, so that ids leak nothing."""
    return NotFoundError(f"there is no incident {incident!r}, or it was deleted")


def utc(seconds: float) -> str:
    """ISO 8601 time in UTC: ``2030-01-31T12:00:00.250Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


FORGOTTEN = "the camera's memory was deleted"
"""Reason of incidents that end by erasure."""


class Erased(NamedTuple):
    """Number of incidents and alerts that were erased or redacted."""

    incidents: int = 0
    alerts: int = 0


@dataclass(frozen=True, slots=True)
class ErasureScope:
    """Everything before ``before_s`` (seconds since 1970) of one camera, or of all with an empty ``camera``.

    Erasing is idempotent. An incident that was open at ``before_s`` stays without its text. Open health incidents stay
    unchanged: they describe the device, not what it saw.
    """

    camera: str
    before_s: float

    def changes(self) -> Changes:
        return Changes(erasures={self.camera: self.before_s})

    def redact_incident(self, incident: Incident) -> Incident | None:
        """The incident as it may be kept; None: erase it."""
        if not self._concerns(incident):
            return incident
        if incident.ended_s is not None and incident.ended_s < self.before_s:
            return None
        return _without_text(incident)

    def redact_event(self, event: AlertEvent, *, pending: bool) -> AlertEvent | None:
        """The event as it may be kept. ``pending``: to be delivered; ends and health events stay, without content."""
        if not self._concerns(event.incident):
            return event
        if event.at_s >= self.before_s:
            return replace(event, incident=_without_text(event.incident))
        if pending and (event.kind == "end" or event.incident.kind == "health"):
            return replace(event, incident=bare(event.incident))
        return None

    def _concerns(self, incident: Incident) -> bool:
        return self.camera in ("", incident.camera) and incident.opened_s < self.before_s


def _without_text(incident: Incident) -> Incident:
    """Remove the text, whose window is unknown; the next positive window sets it again."""
    return incident if incident.kind == "health" else replace(incident, text="")


def bare(incident: Incident) -> Incident:
    """Reduce to the fact that the incident existed and ended, which its receivers must still get."""
    return replace(
        incident,
        text=incident.text if incident.kind == "health" else "",
        score=0.0,
        level=0.0,
        windows=0,
        acknowledged_by="",
        acknowledged_s=None,
        snapshot_url="",
        clip_url="",
        clip="",
        footage_note="",
        verdict="",
        reviewed_by="",
        reviewed_s=None,
    )


Subject = tuple[str, str]
"""(camera, question id or health subject)."""

DeliveryState = Literal["pending", "delivered", "dead"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one sink. ``attempts`` made so far; ``error``: of the last one."""

    event: AlertEvent
    sink: str
    state: DeliveryState = "pending"
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class IncidentDetail:
    """One incident with its events and deliveries, oldest first."""

    incident: Incident
    events: list[AlertEvent]
    deliveries: list[Delivery]


OTHER_DELIVERIES = 10
"""Most deliveries in memory whose event is on disk or was dropped, in multiples of the most events."""


class Dropped(NamedTuple):
    """How many changes were dropped from memory before they were written: events that were ``delivered`` or not,
    ``incidents``, and states of ``deliveries`` of other events, which a restarted process makes again."""

    delivered: int = 0
    undelivered: int = 0
    incidents: int = 0
    deliveries: int = 0


@dataclass(slots=True)
class Changes:
    """Pending writes by key; None deletes. ``deliveries`` by (event key, sink). ``erasures``: camera (empty: all) ->
    time before which nothing is kept."""

    tracks: dict[Subject, Mapping[str, Any] | None] = field(default_factory=dict)
    incidents: dict[str, Incident] = field(default_factory=dict)
    mutes: dict[Subject, Mute | None] = field(default_factory=dict)
    events: dict[str, AlertEvent] = field(default_factory=dict)
    deliveries: dict[tuple[str, str], Delivery] = field(default_factory=dict)
    erasures: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def merge(self, newer: Changes) -> None:
        for name in ("tracks", "incidents", "mutes", "events", "deliveries"):
            getattr(self, name).update(getattr(newer, name))
        for camera, before_s in newer.erasures.items():
            self.erasures[camera] = max(before_s, self.erasures.get(camera, 0.0))

    def drop_oldest(self, most: int) -> Dropped:
        """Keep at most ``most`` events, dropping the oldest delivered ones first; about as many incidents, dropping the
        oldest ended ones of which no event is left; and ``OTHER_DELIVERIES`` times as many deliveries of other events.
        The rest is never dropped: it has one entry for a camera, or for one of its questions."""
        ended = 0
        if len(self.incidents) > most:
            told = {event.incident.id for event in self.events.values()}
            over = [each.id for each in self.incidents.values() if not each.open and each.id not in told]
            over = over[: len(self.incidents) - most]
            ended = len(over)
            for name in over:
                del self.incidents[name]
        done: list[str] = []
        undone: list[str] = []
        if (excess := len(self.events) - most) > 0:
            waiting = {key for (key, _), delivery in self.deliveries.items() if delivery.state != "delivered"}
            done = [key for key in self.events if key not in waiting][:excess]
            undone = [key for key in self.events if key in waiting][: excess - len(done)]
            gone = {*done, *undone}
            self.events = {key: event for key, event in self.events.items() if key not in gone}
            self.deliveries = {where: each for where, each in self.deliveries.items() if where[0] not in gone}
        others = [where for where in self.deliveries if where[0] not in self.events]
        others = others[: max(0, len(others) - OTHER_DELIVERIES * most)]
        for where in others:
            del self.deliveries[where]
        return Dropped(len(done), len(undone), ended, len(others))
