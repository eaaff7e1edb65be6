"""Erasing in the alerts' file: what a :class:`Forgetting` names, so that no byte of it stays in the file."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cluster.alerts.forgetting import Erased, Forgetting
from cluster.alerts.incident import AlertEvent, Incident
from cluster.alerts.rows import event_of, event_text, incident_of, incident_text

log = logging.getLogger(__name__)

_OWED = "EXISTS (SELECT 1 FROM deliveries d WHERE d.key = e.key AND d.state = 'pending')"
DAMAGED = ".damaged-"


class Eraser:
    """Works on an open file of :class:`~cluster.alerts.store.AlertStore`, in whose thread it is called."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def find(self, forgetting: Forgetting) -> Erased:
        """What :meth:`erase` would erase; nothing after it did."""
        incidents = sum(kept != incident for incident, kept in self._incidents(forgetting))
        return Erased(incidents, sum(kept != event for event, kept in self._events(forgetting)))

    def erase(self, forgetting: Forgetting) -> Erased:
        """Within the caller's transaction; :meth:`leave_no_trace` after it."""
        db = self._db
        incidents = alerts = 0
        for event, kept in list(self._events(forgetting)):
            if kept is None:
                db.execute("DELETE FROM deliveries WHERE key = ?", (event.key,))
                db.execute("DELETE FROM events WHERE key = ?", (event.key,))
            elif kept != event:
                db.execute("UPDATE events SET body = ? WHERE key = ?", (event_text(kept), event.key))
            alerts += kept != event
        for incident, left in list(self._incidents(forgetting)):
            if left is None:
                db.execute("DELETE FROM incidents WHERE id = ?", (incident.id,))
            elif left != incident:
                db.execute("UPDATE incidents SET body = ? WHERE id = ?", (incident_text(left), incident.id))
            incidents += left != incident
        return Erased(incidents, alerts)

    def drop_told(self) -> None:
        """Ends that were still to be told of incidents that are erased, once every sink has taken or refused them."""
        chosen = f"SELECT e.key FROM events e WHERE e.incident NOT IN (SELECT id FROM incidents) AND NOT {_OWED}"
        keys = self._db.execute(chosen).fetchall()
        self._db.executemany("DELETE FROM deliveries WHERE key = ?", keys)
        self._db.executemany("DELETE FROM events WHERE key = ?", keys)

    def leave_no_trace(self) -> None:
        """Outside a transaction: what was deleted is zeros in the file already (``secure_delete``); it also leaves the
        log of writes."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- inside ---------------------------------------------------------------------------------
    def _incidents(self, forgetting: Forgetting) -> Iterator[tuple[Incident, Incident | None]]:
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE (?1 = '' OR camera = ?1) AND opened_s < ?2",
            (forgetting.camera, forgetting.before_s),
        )
        for (body,) in rows:
            incident = incident_of(body)
            yield incident, forgetting.incident(incident)

    def _events(self, forgetting: Forgetting) -> Iterator[tuple[AlertEvent, AlertEvent | None]]:
        # Events of incidents that are erased already are ends that are still owed: they are as they should be.
        rows = self._db.execute(
            f"SELECT e.body, {_OWED} FROM incidents i JOIN events e ON e.incident = i.id "
            "WHERE (?1 = '' OR i.camera = ?1) AND i.opened_s < ?2 ORDER BY e.number",
            (forgetting.camera, forgetting.before_s),
        )
        for body, owed in rows:
            event = event_of(body)
            yield event, forgetting.event(event, owed=bool(owed))


def erase_damaged(path: Path, before_s: float | None = None) -> int:
    """Delete damaged files that were put aside beside ``path``: nobody can look through them for one camera. With
    ``before_s`` only those put aside before; how many."""
    gone = 0
    for file in path.parent.glob(f"{path.name}{DAMAGED}*"):
        stamp = file.name.rpartition("-")[2]
        if before_s is None or (stamp.isdigit() and int(stamp) < before_s):
            file.unlink(missing_ok=True)
            log.warning("deleted %s: it could not be looked through for what was to be forgotten", file.name)
            gone += 1
    return gone
