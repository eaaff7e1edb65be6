"""``Forgetting``: which records of incidents go when a camera forgets, or with age, and what may stay of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.alerts.incident import AlertEvent, Incident

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
