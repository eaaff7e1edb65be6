"""Incident and event types, and the JSON form that every sink sends."""

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
"""Cause of an update: acknowledgement, clip finished or failed, verdict. Empty: opened, ongoing or ended."""

Verdict = Literal["", "confirmed", "rejected"]
VERDICTS: tuple[Verdict, ...] = ("", "confirmed", "rejected")
"""A reviewer's verdict on an incident; empty: none (yet)."""

UNREVIEWED = "unreviewed"
"""Filter value that matches incidents without a verdict; an empty filter matches all."""

ClipState = Literal["", "waiting", "whole", "part", "none"]
"""State of an incident's clip: clips disabled, in progress, complete, partial, missing."""

FORMAT = 1
"""Version of the JSON form; keys are only ever added."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One ongoing or ended incident at a camera; overlapping windows belong to one incident.

    * ``subject``: the question's id, or a health condition (docs/alerts.md)
    * ``start``, ``end``: period on the camera's own clock, microseconds
    * ``score``: highest so far, 0..1; ``windows``: number of positive windows (0 for health incidents)
    * ``level``: highest threshold at which it would have opened: the lowest score of its best ``consecutive`` windows
    * ``opened_s``, ``updated_s``, ``ended_s``: Unix time; ``ended_s`` is None while the incident is open
    * ``text``: of the newest positive window, or what is wrong with the camera; ``reason``: why the incident ended
    * ``events``: number of events; ``announced_s``, ``told_s``: Unix time of the first and newest one sent to sinks
    * ``snapshot_url``, ``clip_url``: where they are served; empty when clips are disabled
    * ``clip``: state of the clip; ``footage_note``: what is missing and why
    * ``question``: text of the question, empty for health incidents
    * ``verdict``: given by ``reviewed_by`` at ``reviewed_s``, both of which stay set when the verdict is withdrawn
    * ``memory_shift``: offset from the camera's clock to its memory's when the incident opened, microseconds
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
    """Sort key; incidents opened at the same time are ordered by id."""
    return -incident.opened_s, incident.id


@dataclass(frozen=True, slots=True)
class IncidentQuery:
    """Filter of incidents, listed newest first; empty strings match all. ``scope``: camera name patterns.

    ``verdict``: a :data:`Verdict` or :data:`UNREVIEWED`; ``since_s``: earliest opening, Unix time; ``clip``: a
    :data:`ClipState`; ``before``: page cursor, ``opened_s`` and id of the last incident already listed.
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
        """Whether the incident passes the filter; ``limit`` is ignored."""
        named = self.camera in ("", incident.camera) and self.subject in ("", incident.subject)
        in_state = self.verdict in ("", incident.verdict or UNREVIEWED) and self.clip in ("", incident.clip)
        recent = incident.opened_s >= self.since_s and (incident.open or not self.only_open)
        after_cursor = newest_first(incident) > (-self.before[0], self.before[1])
        return named and in_state and recent and after_cursor and in_scope(incident.camera, self.scope)


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """One event of an incident, with the incident's state at that time.

    ``key`` is the idempotency key: receivers drop events they have seen. ``silent``: recorded, but not sent to sinks.
    ``before_s``: Unix time of the incident's previous event addressed to sinks, None for the first. Events caused by
    ``clip`` and ``review`` go to followers only.
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
    """Suppresses alerts of ``camera`` and ``subject`` (``*``: all) until ``until_s``, Unix time."""

    camera: str
    subject: str
    until_s: float
    by: str = ""


def clip_settled(incident: Incident, now_s: float) -> AlertEvent:
    """Event for followers when the clip of ``incident`` is complete or known to be missing.

    It is neither stored nor sent to sinks, since the incident carries the state. It occurs once, so its key needs no
    sequence number.
    """
    return AlertEvent(f"{incident.id}-clip", "update", now_s, incident, incident.muted, "clip")


def reviewed(incident: Incident, now_s: float) -> AlertEvent:
    """Event for followers when ``incident`` was confirmed or rejected, or its verdict withdrawn; not stored either."""
    key = f"{incident.id}-review-{round(1000 * (incident.reviewed_s or now_s))}"
    return AlertEvent(key, "update", now_s, incident, incident.muted, "review")


def unknown_incident(incident: str) -> NotFoundError:
    """Error for an incident that is missing or out of the caller's scope: the same for both, to leak no ids."""
    return NotFoundError(f"there is no incident {incident!r}, or it was deleted")


def utc(seconds: float) -> str:
    """Format Unix time as ISO 8601 in UTC: ``2030-01-31T12:00:00.250Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


FORGOTTEN = "the camera's memory was deleted"
"""``reason`` of incidents ended by erasure."""


class Erased(NamedTuple):
    """Number of incidents and alerts that were erased or redacted."""

    incidents: int = 0
    alerts: int = 0


@dataclass(frozen=True, slots=True)
class ErasureScope:
    """Everything before ``before_s`` (Unix time) of one camera, or of all cameras if ``camera`` is empty.

    Erasing is idempotent. An incident that was open at ``before_s`` is kept without its text. Open health incidents are
    kept unchanged: they describe the device, not what it saw.
    """

    camera: str
    before_s: float

    def changes(self) -> Changes:
        return Changes(erasures={self.camera: self.before_s})

    def redact_incident(self, incident: Incident) -> Incident | None:
        """Return the incident as it may be kept; None: erase it."""
        if not self._concerns(incident):
            return incident
        if incident.ended_s is not None and incident.ended_s < self.before_s:
            return None
        return _without_text(incident)

    def redact_event(self, event: AlertEvent, *, pending: bool) -> AlertEvent | None:
        """Return the event as it may be kept; None: erase it. A ``pending`` end or health event stays, bare."""
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
    """Remove the text, which may stem from an erased window; the next positive window sets it again."""
    return incident if incident.kind == "health" else replace(incident, text="")


def bare(incident: Incident) -> Incident:
    """Strip an incident to the fact that it existed and ended, which receivers must still get."""
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
    """Delivery of one event to one sink. ``attempts``: made so far; ``error``: of the last attempt."""

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
"""Limit of deliveries in memory whose event is on disk or was dropped, in multiples of the event limit."""


class Dropped(NamedTuple):
    """Number of changes dropped from memory before they were written: ``delivered`` and ``undelivered`` events,
    ``incidents``, and states of other events' ``deliveries``, which a restarted process repeats."""

    delivered: int = 0
    undelivered: int = 0
    incidents: int = 0
    deliveries: int = 0


@dataclass(slots=True)
class Changes:
    """Pending writes by key; None deletes. ``deliveries``: by (event key, sink). ``erasures``: camera (empty: all) ->
    Unix time before which its records are erased."""

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
        oldest ended ones without pending events; and ``OTHER_DELIVERIES`` times as many deliveries of other events.
        Everything else is bounded by the number of cameras and questions, and never dropped."""
        ended = 0
        if len(self.incidents) > most:
            with_events = {event.incident.id for event in self.events.values()}
            excess_ids = [each.id for each in self.incidents.values() if not each.open and each.id not in with_events]
            excess_ids = excess_ids[: len(self.incidents) - most]
            ended = len(excess_ids)
            for name in excess_ids:
                del self.incidents[name]
        delivered: list[str] = []
        undelivered: list[str] = []
        if (excess := len(self.events) - most) > 0:
            waiting = {key for (key, _), delivery in self.deliveries.items() if delivery.state != "delivered"}
            delivered = [key for key in self.events if key not in waiting][:excess]
            undelivered = [key for key in self.events if key in waiting][: excess - len(delivered)]
            dropped = {*delivered, *undelivered}
            self.events = {key: event for key, event in self.events.items() if key not in dropped}
            self.deliveries = {pair: each for pair, each in self.deliveries.items() if pair[0] not in dropped}
        others = [pair for pair in self.deliveries if pair[0] not in self.events]
        others = others[: max(0, len(others) - OTHER_DELIVERIES * most)]
        for pair in others:
            del self.deliveries[pair]
        return Dropped(len(delivered), len(undelivered), ended, len(others))
