"""Writes changes to the store on a separate thread, and buffers them in memory while the disk fails (``Journal``)."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import TypeVar

from cluster.alerts.incident import Changes, Dropped, ErasureScope, Incident, IncidentDetail, IncidentQuery
from cluster.alerts.store import AlertStore, StoredState
from cluster.errors import CapacityError, UnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")

_DROPPED = "dropped before reaching the disk: %d delivered and %d undelivered alerts, %d incidents, %d delivery states"


class Journal:
    """Single writer of the store; all methods but :meth:`start` are called on the event loop.

    ``trouble`` says in one sentence what prevents writing (a full or hung disk, an outbox full of undelivered events);
    ``free_bytes``: free disk space at the last probe. Unwritten changes wait in memory, bounded by ``memory_events``
    (:meth:`Changes.drop_oldest`), and every later write retries them. ``lost`` counts events dropped from memory before
    they were written or delivered; all drops are logged.

    Args:
        open_store: opens the store; retried later when it fails.
        deadline_s: longest wait of :meth:`write` and :meth:`read` for the disk.
        on_late: receives the state of a store that could only be opened after :meth:`start`.
        on_recreated: called after a damaged file was replaced: current state must be written to the new one.
    """

    def __init__(
        self,
        open_store: Callable[[], AlertStore],
        *,
        deadline_s: float = 2.0,
        memory_events: int = 1000,
        on_late: Callable[[StoredState], None] = lambda _: None,
        on_recreated: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_store = open_store
        self._deadline_s = deadline_s
        self._memory_events = memory_events
        self._on_late, self._on_recreated = on_late, on_recreated
        self._damaged: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="alert-store")
        self._store: AlertStore | None = None
        self._waiting, self._batch = Changes(), Changes()
        self._writing: asyncio.Future[None] | None = None
        self._late: StoredState | None = None
        self.trouble = ""
        self.lost = self.free_bytes = 0
        # Drops of the current outage; delivered events dropped in all outages.
        self._dropped = Dropped()
        self._dropped_delivered = 0

    async def start(self) -> StoredState | None:
        """Open and load the store; None: alerting runs from memory. Raises ``ConfigError``: another schema version."""
        try:
            return await self._on_thread(self._open)
        except (sqlite3.Error, OSError) as error:
            self._trouble(f"the alert database cannot be opened: {error}")
            return None

    @property
    def salt(self) -> str | None:
        return self._store.salt if self._store is not None else None

    @property
    def pending_events(self) -> int:
        """Events that are only in memory."""
        return len(self._waiting.events) + len(self._batch.events)

    @property
    def trimmed(self) -> int:
        """Number of delivered events evicted to make room."""
        return self._dropped_delivered + (self._store.trimmed if self._store is not None else 0)

    async def write(self, changes: Changes) -> bool:
        """Write changes. True once they are on disk; False if they still wait in memory at the deadline."""
        self._waiting.merge(changes)
        if self.trouble:
            self._drop_oldest()
        deadline = time.monotonic() + self._deadline_s
        while self._waiting or self._writing is not None:
            if self._writing is None:
                self._batch, self._waiting = self._waiting, Changes()
                self._writing = self._begin(self._batch)
            elif self.trouble:
                # A hung disk: an earlier caller has already waited for it.
                return False
            await asyncio.wait({self._writing}, timeout=max(0.0, deadline - time.monotonic()))
            if self._writing is not None and time.monotonic() >= deadline:
                self._trouble(f"the disk has not answered for {self._deadline_s:g} s")
            if self.trouble:
                return False
        return True

    async def probe(self) -> None:
        """Write even if nothing is pending, to notice a failing disk before an alert needs it."""
        if not self._waiting and self._writing is None:
            self._writing = self._begin(None)
        await self.write(Changes())

    def unwritten(self, incident_id: str) -> Incident | None:
        """The unwritten version of an incident; None if the disk is up to date or the id is unknown."""
        return self._waiting.incidents.get(incident_id) or self._batch.incidents.get(incident_id)

    async def incidents(self, query: IncidentQuery) -> list[Incident]:
        """Matching incidents as last known; only unwritten ones while the store cannot be read."""
        try:
            kept = await self.read(lambda store: store.incidents(query))
        except UnavailableError as error:
            log.warning("%s", error)
            kept = []
        known = {each.id: each for each in kept} | self._batch.incidents | self._waiting.incidents
        return [each for each in map(self._unerased, known.values()) if each is not None and query.matches(each)]

    async def incident(self, incident_id: str, newest: Incident | None = None) -> IncidentDetail | None:
        """One incident as last known, with those of its events and deliveries that are on disk; None: unknown id.
        ``newest``: its state, if the caller has it. Raises ``UnavailableError``: the store cannot be read, and memory
        has no unwritten version."""
        newest = newest or self.unwritten(incident_id)
        try:
            found = await self.read(lambda store: store.incident(incident_id))
        except UnavailableError:
            if newest is None:
                raise
            found = None
        if newest is not None:
            found = IncidentDetail(newest, [], []) if found is None else replace(found, incident=newest)
        if found is None or (kept := self._unerased(found.incident)) is None:
            return None
        return replace(found, incident=kept)

    def _unerased(self, incident: Incident | None) -> Incident | None:
        """Apply unwritten erasures to an incident; None: erased."""
        for changes in (self._batch, self._waiting):
            for camera, before_s in changes.erasures.items():
                incident = incident and ErasureScope(camera, before_s).redact_incident(incident)
        return incident

    async def read(self, query: Callable[[AlertStore], T]) -> T:
        """Query the store on its thread. Raises ``UnavailableError``: it is not open, fails, or is too slow."""
        if self._store is None:
            raise UnavailableError(f"the records of incidents cannot be read now: {self.trouble or 'still opening'}")
        store = self._store
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._on_thread(store.run_with_recovery, query)
        except TimeoutError:
            raise UnavailableError("the records of incidents cannot be read now: the disk does not answer") from None
        except sqlite3.Error as error:
            raise UnavailableError(f"the records of incidents cannot be read now: {error}") from None

    async def stop(self) -> None:
        """Write pending changes and close the file."""
        if self._waiting:
            await self.write(Changes())
        if self._store is not None and self._writing is None:
            await self._on_thread(self._store.close)
        self._thread.shutdown(wait=False)

    # -- inside ---------------------------------------------------------------------------------
    async def _on_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _open(self) -> StoredState:
        store = self._open_store()
        kept = store.run_with_recovery(AlertStore.load)
        self._store = store
        return kept

    def _begin(self, batch: Changes | None) -> asyncio.Future[None]:
        """Start writing a batch; None: a probe write."""

        def run() -> None:
            if self._store is None:
                self._late = self._open()
            assert self._store is not None
            if batch is None:
                self.free_bytes = self._store.probe(time.time())
            else:
                self._store.run_with_recovery(lambda store: store.write(batch))

        writing = asyncio.ensure_future(self._on_thread(run))
        writing.add_done_callback(self._written)
        return writing

    def _written(self, done: asyncio.Future[None]) -> None:
        batch, self._batch = self._batch, Changes()
        self._writing = None
        if self._late is not None:
            late, self._late = self._late, None
            self._on_late(late)
        if self._store is not None and self._store.damaged != self._damaged:
            self._damaged = self._store.damaged
            self._on_recreated()
        error = None if done.cancelled() else done.exception()
        if error is None and not done.cancelled():
            if self.trouble:
                log.info("alerts are written to disk again")
            self.trouble = ""
            if any(self._dropped):
                log.error(_DROPPED, *self._dropped)
                self._dropped = Dropped()
            return
        # The failed batch is older than what has become pending since.
        batch.merge(self._waiting)
        self._waiting = batch
        self._drop_oldest()
        if isinstance(error, CapacityError):
            self._trouble(str(error))
        elif error is not None:
            self._trouble(f"cannot write alerts to disk ({error}); they are sent from memory")
            if not isinstance(error, sqlite3.Error | OSError):
                log.error("writing alerts failed", exc_info=error)

    def _drop_oldest(self) -> None:
        dropped = self._waiting.drop_oldest(self._memory_events)
        if any(dropped) and not any(self._dropped):
            log.error("too many unwritten alert changes for the memory buffer; the oldest are dropped")
        self._dropped = Dropped(*map(add, self._dropped, dropped))
        self.lost += dropped.undelivered
        self._dropped_delivered += dropped.delivered

    def _trouble(self, sentence: str) -> None:
        if sentence != self.trouble:
            log.error("%s", sentence)
        self.trouble = sentence
