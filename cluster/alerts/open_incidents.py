"""Table of open incidents and mutes that records every change and event; time is an argument (``OpenIncidents``)."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cluster.alerts.incident import (
    FORGOTTEN,
    AlertEvent,
    Changes,
    ErasureScope,
    EventCause,
    Incident,
    Mute,
    Subject,
    bare,
)
from cluster.config.alerts import EventKind
from cluster.errors import CapacityError, ConfigError, NotReadyError

MOST_MUTES = 10_000
YEAR_S = 365 * 86_400.0


class OpenIncidents:
    """At most one open incident per camera and subject. Changes collect in ``changes`` until :meth:`pop_changes`.

    Args:
        salt: part of every id, so that ids of two sites differ.
        footage_url: address under which snapshots and clips are served; None where none are kept.

    ``memory_shifts``: by camera, from its clock to its memory's, of its newest answer; see :class:`Incident`.
    """

    def __init__(self, salt: str, footage_url: str | None = None) -> None:
        self._salt = salt
        self._footage_url = footage_url
        self.memory_shifts: dict[str, int] = {}
        self._open: dict[Subject, Incident] = {}
        self._mutes: dict[Subject, Mute] = {}
        # As stored, or to be.
        self._tracks: dict[Subject, Mapping[str, object]] = {}
        self._changes = Changes()

    def load(
        self,
        incidents: Iterable[Incident],
        mutes: Iterable[Mute],
        now_s: float,
        tracks: Mapping[Subject, Mapping[str, object]] | None = None,
    ) -> None:
        """Restore stored state: open incidents, mutes and states of detectors. What happened meanwhile, where the state
        could only be read late, counts more: a stored incident ends if its subject has another open one."""
        for incident in incidents:
            if self._open.setdefault((incident.camera, incident.subject), incident) is not incident:
                reason = "another one began while its record could not be read"
                self._add_event(replace(incident, ended_s=now_s, updated_s=now_s, reason=reason), "end", now_s)
        for mute in mutes:
            self._mutes.setdefault((mute.camera, mute.subject), mute)
        self._tracks = {**(tracks or {}), **self._tracks}

    def store_all(self) -> None:
        """Record everything once more, in a store that begins anew."""
        self._changes.incidents.update({each.id: each for each in self._open.values()})
        self._changes.mutes.update(self._mutes)
        self._changes.tracks.update(self._tracks)

    def pop_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    def store_track(self, where: Subject, track: Mapping[str, object] | None) -> None:
        """Record detector state to restore after a restart; None deletes it."""
        self._changes.tracks[where] = track
        if track is None:
            self._tracks.pop(where, None)
        else:
            self._tracks[where] = track

    # -- incidents ------------------------------------------------------------------------------
    def get(self, camera: str, subject: str) -> Incident | None:
        return self._open.get((camera, subject))

    def find(self, incident_id: str) -> Incident | None:
        return next((each for each in self._open.values() if each.id == incident_id), None)

    @property
    def oldest_first(self) -> list[Incident]:
        return sorted(self._open.values(), key=lambda incident: incident.opened_s)

    def open_incident(self, opening: Incident, occasion: str) -> Incident:
        """Open an incident, which gets its id and addresses here, and add its event. ``occasion``: no other incident of
        the subject has it, and this one has no other if it is opened again after a loss of state."""
        name = f"{self._salt}\n{opening.camera}\n{opening.subject}\n{occasion}"
        incident = replace(
            opening,
            id=hashlib.blake2b(name.encode(), digest_size=8).hexdigest(),
            memory_shift=self.memory_shifts.get(opening.camera, 0),
        )
        if self._footage_url is not None:
            address = f"{self._footage_url}/v1/incidents/{incident.id}"
            snapshot, clip = f"{address}/snapshot.jpg", f"{address}/clip.mp4"
            incident = replace(incident, snapshot_url=snapshot, clip_url=clip, clip="waiting")
        return self._add_event(incident, "new", opening.opened_s)

    def extend_incident(self, incident: Incident, now_s: float, *, tell: bool) -> Incident:
        """Update an open incident; ``tell``: with an event."""
        incident = replace(incident, updated_s=now_s)
        if tell:
            return self._add_event(incident, "update", now_s)
        return self._record(incident)

    def revise(self, incident_id: str, change: Callable[[Incident], Incident]) -> Incident | None:
        """Record a changed open incident, without an event. None when it is not open."""
        incident = self.find(incident_id)
        return None if incident is None else self._record(change(incident))

    def end_incident(self, camera: str, subject: str, now_s: float, reason: str) -> None:
        incident = self.get(camera, subject)
        if incident is not None:
            self._add_event(replace(incident, ended_s=now_s, updated_s=now_s, reason=reason), "end", now_s)

    def end_camera_incidents(self, camera: str, now_s: float) -> None:
        """End a camera's question incidents of until ``now_s``, without content: its memory is erased."""
        for incident in self.oldest_first:
            if incident.camera == camera and incident.kind == "question" and incident.opened_s <= now_s:
                over = replace(bare(incident), ended_s=now_s, updated_s=now_s, reason=FORGOTTEN)
                self._add_event(over, "end", now_s)

    def redact(self, scope: ErasureScope) -> None:
        """Remove erased text from open incidents."""
        for incident in self.oldest_first:
            kept = scope.redact_incident(incident)
            if kept is not None and kept != incident:
                self._record(kept)

    def acknowledge(self, incident_id: str, by: str, now_s: float) -> Incident:
        """Acknowledge an incident, with one update event. Raises ``NotReadyError``: none of that id is open."""
        incident = self.find(incident_id)
        if incident is None:
            raise NotReadyError(f"no incident {incident_id!r} is open; `sightline incidents list` shows those that are")
        if incident.acknowledged_s is not None:
            return incident
        seen_to = replace(incident, acknowledged_by=by, acknowledged_s=now_s)
        return self._add_event(seen_to, "update", now_s, "acknowledged")

    # -- mutes ----------------------------------------------------------------------------------
    def mute(self, mute: Mute, now_s: float) -> None:
        """Mute a camera, a subject, or one at the other; replaces an earlier mute of the same. Raises ``ConfigError``:
        ``until_s`` lies in the past; ``CapacityError``: too many mutes."""
        if mute.until_s <= now_s:
            raise ConfigError("a mute must end in the future")
        self._expire(now_s)
        where = (mute.camera, mute.subject)
        if where not in self._mutes and len(self._mutes) >= MOST_MUTES:
            raise CapacityError(f"there are {MOST_MUTES} mutes already; lift one, or mute with * instead of one by one")
        self._mutes[where] = self._changes.mutes[where] = mute

    def shift(self, by_s: float) -> None:
        """The clock was set forward by so much, or back: mutes last as long."""
        if by_s > YEAR_S:
            # It was not set before: stored mutes are of a right clock, and would last for decades.
            return
        moved = {where: replace(mute, until_s=mute.until_s + by_s) for where, mute in self._mutes.items()}
        self._mutes.update(moved)
        self._changes.mutes.update(moved)

    def unmute(self, camera: str, subject: str) -> bool:
        """Remove a mute by its camera and subject; false when there was none."""
        where = (camera, subject)
        if self._mutes.pop(where, None) is None:
            return False
        self._changes.mutes[where] = None
        return True

    def forget_camera(self, camera: str) -> None:
        """Remove the mutes and the clock of a removed camera: a new one of its name is another camera."""
        self.memory_shifts.pop(camera, None)
        for where in [where for where in self._mutes if where[0] == camera]:
            self.unmute(*where)

    def mutes(self, now_s: float) -> list[Mute]:
        """Active mutes, those ending soonest first."""
        self._expire(now_s)
        return sorted(self._mutes.values(), key=lambda mute: mute.until_s)

    def _expire(self, now_s: float) -> None:
        for where in [where for where, mute in self._mutes.items() if mute.until_s <= now_s]:
            del self._mutes[where]
            self._changes.mutes[where] = None

    # -- inside ---------------------------------------------------------------------------------
    def _record(self, incident: Incident) -> Incident:
        where = (incident.camera, incident.subject)
        if incident.open:
            self._open[where] = incident
        elif where in self._open and self._open[where].id == incident.id:
            del self._open[where]
        self._changes.incidents[incident.id] = incident
        return incident

    def _add_event(self, incident: Incident, kind: EventKind, now_s: float, cause: EventCause = "") -> Incident:
        muted = any(mute.covers(incident.camera, incident.subject, now_s) for mute in self._mutes.values())
        # An announced incident is also ended for the sinks, muted or not; one never announced ends silently.
        before_s = incident.told_s
        silent = before_s is None if kind == "end" else muted
        if kind == "update" and before_s is None and not silent:
            kind = "new"
        incident = replace(incident, events=incident.events + 1, muted=muted)
        if not silent:
            first_s = now_s if incident.announced_s is None else incident.announced_s
            incident = replace(incident, announced_s=first_s, told_s=now_s)
        key = f"{incident.id}-{incident.events}"
        self._changes.events[key] = AlertEvent(key, kind, now_s, incident, silent, cause, before_s)
        return self._record(incident)
