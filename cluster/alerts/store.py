"""SQLite store of incidents, events and deliveries, written before alerts are sent (``AlertStore``)."""

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from cluster.alerts.incident import (
    VERDICTS,
    AlertEvent,
    Changes,
    Delivery,
    Erased,
    ErasureScope,
    Incident,
    IncidentDetail,
    IncidentQuery,
    Mute,
    Subject,
)
from cluster.errors import CapacityError, ConfigError
from cluster.security.private_files import make_private_folder, open_private
from cluster.security.roles import EVERY, in_scope

log = logging.getLogger(__name__)
T = TypeVar("T")

_PENDING = "EXISTS (SELECT 1 FROM deliveries d WHERE d.key = e.key AND d.state = 'pending')"
_DONE = "NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.key = e.key AND d.state != 'delivered')"
DAMAGED = ".damaged-"


def _match(camera: str) -> str:
    """SQL condition on incidents with the camera as ``?1``, so that one camera's are found by index; empty: all."""
    return "camera = ?1" if camera else "?1 = ''"


def erase_damaged(path: Path, before_s: float | None = None) -> int:
    """Delete damaged copies of ``path`` that were moved aside, since they cannot be searched by camera. ``before_s``:
    only those moved aside before this Unix time. Returns how many."""
    count = 0
    for file in path.parent.glob(f"{path.name}{DAMAGED}*"):
        stamp = file.name.rpartition("-")[2]
        if before_s is None or (stamp.isdigit() and int(stamp) < before_s):
            file.unlink(missing_ok=True)
            log.warning("deleted the damaged file %s: it could not be searched for records to erase", file.name)
            count += 1
    return count


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is no database or has damaged pages; other errors raise subclasses."""
    return type(error) is sqlite3.DatabaseError


def text_of(record: Incident | AlertEvent) -> str:
    """Serialise an incident, or an event with the incident's state at that time."""
    return json.dumps(asdict(record))


def incident_of(text: str) -> Incident:
    """Inverse of :func:`text_of`; raises ``TypeError`` if the fields do not match."""
    return Incident(**json.loads(text))


def event_of(text: str) -> AlertEvent:
    """Inverse of :func:`text_of`."""
    body = json.loads(text)
    return AlertEvent(**body | {"incident": Incident(**body["incident"])})


VERSION = 5
PAGE_BYTES = 4096

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tracks (camera TEXT, subject TEXT, body TEXT NOT NULL,
    PRIMARY KEY (camera, subject)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mutes (camera TEXT, subject TEXT, until_s REAL NOT NULL, owner TEXT NOT NULL,
    PRIMARY KEY (camera, subject)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incidents (id TEXT PRIMARY KEY, camera TEXT NOT NULL, subject TEXT NOT NULL,
    is_open INTEGER NOT NULL, opened_s REAL NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS incidents_by_time ON incidents (opened_s);
CREATE INDEX IF NOT EXISTS incidents_of ON incidents (camera, opened_s);
CREATE INDEX IF NOT EXISTS incidents_open ON incidents (is_open) WHERE is_open;
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,
    incident TEXT NOT NULL, kind TEXT NOT NULL, at_s REAL NOT NULL, silent INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_of ON events (incident);
CREATE TABLE IF NOT EXISTS deliveries (key TEXT, sink TEXT, state TEXT NOT NULL, attempts INTEGER NOT NULL,
    error TEXT NOT NULL, PRIMARY KEY (key, sink)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS deliveries_undone ON deliveries (state) WHERE state != 'delivered';
"""


@dataclass(frozen=True, slots=True)
class StoredState:
    """State restored at start. ``pending``: undelivered alerts, oldest first; ``newest_s``: time of the last event."""

    tracks: dict[Subject, dict[str, Any]]
    incidents: list[Incident]
    mutes: list[Mute]
    pending: list[Delivery]
    newest_s: float = 0.0


RESERVE = "alerts.reserve"
RESERVE_BYTES = 2**20
"""Enough for the state of thousands of incidents."""
SPARE = 4
"""Free space, in multiples of the reserve, at which the reserve is allocated again."""


class DiskReserve:
    """Preallocated file that is deleted when the disk is full, to make room for one more essential write."""

    def __init__(self, path: Path, nbytes: int = RESERVE_BYTES) -> None:
        self._path, self._nbytes = path, nbytes
        self._held = path.exists() and path.stat().st_size >= nbytes

    def hold(self) -> None:
        """Allocate the space, unless it is held already or the disk is nearly full."""
        if self._held:
            return
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < SPARE * self._nbytes:
                return
            handle = open_private(self._path, os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(handle, 0, self._nbytes)
                self._held = True
            finally:
                os.close(handle)

    def release(self) -> bool:
        """Free the space; returns whether it was held."""
        held, self._held = self._held, False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        return held


class AlertStore:
    """Not thread-safe: one thread owns it. Every method raises ``sqlite3.Error`` when the disk is full or unavailable;
    opening raises ``ConfigError`` for a file of another schema version, which is left untouched.

    Args:
        path: the file; its folder is created. A damaged file is renamed and replaced by an empty one.
        max_events: limit of stored events; beyond it the oldest delivered ones are deleted, never pending ones.
        max_bytes: size limit of the file, enforced the same way.
    """

    def __init__(self, path: Path, *, max_events: int = 10_000, max_bytes: int = 64 * 2**20) -> None:
        self._path = path
        self._max_events = max_events
        self._max_bytes = max_bytes
        self.trimmed = 0
        self.damaged: Path | None = None
        make_private_folder(path.parent)
        self._reserve = DiskReserve(path.with_name(RESERVE))
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._replace_damaged()
            elif "full" in str(error) and self._reserve.release():
                self._open()
            else:
                raise
        self._reserve.hold()

    def close(self) -> None:
        self._db.close()

    def run_with_recovery(self, work: Callable[[Self], T]) -> T:
        """Run ``work``; if it meets damaged pages, replace the file by an empty one and run it again."""
        try:
            return work(self)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._db.close()
            self._replace_damaged()
            return work(self)

    def _replace_damaged(self) -> None:
        self.damaged = self._path.with_name(f"{self._path.name}{DAMAGED}{int(time.time())}")
        self._path.rename(self.damaged)
        for side in ("-wal", "-shm"):
            self._path.with_name(self._path.name + side).unlink(missing_ok=True)
        log.error("the alert database was damaged; moved to %s", self.damaged)
        self._open()

    def _open(self) -> None:
        # Sets the file mode, which SQLite copies to its -wal and -shm files.
        os.close(open_private(self._path, os.O_RDWR | os.O_CREAT))
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=2.0)
        try:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            # FULL: a committed event survives power loss before it is sent.
            db.execute("PRAGMA synchronous = FULL")
            # Deleted content is zeroed, not only marked free.
            db.execute("PRAGMA secure_delete = ON")
            db.execute(f"PRAGMA max_page_count = {max(64, self._max_bytes // PAGE_BYTES)}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                # Not damage: a file that is moved aside is deleted by the next erasure.
                raise ConfigError(
                    f"{self._path} has schema version {version}, this Sightline knows {VERSION}; run the version that "
                    "wrote it, or move the file elsewhere to begin without its incidents"
                )
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("INSERT OR IGNORE INTO meta VALUES ('salt', ?)", (uuid.uuid4().hex,))
            self.salt = str(db.execute("SELECT value FROM meta WHERE name = 'salt'").fetchone()[0])
        except BaseException:
            db.close()
            raise
        self._db = db

    # -- loading --------------------------------------------------------------------------------
    def load(self) -> StoredState:
        rows = self._db.execute
        undone = rows(
            "SELECT e.body, d.sink, d.attempts, d.error FROM deliveries d JOIN events e ON e.key = d.key "
            "WHERE d.state = 'pending' ORDER BY e.number"
        )
        return StoredState(
            tracks={(camera, subject): json.loads(body) for camera, subject, body in rows("SELECT * FROM tracks")},
            incidents=[incident_of(body) for (body,) in rows("SELECT body FROM incidents WHERE is_open")],
            mutes=[Mute(*row) for row in rows("SELECT camera, subject, until_s, owner FROM mutes")],
            pending=[Delivery(event_of(body), sink, "pending", tries, error) for body, sink, tries, error in undone],
            newest_s=rows("SELECT COALESCE(MAX(at_s), 0.0) FROM events").fetchone()[0],
        )

    # -- writing --------------------------------------------------------------------------------
    def write(self, changes: Changes) -> None:
        """Write all changes in one transaction; if events do not fit, at least the state.

        Raises:
            CapacityError: the file is full of undelivered events.
            sqlite3.Error: the disk is full or fails.
        """
        try:
            self._write_evicting(changes)
        except (CapacityError, sqlite3.OperationalError):
            # Their events are sent from memory, so after a restart these incidents must be known in order to be ended.
            state = replace(changes, events={}, erasures={})
            if not self._try_write(state) and self._reserve.release():
                self._try_write(state)
            raise
        self._reserve.hold()

    def _write_evicting(self, changes: Changes) -> None:
        """Write all changes, evicting delivered events while they do not fit."""
        while True:
            try:
                self._transaction(changes)
                return
            except sqlite3.OperationalError as error:
                if "full" not in str(error) or not self._evict_delivered():
                    raise

    def _try_write(self, changes: Changes) -> bool:
        with contextlib.suppress(sqlite3.Error):
            self._transaction(changes)
            return True
        return False

    def probe(self, now_s: float) -> int:
        """Make a small write that evicts nothing; returns the free bytes of the disk. Raises ``sqlite3.Error``: the
        disk is not writable."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('probed', ?)", (str(now_s),))
        return shutil.disk_usage(self._path.parent).free

    def _transaction(self, changes: Changes) -> None:
        scopes = [ErasureScope(camera, before_s) for camera, before_s in changes.erasures.items()]
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            self._write_state(changes)
            db.executemany(
                "INSERT OR IGNORE INTO events (key, incident, kind, at_s, silent, body) VALUES (?, ?, ?, ?, ?, ?)",
                [(e.key, e.incident.id, e.kind, e.at_s, e.silent, text_of(e)) for e in changes.events.values()],
            )
            db.executemany(
                # SELECT: skips deliveries whose event was evicted in the meantime.
                "INSERT OR REPLACE INTO deliveries SELECT key, ?, ?, ?, ? FROM events WHERE key = ?",
                [(sink, d.state, d.attempts, d.error, key) for (key, sink), d in changes.deliveries.items()],
            )
            erased = [self._erase(each) for each in scopes]
            if scopes:
                self._drop_orphaned_ends()
            trimmed = self._trim() if changes.events else 0
        self.trimmed += trimmed
        if any(erased):
            # Erases the WAL, outside a transaction; ``secure_delete`` has zeroed the pages in the file itself.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for each in scopes:
            erase_damaged(self._path, None if each.camera else each.before_s)

    def _write_state(self, changes: Changes) -> None:
        db, tracks, mutes = self._db, changes.tracks, changes.mutes
        for table, rows in (("tracks", tracks), ("mutes", mutes)):
            db.executemany(f"DELETE FROM {table} WHERE camera = ? AND subject = ?", rows)
        db.executemany(
            "INSERT INTO tracks VALUES (?, ?, ?)",
            [(*where, json.dumps(track)) for where, track in tracks.items() if track is not None],
        )
        db.executemany(
            "INSERT INTO mutes VALUES (?, ?, ?, ?)",
            [(*where, mute.until_s, mute.by) for where, mute in mutes.items() if mute is not None],
        )
        db.executemany(
            "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?)",
            [(i.id, i.camera, i.subject, i.open, i.opened_s, text_of(i)) for i in changes.incidents.values()],
        )

    def _trim(self) -> int:
        """Delete the oldest delivered events beyond the limit; returns how many."""
        excess = self.events_held() - self._max_events
        if excess <= 0:
            return 0
        # Deletes more than needed, so that not every write has to scan.
        trimmed = self._delete_delivered(excess + self._max_events // 20)
        if self.events_held() > self._max_events:
            raise CapacityError(
                f"the outbox holds {self._max_events} undelivered alerts; fix the sink, or raise alerts.max_events"
            )
        return trimmed

    def _evict_delivered(self) -> bool:
        """Delete a tenth of the delivered events; False if there are none."""
        done = self._db.execute(f"SELECT COUNT(*) FROM events e WHERE {_DONE}").fetchone()[0]
        if not done:
            return False
        try:
            with self._db as db:
                db.execute("BEGIN IMMEDIATE")
                trimmed = self._delete_delivered(max(1, int(done) // 10))
        except sqlite3.Error:
            return False
        self.trimmed += trimmed
        return True

    def _delete_delivered(self, most: int) -> int:
        # Updates first: an ended incident is deleted along with its last event, and a storm's updates outnumber those.
        chosen = f"SELECT e.key FROM events e WHERE {_DONE} ORDER BY e.kind != 'update', e.number LIMIT ?"
        keys = self._db.execute(chosen, (most,)).fetchall()
        self._delete_events(keys)
        if keys:
            self._db.execute("DELETE FROM incidents WHERE NOT is_open AND id NOT IN (SELECT incident FROM events)")
        return len(keys)

    def _delete_events(self, keys: list[tuple[str]]) -> None:
        self._db.executemany("DELETE FROM deliveries WHERE key = ?", keys)
        self._db.executemany("DELETE FROM events WHERE key = ?", keys)

    # -- erasing --------------------------------------------------------------------------------
    def preview_erasure(self, scope: ErasureScope) -> Erased:
        """Count the records that writing this scope would erase; zero once written."""
        incidents = sum(kept != incident for incident, kept in self._concerned_incidents(scope))
        return Erased(incidents, sum(kept != event for event, kept in self._concerned_events(scope)))

    def _erase(self, scope: ErasureScope) -> bool:
        """Erase a scope; returns whether there was anything to erase."""
        events = [each for each in self._concerned_events(scope) if each[0] != each[1]]
        incidents = [each for each in self._concerned_incidents(scope) if each[0] != each[1]]
        self._delete_events([(event.key,) for event, kept in events if kept is None])
        self._db.executemany(
            "UPDATE events SET body = ? WHERE key = ?", [(text_of(kept), kept.key) for _, kept in events if kept]
        )
        self._db.executemany("DELETE FROM incidents WHERE id = ?", [(each.id,) for each, kept in incidents if not kept])
        self._db.executemany(
            "UPDATE incidents SET body = ? WHERE id = ?", [(text_of(kept), kept.id) for _, kept in incidents if kept]
        )
        return bool(events or incidents)

    def _drop_orphaned_ends(self) -> None:
        """Delete the remaining end events of erased incidents once no sink has them pending."""
        orphaned = "SELECT incident FROM events EXCEPT SELECT id FROM incidents"
        chosen = f"SELECT e.key FROM events e WHERE e.incident IN ({orphaned}) AND NOT {_PENDING}"
        self._delete_events(self._db.execute(chosen).fetchall())

    def _concerned_incidents(self, scope: ErasureScope) -> Iterator[tuple[Incident, Incident | None]]:
        rows = self._db.execute(
            f"SELECT body FROM incidents WHERE {_match(scope.camera)} AND opened_s < ?2", (scope.camera, scope.before_s)
        )
        for (body,) in rows:
            incident = incident_of(body)
            yield incident, scope.redact_incident(incident)

    def _concerned_events(self, scope: ErasureScope) -> Iterator[tuple[AlertEvent, AlertEvent | None]]:
        # The join skips events of erased incidents: pending ends, already redacted. CROSS makes SQLite start with the
        # incidents instead of scanning all events in order.
        rows = self._db.execute(
            f"SELECT e.body, {_PENDING} FROM incidents i CROSS JOIN events e ON e.incident = i.id "
            f"WHERE {_match(scope.camera)} AND i.opened_s < ?2 ORDER BY e.number",
            (scope.camera, scope.before_s),
        )
        for body, pending in rows:
            event = event_of(body)
            yield event, scope.redact_event(event, pending=bool(pending))

    # -- reading --------------------------------------------------------------------------------
    def incidents(self, query: IncidentQuery = IncidentQuery()) -> list[Incident]:
        verdict = query.verdict if query.verdict in VERDICTS else ""
        rows = self._db.execute(
            f"SELECT camera, body FROM incidents WHERE {_match(query.camera)} AND opened_s BETWEEN ?2 AND ?6 AND ?3 IN "
            "('', subject) AND ?4 IN ('', body->>'verdict') AND ?5 IN ('', body->>'clip') ORDER BY opened_s DESC, id",
            (query.camera, query.since_s, query.subject, verdict, query.clip, query.before[0]),
        )
        # Filters by scope before parsing the JSON.
        candidates = (incident_of(body) for camera, body in rows if in_scope(camera, query.scope))
        return list(islice(filter(query.matches, candidates), query.limit))

    def incident(self, incident_id: str) -> IncidentDetail | None:
        """One incident; None: unknown id."""
        found = self._db.execute("SELECT body FROM incidents WHERE id = ?", (incident_id,)).fetchone()
        if found is None:
            return None
        bodies = self._db.execute("SELECT body FROM events WHERE incident = ? ORDER BY number", (incident_id,))
        events = [event_of(body) for (body,) in bodies]
        return IncidentDetail(incident_of(found[0]), events, list(self._deliveries("e.incident = ?", incident_id)))

    def dead(self, *, sink: str = "", key: str = "", limit: int = 100, scope: Sequence[str] = EVERY) -> list[Delivery]:
        """Dead letters of cameras that match ``scope``, oldest first; an empty sink or key matches all."""
        letters = self._deliveries("d.state = 'dead' AND (?1 = '' OR d.sink = ?1)", sink)
        wanted = (each for each in letters if key in ("", each.event.key))
        return list(islice((each for each in wanted if in_scope(each.event.incident.camera, scope)), limit))

    def events_held(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM events").fetchone()[0])

    def _deliveries(self, condition: str, value: str) -> Iterator[Delivery]:
        rows = self._db.execute(
            "SELECT e.body, d.sink, d.state, d.attempts, d.error FROM deliveries d JOIN events e ON e.key = d.key "
            f"WHERE {condition} ORDER BY e.number, d.sink",
            (value,),
        )
        return (Delivery(event_of(body), *rest) for body, *rest in rows)
