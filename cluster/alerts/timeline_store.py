"""Two days of per-minute scores and state changes of each camera, on disk (``TimelineStore``)."""

import asyncio
import contextlib
import logging
import math
import os
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from cluster.alerts.store import is_damage
from cluster.errors import UnavailableError
from cluster.security.private_files import make_private_folder, open_private
from cluster.types import CameraStatus

log = logging.getLogger(__name__)
T = TypeVar("T")

BIN_S = 60
BINS = 60
"""Bins per row, which covers an hour."""
HOUR_S = BIN_S * BINS
KEEP_S = 2 * 86_400.0
FLUSH_S = 60.0
GAPS_S = 600.0
"""Minimum interval, in seconds, between rows of a camera in which only the number of gaps changed."""
DEADLINE_S = 5.0
"""Longest wait for the disk, in seconds."""
MOST_HOURS = MOST_STATES = 200_000
"""Limits of unwritten hours (240 bytes each) and state changes in memory."""
STEPS = 254
"""A score is stored as one byte, ``1 + round(STEPS * score)``; 0: none."""


@dataclass(frozen=True, slots=True)
class ScoreBin:
    """One question's windows that ended within the minute from ``at_s`` (Unix time).

    ``highest``: highest score; ``level``: highest threshold at which an incident would have opened; ``windows``,
    ``positives``: number of windows and of positive ones, at most 255.
    """

    at_s: float
    highest: float
    level: float
    windows: int
    positives: int


@dataclass(frozen=True, slots=True)
class StateChange:
    """State of a camera from ``at_s`` (Unix time): quality ``rung``, and ``gaps``, how often it had lost video."""

    at_s: float
    state: str
    rung: str
    gaps: int


@dataclass(frozen=True, slots=True)
class CameraTimeline:
    """Scores by question and state changes of one camera, oldest first; ``states`` begins with the state at the start.
    ``cooldown_s``: default of questions without their own, set by the service for its clients."""

    scores: dict[str, list[ScoreBin]] = field(default_factory=dict)
    states: list[StateChange] = field(default_factory=list)
    cooldown_s: float = 0.0


Hour = tuple[str, str, int]
"""(camera, question id, hours since the Unix epoch)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS scores (camera TEXT, question TEXT, hour INTEGER, bins BLOB NOT NULL,
    PRIMARY KEY (camera, question, hour)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (camera TEXT, at_s REAL, state TEXT NOT NULL, rung TEXT NOT NULL, gaps INTEGER NOT
NULL, PRIMARY KEY (camera, at_s)) WITHOUT ROWID;
"""


class TimelineStore:
    """Used on one event loop between :meth:`start` and :meth:`stop`; a separate thread owns the file.

    A crash loses up to the last minute. While the disk fails, the last two hours wait in memory. ``keep_s``: age in
    seconds at which rows are deleted.
    """

    def __init__(self, path: Path, *, keep_s: float = KEEP_S) -> None:
        self._path = path
        self._keep_s = keep_s
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        # uint8 [BINS, 4]: highest, level, windows, positives.
        self._hours: dict[Hour, np.ndarray] = {}
        self._states: deque[tuple[str, StateChange]] = deque(maxlen=MOST_STATES)
        self._known: dict[str, StateChange] = {}
        self._removed: set[str] = set()
        self._expired_hour = 0.0
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self.trouble = ""

    def start(self) -> asyncio.Task[None]:
        """Start writing once a minute, on the running loop; the task ends only by failing."""
        self._task = asyncio.create_task(self._run())
        return self._task

    async def stop(self) -> None:
        """Write pending rows and close the file, unless the disk hangs."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(UnavailableError):
            async with _disk_deadline():
                await self.flush()
        if self._db is not None and not self._writing.locked():
            with contextlib.suppress(UnavailableError):
                async with _disk_deadline():
                    await self._on_thread(self._db.close)
        self._thread.shutdown(wait=False)

    # -- inputs ---------------------------------------------------------------------------------
    def add_window(self, camera: str, question: str, at_s: float, score: float, level: float, positive: bool) -> None:
        """Record one answered window that ended at ``at_s``, Unix time; never waits."""
        hour, rest = divmod(at_s, HOUR_S)
        key = (camera, question, int(hour))
        bins = self._hours.get(key)
        if bins is None:
            if len(self._hours) >= MOST_HOURS:
                return
            bins = self._hours[key] = np.zeros((BINS, 4), np.uint8)
        row = bins[int(rest // BIN_S)]
        row[0] = max(int(row[0]), _to_byte(score))
        row[1] = max(int(row[1]), _to_byte(level) if level > 0 else 0)
        row[2] = min(255, int(row[2]) + 1)
        row[3] = min(255, int(row[3]) + positive)

    def add_statuses(self, statuses: Iterable[CameraStatus], now_s: float, removed: Set[str] = frozenset()) -> None:
        """Record changes of state and rung, and every ``GAPS_S`` of the number of gaps. Rows of ``removed`` cameras are
        deleted by the next write, since a new camera of the same name must not inherit them."""
        if removed:
            self._drop_pending(removed, math.inf)
            self._removed.update(removed)
        for status in statuses:
            if (known := self._known.get(status.name)) is not None and known.at_s > now_s:
                # Recorded before the clock was set back: not read until its time comes.
                known = None
            change = StateChange(now_s, status.state, status.rung, status.gaps)
            same = known is not None and (known.state, known.rung) == (status.state, status.rung)
            if known is not None and same and (known.gaps == status.gaps or now_s - known.at_s < GAPS_S):
                continue
            self._known[status.name] = change
            self._states.append((status.name, change))

    # -- reading and erasing --------------------------------------------------------------------
    async def read(self, camera: str, since_s: float, until_s: float) -> CameraTimeline:
        """Timeline of ``since_s <= t < until_s``, Unix time. Raises ``UnavailableError``: the disk."""
        async with _disk_deadline():
            await self.flush()
            return await self._on_disk(lambda db: _read(db, camera, since_s, until_s))

    async def delete(self, camera: str, until_s: float) -> None:
        """Delete a camera's hours that began before ``until_s``, Unix time. Raises ``UnavailableError``: the disk."""
        self._drop_pending({camera}, until_s)
        # Again once a write in progress has ended, which restores its rows if it fails.
        async with _disk_deadline(), self._writing:
            self._drop_pending({camera}, until_s)
            await self._on_disk(lambda db: _delete(db, {camera}, until_s))

    async def flush(self) -> None:
        """Write pending rows, even if the caller is cancelled. Raises ``UnavailableError``: the disk."""
        # Acquired here, not in the task: a caller that times out on a hung disk must not leave a queued write behind.
        await self._writing.acquire()
        writing = asyncio.create_task(self._flush(), name="write timelines")
        writing.add_done_callback(lambda _: self._writing.release())
        await asyncio.shield(writing)

    async def _flush(self) -> None:
        hours, self._hours = self._hours, {}
        states, self._states = self._states, deque(maxlen=MOST_STATES)
        removed, self._removed = self._removed, set()
        if not hours and not states and not removed:
            return
        try:
            if removed:
                await self._on_disk(lambda db: _delete(db, removed, math.inf))
            await self._on_disk(lambda db: _write(db, hours, states))
        except UnavailableError:
            newest = max((key[2] for key in (*hours, *self._hours)), default=0)
            for key, bins in hours.items():
                if key[2] >= newest - 1 and key[0] not in self._removed and len(self._hours) < MOST_HOURS:
                    self._hours[key] = _merged(bins, self._hours.get(key))
            restored = [each for each in states if each[0] not in self._removed]
            self._states = deque([*restored, *self._states], MOST_STATES)
            self._removed |= removed
            raise
        newest_s = max([each.at_s for _, each in states] + [key[2] * HOUR_S for key in hours], default=0.0)
        # Once an hour, since it scans all rows and readers wait for the flush.
        if newest_s and self._expired_hour != (hour := newest_s // HOUR_S):
            await self._on_disk(lambda db: _expire(db, newest_s - self._keep_s))
            self._expired_hour = hour

    def _drop_pending(self, cameras: Set[str], until_s: float) -> None:
        for key in [key for key in self._hours if key[0] in cameras and key[2] * HOUR_S < until_s]:
            del self._hours[key]
        kept = [(name, each) for name, each in self._states if name not in cameras or each.at_s >= until_s]
        self._states = deque(kept, MOST_STATES)
        for camera in cameras:
            # Makes the next status record the current state.
            self._known.pop(camera, None)

    # -- inside ---------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(UnavailableError):
                await self.flush()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _run_on_db(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._db is None:
            self._db = _open(self._path)
        try:
            return work(self._db)
        except BaseException:
            self._db.rollback()
            raise

    def _recreate(self) -> None:
        """Replace a damaged file by an empty one: two days of scores are not worth repairing."""
        log.error("%s is damaged; it is replaced by an empty one", self._path)
        if self._db is not None:
            self._db.close()
        self._db = None
        for side in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + side).unlink(missing_ok=True)

    async def _on_disk(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            try:
                return self._run_on_db(work)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._recreate()
                return self._run_on_db(work)

        try:
            found = await self._on_thread(run)
        except (sqlite3.Error, OSError) as error:
            if str(error) != self.trouble:
                log.error("the cameras' timelines cannot be stored: %s", error)
            self.trouble = str(error)
            raise UnavailableError(f"the cameras' timelines are unavailable: {error}") from None
        self.trouble = ""
        return found


@contextlib.asynccontextmanager
async def _disk_deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except TimeoutError:
        raise UnavailableError("the cameras' timelines are unavailable: the disk does not answer") from None


def _to_byte(score: float) -> int:
    return 1 + round(STEPS * min(1.0, max(0.0, score)))


def read_score(stored: int) -> float:
    """Score of a stored byte; 0.0 for none."""
    return max(0, stored - 1) / STEPS


def _open(path: Path) -> sqlite3.Connection:
    make_private_folder(path.parent)
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    db = sqlite3.connect(path, check_same_thread=False, timeout=2.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA secure_delete = ON")
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _merged(bins: np.ndarray, other: np.ndarray | None) -> np.ndarray:
    """Merge two records of one hour that have no window in common."""
    if other is None:
        return bins
    counts = np.minimum(255, bins[:, 2:].astype(np.uint16) + other[:, 2:]).astype(np.uint8)
    return np.concatenate([np.maximum(bins[:, :2], other[:, :2]), counts], axis=1)


def _write(db: sqlite3.Connection, hours: dict[Hour, np.ndarray], states: Collection[tuple[str, StateChange]]) -> None:
    for key, bins in hours.items():
        held = db.execute("SELECT bins FROM scores WHERE camera = ? AND question = ? AND hour = ?", key).fetchone()
        before = None if held is None else np.frombuffer(held[0], np.uint8).reshape(BINS, 4)
        db.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)", (*key, _merged(bins, before).tobytes()))
    for camera, each in states:
        # Earlier records with later times were made before the clock was set back.
        db.execute("DELETE FROM states WHERE camera = ? AND at_s >= ?", (camera, each.at_s))
        db.execute("INSERT INTO states VALUES (?, ?, ?, ?, ?)", (camera, each.at_s, each.state, each.rung, each.gaps))
    db.commit()


def _expire(db: sqlite3.Connection, before_s: float) -> None:
    db.execute("DELETE FROM scores WHERE (hour + 1) * ? < ?", (HOUR_S, before_s))
    # Keeps each camera's newest expired row: the state at the start of its timeline.
    db.execute(
        "DELETE FROM states WHERE at_s < ?1 AND EXISTS (SELECT 1 FROM states newer WHERE newer.camera = states.camera "
        "AND newer.at_s > states.at_s AND newer.at_s <= ?1)",
        (before_s,),
    )
    db.commit()


def _delete(db: sqlite3.Connection, cameras: Collection[str], until_s: float) -> None:
    db.executemany(
        "DELETE FROM scores WHERE camera = ? AND hour * ? < ?", [(each, HOUR_S, until_s) for each in cameras]
    )
    db.executemany("DELETE FROM states WHERE camera = ? AND at_s < ?", [(each, until_s) for each in cameras])
    db.commit()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _read(db: sqlite3.Connection, camera: str, since_s: float, until_s: float) -> CameraTimeline:
    found = CameraTimeline()
    rows = db.execute(
        "SELECT question, hour, bins FROM scores WHERE camera = ? AND hour >= ? AND hour * ? < ? "
        "ORDER BY question, hour",
        (camera, since_s // HOUR_S, HOUR_S, until_s),
    )
    for question, hour, blob in rows:
        bins = found.scores.setdefault(question, [])
        for number, (highest, level, windows, positives) in enumerate(np.frombuffer(blob, np.uint8).reshape(BINS, 4)):
            at_s = float(hour * HOUR_S + number * BIN_S)
            if windows and since_s - BIN_S < at_s < until_s:
                scores = read_score(int(highest)), read_score(int(level))
                bins.append(ScoreBin(at_s, *scores, int(windows), int(positives)))
    before = db.execute(
        "SELECT at_s, state, rung, gaps FROM states WHERE camera = ? AND at_s < ? ORDER BY at_s DESC LIMIT 1",
        (camera, since_s),
    )
    during = db.execute(
        "SELECT at_s, state, rung, gaps FROM states WHERE camera = ? AND at_s >= ? AND at_s < ? ORDER BY at_s",
        (camera, since_s, until_s),
    )
    found.states.extend(StateChange(*row) for row in (*before, *during))
    return found
