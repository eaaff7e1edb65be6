"""``Changes``: what must be written since the last write; ``Forgetting``: which records go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster.alerts.incident import AlertEvent, Incident, Mute

FORGOTTEN = "the camera was made to forget what it saw"
"""Why incidents end then."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What went, or lost its text: incidents, and the alerts made of them."""

    incidents: int = 0
    alerts: int = 0

    def __bool__(self) -> bool:
        return bool(self.incidents or self.alerts)


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Everything of before ``before_s``, seconds since 1970, of one camera, or with an empty ``camera`` of all of them.

    Done twice, the second one finds nothing. What went on at that moment stays without its text. A camera's health
    stays as it is while it is not over: it tells of the device as it is now, and not of what it saw.
    """

    camera: str
    before_s: float

    def incident(self, incident: Incident) -> Incident | None:
        """What may be kept of it; None: nothing."""
        if not self._concerns(incident):
            return incident
        if incident.ended_s is not None and incident.ended_s < self.before_s:
            return None
        return _silent(incident)

    def event(self, event: AlertEvent, *, owed: bool) -> AlertEvent | None:
        """The same of an event. ``owed``: a sink has yet to take it; that an incident is over is told all the same, and
        what is wrong with a camera, without anything of what was seen."""
        if not self._concerns(event.incident):
            return event
        if event.at_s >= self.before_s:
            return replace(event, incident=_silent(event.incident))
        if owed and (event.kind == "end" or event.incident.kind == "health"):
            return replace(event, incident=bare(event.incident))
        return None

    def _concerns(self, incident: Incident) -> bool:
        return self.camera in ("", incident.camera) and incident.opened_s < self.before_s


def _silent(incident: Incident) -> Incident:
    """Which of its windows wrote the text nobody knows; the next one that says something writes it anew."""
    return incident if incident.kind == "health" else replace(incident, text="")


def bare(incident: Incident) -> Incident:
    """That it was, and is over: what its receivers must still hear, and nothing of what was seen."""
    return replace(
        incident,
        text=incident.text if incident.kind == "health" else "",
        score=0.0,
        windows=0,
        acknowledged_by="",
        acknowledged_s=None,
        snapshot_url="",
        clip_url="",
        clip="",
        footage_note="",
    )


Subject = tuple[str, str]
"""(camera, question id or health subject)."""

DeliveryState = Literal["pending", "delivered", "dead"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one sink. ``attempts`` made so far; ``error``: why the last one failed."""

    event: AlertEvent
    sink: str
    state: DeliveryState = "pending"
    attempts: int = 0
    error: str = ""


@dataclass(slots=True)
class Changes:
    """New values by what they belong to; None removes. ``deliveries`` by (event key, sink). ``forgetting``: by camera
    (empty: all of them) the time before which nothing is kept, of what is written before or with it."""

    tracks: dict[Subject, Mapping[str, Any] | None] = field(default_factory=dict)
    serials: dict[Subject, int] = field(default_factory=dict)
    incidents: dict[str, Incident] = field(default_factory=dict)
    mutes: dict[Subject, Mute | None] = field(default_factory=dict)
    events: dict[str, AlertEvent] = field(default_factory=dict)
    deliveries: dict[tuple[str, str], Delivery] = field(default_factory=dict)
    forgetting: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(
            (self.tracks, self.serials, self.incidents, self.mutes, self.events, self.deliveries, self.forgetting)
        )

    def add(self, newer: Changes) -> None:
        """Lay ``newer`` over this."""
        self.tracks.update(newer.tracks)
        self.serials.update(newer.serials)
        self.incidents.update(newer.incidents)
        self.mutes.update(newer.mutes)
        self.events.update(newer.events)
        self.deliveries.update(newer.deliveries)
        for camera, before_s in newer.forgetting.items():
            self.forgetting[camera] = max(before_s, self.forgetting.get(camera, 0.0))

    def shed(self, most: int) -> tuple[int, int]:
        """Keep at most ``most`` events: the oldest delivered ones go first, then the oldest. How many of each went."""
        excess = len(self.events) - most
        if excess <= 0:
            return 0, 0
        waiting = {key for (key, _), delivery in self.deliveries.items() if delivery.state != "delivered"}
        done = [key for key in self.events if key not in waiting][:excess]
        for key in done:
            self._drop(key)
        undone = list(self.events)[: excess - len(done)]
        for key in undone:
            self._drop(key)
        return len(done), len(undone)

    def _drop(self, key: str) -> None:
        del self.events[key]
        self.deliveries = {where: delivery for where, delivery in self.deliveries.items() if where[0] != key}
