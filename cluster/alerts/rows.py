"""Incidents and events as the alerts' file holds them: JSON in a column."""

from __future__ import annotations

import json
from typing import cast

from cluster.alerts.incident import (
    AlertEvent,
    EventCause,
    EventKind,
    Incident,
    incident_from_dict,
    incident_to_dict,
)


def incident_text(incident: Incident) -> str:
    """All of it."""
    return json.dumps(incident_to_dict(incident))


def incident_of(text: str) -> Incident:
    """The inverse of :func:`incident_text`."""
    return incident_from_dict(json.loads(text))


def event_text(event: AlertEvent) -> str:
    """All of it, the incident as it was then included."""
    body = {"key": event.key, "kind": event.kind, "at_s": event.at_s, "quiet": event.quiet, "cause": event.cause}
    return json.dumps(body | {"incident": incident_to_dict(event.incident)})


def event_of(text: str) -> AlertEvent:
    """The inverse of :func:`event_text`."""
    body = json.loads(text)
    kind, incident = cast(EventKind, body["kind"]), incident_from_dict(body["incident"])
    # A file that an earlier release wrote names no causes.
    cause = cast(EventCause, body.get("cause", ""))
    return AlertEvent(body["key"], kind, body["at_s"], incident, body["quiet"], cause)
