"""Open incidents and mutes, with a record of every change and event; time is an argument (``OpenIncidents``)."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product

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
from cluster.errors import CapacityError, NotReadyError

MOST_MUTES = 10_000
YEAR_S = 365 * 86_400.0


class OpenIncidents:
    """At most one open incident per camera and subject. Changes accumulate until :meth:`pop_changes`.

    Args:
        salt: part of every id, so that ids of two sites differ.
        footage_url: base URL of snapshots and clips; None: clips are disabled.

    ``memory_shifts``: ``Answer.memory_shift`` of each camera's newest answer.
    """

    def __init__(self, salt: str, footage_url: str | None = None) -> None:
        self._salt = salt
        self._footage_url = footage_url
        self.memory_shifts: dict[str, int] = {}
        self._open: dict[Subject, Incident] = {}
        self._mutes: dict[Subject, Mute] = {}
        # Detector states, as stored or about to be.
        self._tracks: dict[Subject, Mapping[str, object]] = {}
        self._changes = Changes()

    def load(
        self,
        incidents: Iterable[Incident],
        mutes: Iterable[Mute],
        now_s: float,
        tracks: Mapping[Subject, Mapping[str, object]] | None = None,
    ) -> None:
        """Restore open incidents, mutes and detector states. Newer state wins if the store could only be read late: a
        stored incident ends if its subject has another open one."""
        for incident in incidents:
            if self._open.setdefault((incident.camera, incident.subject), incident) is not incident:
                reason = "another incident opened while its record could not be read"
                self._add_event(replace(incident, ended_s=now_s, updated_s=now_s, reason=reason), "end", now_s)
        for mute in mutes:
            self._mutes.setdefault((mute.camera, mute.subject), mute)
        self._tracks = {**(tracks or {}), **self._tracks}

    def store_all(self) -> None:
        """Record the whole state again, for a store that was recreated."""
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
        """Open an incident and add its event; its id and URLs are assigned here. ``occasion``: unique among the
        subject's incidents, and the same if this one is opened again after a loss of state, so that the id is too."""
        name = f"{self._salt}\n{opening.camera}\n{opening.subject}\n{occasion}"
        incident = replace(
            opening,
            id=hashlib.blake2b(name.encode(), digest_size=8).hexdigest(),
            memory_shift=self.memory_shifts.get(opening.camera, 0),
        )
        if self._footage_url is not None:
            base = f"{self._footage_url}/v1/incidents/{incident.id}"
            snapshot, clip = f"{base}/snapshot.jpg", f"{base}/clip.mp4"
            incident = replace(incident, snapshot_url=snapshot, clip_url=clip, clip="waiting")
        return self._add_event(incident, "new", opening.opened_s)

    def extend_incident(self, incident: Incident, now_s: float, *, tell: bool) -> Incident:
        """Update an open incident; ``tell``: also add an update event."""
        incident = replace(incident, updated_s=now_s)
        if tell:
            return self._add_event(incident, "update", now_s)
        return self._record(incident)

    def revise(self, incident_id: str, change: Callable[[Incident], Incident]) -> Incident | None:
        """Change an open incident without an event; None: it is not open."""
        incident = self.find(incident_id)
        return None if incident is None else self._record(change(incident))

    def end_incident(self, camera: str, subject: str, now_s: float, reason: str) -> None:
        incident = self.get(camera, subject)
        if incident is not None:
            # The clock may have been set back since.
            ended_s = max(now_s, incident.opened_s)
            self._add_event(replace(incident, ended_s=ended_s, updated_s=now_s, reason=reason), "end", now_s)

    def end_camera_incidents(self, camera: str, now_s: float) -> None:
        """End a camera's question incidents opened by ``now_s``, stripped of content: its memory is erased."""
        for incident in self.oldest_first:
            if incident.camera == camera and incident.kind == "question" and incident.opened_s <= now_s:
                ended = replace(bare(incident), ended_s=now_s, updated_s=now_s, reason=FORGOTTEN)
                self._add_event(ended, "end", now_s)

    def redact(self, scope: ErasureScope) -> None:
        """Remove erased text from open incidents."""
        for incident in self.oldest_first:
            kept = scope.redact_incident(incident)
            if kept is not None and kept != incident:
                self._record(kept)

    def acknowledge(self, incident_id: str, by: str, now_s: float) -> Incident:
        """Acknowledge an incident, with one update event; idempotent. Raises ``NotReadyError``: it is not open."""
        incident = self.find(incident_id)
        if incident is None:
            raise NotReadyError(f"no incident {incident_id!r} is open; `sightline incidents list` shows those that are")
        if incident.acknowledged_s is not None:
            return incident
        acknowledged = replace(incident, acknowledged_by=by, acknowledged_s=now_s)
        return self._add_event(acknowledged, "update", now_s, "acknowledged")

    # -- mutes ----------------------------------------------------------------------------------
    def mute(self, mute: Mute, now_s: float) -> None:
        """Add a mute, replacing an earlier one of the same camera and subject. Raises ``CapacityError``: too many."""
        self._expire(now_s)
        where = (mute.camera, mute.subject)
        if where not in self._mutes and len(self._mutes) >= MOST_MUTES:
            raise CapacityError(f"there are {MOST_MUTES} mutes already; lift one, or mute with * instead of one by one")
        self._mutes[where] = self._changes.mutes[where] = mute

    def shift(self, by_s: float) -> None:
        """Compensate a clock step of ``by_s``, so that mutes keep their duration."""
        if by_s > YEAR_S:
            # The clock was unset until now: stored mutes have correct times, and would last for decades if shifted.
            return
        moved = {where: replace(mute, until_s=mute.until_s + by_s) for where, mute in self._mutes.items()}
        self._mutes.update(moved)
        self._changes.mutes.update(moved)

    def unmute(self, camera: str, subject: str) -> bool:
        """Remove a mute; False if there was none."""
        where = (camera, subject)
        if self._mutes.pop(where, None) is None:
            return False
        self._changes.mutes[where] = None
        return True

    def forget_camera(self, camera: str) -> None:
        """Drop the mutes and memory shift of a removed camera; a new camera of the same name starts clean."""
        self.memory_shifts.pop(camera, None)
        for where in [where for where in self._mutes if where[0] == camera]:
            self.unmute(*where)

    def mutes(self, now_s: float) -> list[Mute]:
        """Active mutes, soonest to end first."""
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
        # By key: a line under maintenance may be muted camera by camera, and its alerts come together.
        scopes = product((incident.camera, "*"), (incident.subject, "*"))
        muted = any(mute.until_s > now_s for mute in map(self._mutes.get, scopes) if mute is not None)
        # Sinks that saw an incident also get its end, even if muted; one they never saw ends silently.
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
