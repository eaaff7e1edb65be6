"""Between incidents and the wire messages of ``protos/sightline/v1/incidents.proto``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sightline.v1 import incidents_pb2

from cluster.alerts.changes import Delivery, DeliveryState
from cluster.alerts.dispatcher import LaneStatus
from cluster.alerts.incident import AlertEvent, ClipState, EventCause, EventKind, Incident, Kind, Mute, Severity
from cluster.alerts.service import Detail, Outbox

_FIELDS = (
    "id",
    "camera",
    "kind",
    "subject",
    "severity",
    "start",
    "end",
    "score",
    "windows",
    "opened_s",
    "updated_s",
    "ended_s",
    "text",
    "reason",
    "acknowledged_by",
    "acknowledged_s",
    "muted",
    "snapshot_url",
    "clip_url",
    "clip",
    "footage_note",
)


def incident_to_proto(incident: Incident) -> incidents_pb2.Incident:
    """One incident; how many events it has had is not in the message."""
    return incidents_pb2.Incident(**{name: getattr(incident, name) for name in _FIELDS})


def incident_from_proto(message: incidents_pb2.Incident) -> Incident:
    """The inverse of :func:`incident_to_proto`."""
    return Incident(
        id=message.id,
        camera=message.camera,
        kind=cast(Kind, message.kind),
        subject=message.subject,
        severity=cast(Severity, message.severity),
        start=message.start,
        end=message.end,
        score=message.score,
        windows=message.windows,
        opened_s=message.opened_s,
        updated_s=message.updated_s,
        ended_s=message.ended_s if message.HasField("ended_s") else None,
        text=message.text,
        reason=message.reason,
        acknowledged_by=message.acknowledged_by,
        acknowledged_s=message.acknowledged_s if message.HasField("acknowledged_s") else None,
        muted=message.muted,
        snapshot_url=message.snapshot_url,
        clip_url=message.clip_url,
        clip=cast(ClipState, message.clip),
        footage_note=message.footage_note,
    )


def event_to_proto(event: AlertEvent, missed: int = 0) -> incidents_pb2.IncidentEvent:
    """``missed``: events that its reader lost before this one."""
    return incidents_pb2.IncidentEvent(
        key=event.key,
        event=event.kind,
        at_s=event.at_s,
        incident=incident_to_proto(event.incident),
        missed=missed,
        quiet=event.quiet,
        cause=event.cause,
    )


def event_from_proto(message: incidents_pb2.IncidentEvent) -> AlertEvent:
    """The inverse of :func:`event_to_proto`."""
    kind, cause = cast(EventKind, message.event), cast(EventCause, message.cause)
    return AlertEvent(message.key, kind, message.at_s, incident_from_proto(message.incident), message.quiet, cause)


def delivery_to_proto(delivery: Delivery) -> incidents_pb2.Delivery:
    """One event at one sink."""
    return incidents_pb2.Delivery(
        event=event_to_proto(delivery.event),
        sink=delivery.sink,
        state=delivery.state,
        attempts=delivery.attempts,
        error=delivery.error,
    )


def delivery_from_proto(message: incidents_pb2.Delivery) -> Delivery:
    """The inverse of :func:`delivery_to_proto`."""
    state = cast(DeliveryState, message.state)
    return Delivery(event_from_proto(message.event), message.sink, state, message.attempts, message.error)


def detail_to_proto(detail: Detail) -> incidents_pb2.IncidentDetail:
    """An incident with all that is known of it."""
    return incidents_pb2.IncidentDetail(
        incident=incident_to_proto(detail.incident),
        events=[event_to_proto(event) for event in detail.events],
        deliveries=[delivery_to_proto(delivery) for delivery in detail.deliveries],
    )


def detail_from_proto(message: incidents_pb2.IncidentDetail) -> Detail:
    """The inverse of :func:`detail_to_proto`."""
    return Detail(
        incident_from_proto(message.incident),
        [event_from_proto(event) for event in message.events],
        [delivery_from_proto(delivery) for delivery in message.deliveries],
    )


def mutes_to_proto(mutes: Sequence[Mute]) -> incidents_pb2.ListMutesResponse:
    """Mutes that hold."""
    return incidents_pb2.ListMutesResponse(
        mutes=[incidents_pb2.Mute(camera=m.camera, subject=m.subject, until_s=m.until_s, by=m.by) for m in mutes]
    )


def mutes_from_proto(message: incidents_pb2.ListMutesResponse) -> list[Mute]:
    """The inverse of :func:`mutes_to_proto`."""
    return [Mute(mute.camera, mute.subject, mute.until_s, mute.by) for mute in message.mutes]


def outbox_to_proto(outbox: Outbox) -> incidents_pb2.OutboxStatus:
    """How the sinks and the disk are doing."""
    lanes = [
        incidents_pb2.SinkStatus(
            name=name,
            kind=kind,
            waiting=lane.waiting,
            delivered=lane.delivered,
            failures=lane.failures,
            dead=lane.dead,
            trouble=lane.trouble,
            dropped=lane.dropped,
        )
        for name, (kind, lane) in outbox.sinks.items()
    ]
    return incidents_pb2.OutboxStatus(
        sinks=lanes,
        trouble=outbox.trouble,
        unwritten=outbox.unwritten,
        trimmed=outbox.trimmed,
        lost=outbox.lost,
        answers_missed=outbox.answers_missed,
        dead=[delivery_to_proto(letter) for letter in outbox.dead],
    )


def outbox_from_proto(message: incidents_pb2.OutboxStatus) -> Outbox:
    """The inverse of :func:`outbox_to_proto`."""
    lanes = {
        s.name: (s.kind, LaneStatus(s.waiting, s.delivered, s.failures, s.dead, s.trouble, s.dropped))
        for s in message.sinks
    }
    dead = [delivery_from_proto(letter) for letter in message.dead]
    return Outbox(
        lanes, message.trouble, message.unwritten, message.trimmed, message.lost, message.answers_missed, dead
    )
