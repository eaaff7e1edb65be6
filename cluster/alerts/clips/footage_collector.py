"""Records a snapshot and a clip of every incident and reports the outcome (``FootageCollector``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from sightline.v1.pictures_pb2 import RecordEnd, RecordPart, RecordRequest

from cluster import metrics
from cluster.alerts.clips.footage_store import Deleted, DraftFile, FootageStore, Kind, StorageError
from cluster.alerts.incident import AlertEvent, ClipState, Incident
from cluster.config.alerts import ClipsConfig
from cluster.errors import NotReadyError, SightlineError, UnavailableError
from cluster.files import replacing
from cluster.security.private_files import open_private
from cluster.types import MICROSECONDS

log = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_S = 10.0
SLACK_S = 15.0
"""Lag of a camera's video, in seconds, for which a clip still waits."""
WRITE_S = 60.0
"""Extra time for transcoding and transferring a clip, in seconds."""
PAUSE_S = 1.0
MOST_OUTCOMES = 10_000
KNOWN = "cameras.json"

Record = Callable[[RecordRequest], AsyncGenerator[RecordPart, None]]
"""Records a clip at the camera's decoder; raises ``SightlineError``."""

Pending = Callable[[], Awaitable[Iterable[Incident]]]
"""Incidents whose clip a previous process did not finish. Raises ``UnavailableError``, and is called again."""

Tell = Callable[[str, ClipState, str], Awaitable[object]]
"""(incident id, state of its clip, note on what is missing and why; empty: complete)."""


class FootageCollector:
    """Collects footage on one event loop, between :meth:`start` and :meth:`stop`; a separate thread writes the files.

    Args:
        settings: lengths and limits; clips beyond ``at_once`` are skipped, counted, and noted in the incident.
        store: stores the files.
        record: see :data:`Record`.
        tell: receives the outcome of each incident's clip.
        known: file of known cameras and pending deletions.
        run: id of this run; a removed camera's footage is deleted only if the camera was known in the same run.
        erase: erases the incident records of a camera up to its removal, Unix time. Raises ``SightlineError``, and is
            retried.
    """

    def __init__(
        self,
        settings: ClipsConfig,
        store: FootageStore,
        record: Record,
        tell: Tell,
        *,
        known: Path,
        run: str,
        erase: Callable[[str, float], Awaitable[object]],
    ) -> None:
        self._settings = settings
        self.store = store
        self._record = record
        self._tell = tell
        self._disk = ThreadPoolExecutor(1, "footage")
        self._work: dict[tuple[str, Kind], tuple[Incident, asyncio.Task[None]]] = {}
        self._covered: dict[str, int] = {}
        self._outcomes: dict[str, tuple[ClipState, str]] = {}
        self._reportable = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._known_file = known
        self._run = run
        self._erase = erase
        self.cameras, self._unerased = _read_known(known, run)

    def start(self, pending: Pending) -> None:
        """Start collecting, and resume the clips of ``pending``."""
        self._tasks = [
            asyncio.create_task(each) for each in (self._report_outcomes(), self._sweep(), self._resume(pending))
        ]

    async def run(self) -> None:
        """Wait until a background task fails, and raise its exception."""
        await asyncio.gather(*self._tasks)

    async def _resume(self, pending: Pending) -> None:
        while True:
            # The store itself reports that its database cannot be opened.
            with contextlib.suppress(UnavailableError):
                waiting = await pending()
                break
            await asyncio.sleep(PAUSE_S)
        for incident in waiting:
            if self.store.find(incident.id, "clip") is None:
                self._begin(incident, "clip")
            else:
                note = "the clip may be incomplete: alerting restarted before its state was recorded"
                self._settle(incident, "clip", "part", note)

    async def stop(self) -> None:
        """Abort clips in progress; the next process records them or reports them as missing."""
        tasks = [*self._tasks, *(task for _, task in self._work.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._disk.shutdown(wait=True, cancel_futures=True)

    async def snapshot(self, incident: Incident) -> bytes | None:
        """JPEG of an incident; None: there is none (yet), or it was deleted."""
        # Checked first: a missing file must not wait behind writes on the disk thread.
        if (stored := self.store.find(incident.id, "snapshot")) is None:
            return None

        def read() -> bytes | None:
            with contextlib.suppress(NotReadyError, OSError), self.store.open(stored) as file:
                return file.read()
            return None

        return await self._on_disk(read)

    def handle_event(self, event: AlertEvent) -> None:
        """Start a clip at an incident's first event, and an end clip, if configured, when it ends."""
        incident = event.incident
        if incident.events == 1:
            self._begin(incident, "clip")
        if not incident.open:
            covered = self._covered.pop(incident.id, None)
            if self._settings.at_end and incident.events > 1 and (covered is None or incident.end > covered):
                self._begin(incident, "end")

    async def delete_footage(self, camera: str, before_s: float = 0.0) -> Deleted:
        """Delete a camera's footage older than ``before_s`` seconds, including clips in progress; 0: all of it."""
        # A file shows video from before it was begun.
        begun_s = time.time() - before_s + self.store.clip_lookback_s if before_s else math.inf
        if before_s <= self.store.clip_lookback_s:
            await self._cancel_clips(camera)
        return await self._on_disk(lambda: self.store.delete_camera(camera, begun_before_s=begun_s, now_s=time.time()))

    async def _cancel_clips(self, camera: str) -> None:
        mine = [(*each, kind) for (_, kind), each in self._work.items() if each[0].camera == camera]
        for _, task, _ in mine:
            task.cancel()
        await asyncio.gather(*(task for _, task, _ in mine), return_exceptions=True)
        for incident, _, kind in mine:
            self._settle(incident, kind, "none", "no clip: the camera's memory was deleted")

    async def retain_cameras(self, lives: Mapping[str, str]) -> None:
        """Delete the footage of cameras that are missing from ``lives`` (name -> life) or have another life there."""
        if lives == self.cameras:
            return
        removed = [camera for camera, life in sorted(self.cameras.items()) if lives.get(camera) != life]
        self.cameras = dict(lives)
        for camera in removed:
            # From here on, _begin starts no clips of incidents opened before the removal.
            self._unerased[camera] = time.time()
            await self._cancel_clips(camera)
        for camera in removed:
            await self._delete_removed(camera)
        await self._write_known()

    async def _delete_removed(self, camera: str) -> None:
        """Delete a removed camera's footage and records, but nothing of a later camera of the same name."""
        removed_s = self._unerased.get(camera)
        if removed_s is None:
            return
        try:
            try:
                await self._erase(camera, removed_s)
            finally:
                delete, now_s = self.store.delete_camera, time.time()
                deleted = await self._on_disk(lambda: delete(camera, begun_before_s=removed_s, now_s=now_s))
        except SightlineError as error:
            log.error("camera %s was removed, but not all records of its incidents are erased yet: %s", camera, error)
            return
        if self._unerased.get(camera) == removed_s:
            del self._unerased[camera]
        log.info("camera %s was removed: deleted %d snapshots and clips", camera, deleted.files)

    async def _write_known(self) -> None:
        body = json.dumps({"run": self._run, "cameras": self.cameras, "unerased": self._unerased})
        await self._on_disk(lambda: _write_known(self._known_file, body))

    # -- one clip -------------------------------------------------------------------------------
    def _begin(self, incident: Incident, kind: Kind) -> None:
        key = (incident.id, kind)
        if key in self._work or incident.opened_s <= self._unerased.get(incident.camera, 0.0):
            return
        if len(self._work) >= self._settings.at_once:
            self._settle(
                incident, kind, "none", f"no clip: {len(self._work)} are being recorded already (clips.at_once)"
            )
            return
        task = asyncio.create_task(self._make(incident, kind))
        self._work[key] = incident, task
        task.add_done_callback(lambda _: self._work.pop(key, None))

    async def _make(self, incident: Incident, kind: Kind) -> None:
        order = record_order(incident, kind, self._settings)
        if kind == "clip":
            self._covered[incident.id] = order.until
            if len(self._covered) > MOST_OUTCOMES:
                self._covered.pop(next(iter(self._covered)))
        making = _ClipJob(self.store, incident, kind)
        try:
            async with asyncio.timeout(order.deadline_s + WRITE_S):
                await self._collect(order, making)
        except TimeoutError:
            making.trouble = "it took too long"
        except asyncio.CancelledError:
            await self._on_disk(making.abandon)
            raise
        except SightlineError as error:
            making.trouble = str(error)
        except Exception as error:
            log.exception("the clip of incident %s failed", incident.id)
            making.trouble = f"internal error: {type(error).__name__}"
        await self._on_disk(making.finish)
        self._settle(incident, kind, making.state, making.note)

    async def _collect(self, order: RecordRequest, making: _ClipJob) -> None:
        deadline = time.monotonic() + order.deadline_s
        while True:
            try:
                async with contextlib.aclosing(self._record(order)) as parts:
                    async for part in parts:
                        await self._on_disk(lambda part=part: making.add_part(part))  # type: ignore[misc]
                        if making.trouble:
                            return
                return
            except UnavailableError:
                # The decoder is restarting: its buffered packets are lost, but new ones can be recorded.
                if making.begun or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(PAUSE_S)

    def _settle(self, incident: Incident, kind: Kind, state: ClipState, note: str) -> None:
        metrics.clips.labels(state).inc()
        if note:
            # The store has already logged the disk error, once for all incidents.
            level = logging.INFO if self.store.trouble and self.store.trouble in note else logging.WARNING
            log.log(level, "incident %s of camera %s: %s", incident.id, incident.camera, note)
        if kind == "clip":
            self._outcomes[incident.id] = state, note
            if len(self._outcomes) > MOST_OUTCOMES:
                self._outcomes.pop(next(iter(self._outcomes)))
            self._reportable.set()

    async def _report_outcomes(self) -> None:
        while True:
            await self._reportable.wait()
            self._reportable.clear()
            while self._outcomes:
                incident = next(iter(self._outcomes))
                outcome = self._outcomes.pop(incident)
                try:
                    await self._tell(incident, *outcome)
                except UnavailableError as error:
                    log.warning("cannot record the state of incident %s's clip yet: %s", incident, error)
                    # Re-queued behind the others, unless a newer outcome has arrived.
                    self._outcomes.setdefault(incident, outcome)
                    await asyncio.sleep(PAUSE_S)
                except Exception:
                    log.exception("cannot record the state of incident %s's clip", incident)

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(StorageError):
                await self._on_disk(lambda: self.store.sweep(time.time()))
            if unerased := sorted(self._unerased):
                for camera in unerased:
                    await self._delete_removed(camera)
                await self._write_known()
            metrics.footage_bytes.set(self.store.bytes_stored)
            with contextlib.suppress(OSError):
                metrics.disk_free_bytes.labels("clips").set(await self._on_disk(self.store.free_bytes))
            await asyncio.sleep(SWEEP_S)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


class _ClipJob:
    """One clip in progress; used on the disk thread."""

    def __init__(self, store: FootageStore, incident: Incident, kind: Kind) -> None:
        self._store = store
        self._incident = incident
        self._kind: Kind = kind
        self._draft: DraftFile | None = None
        self._end: RecordEnd | None = None
        self._snapshot: Literal["", "kept", "failed"] = ""
        self._shows = False
        self.begun = False
        self.trouble = ""
        self.state: ClipState = "none"
        self.note = ""

    def add_part(self, part: RecordPart) -> None:
        self.begun = True
        now_s = time.time()
        try:
            match part.WhichOneof("part"):
                case "snapshot":
                    self._snapshot = "failed"
                    draft = self._store.begin(self._incident.camera, self._incident.id, "snapshot", now_s)
                    _write_all(draft, part.snapshot)
                    self._snapshot = "kept"
                case "clip":
                    if self._draft is None:
                        self._draft = self._store.begin(self._incident.camera, self._incident.id, self._kind, now_s)
                    self._draft.write(part.clip)
                    # The first part may consist of the file header only.
                    self._shows = self._shows or b"moof" in part.clip
                case "end":
                    self._end = part.end
        except StorageError as error:
            self.trouble = str(error)

    def finish(self) -> None:
        """Commit what was recorded, and set ``state`` and ``note``."""
        if self._draft is not None and self._shows:
            try:
                self._draft.commit()
                self.state = "whole"
            except StorageError as error:
                self.trouble = str(error)
        else:
            self.abandon()
        why = self.trouble or (self._end.note if self._end is not None else "the decoder was lost during recording")
        if self.state == "whole" and why:
            self.state, self.note = "part", f"the clip is incomplete: {why}"
        elif self.state == "none":
            neither = "no snapshot and no clip" if self._kind == "clip" and self._snapshot != "kept" else "no clip"
            self.note = f"{neither}: {why or 'the camera sent nothing'}"

    def abandon(self) -> None:
        if self._draft is not None:
            self._draft.abandon()


def record_order(incident: Incident, kind: Kind, settings: ClipsConfig) -> RecordRequest:
    """Recording request for an incident: from ``before_s`` before its start to ``after_s`` after its last known time;
    for its end clip, both around that time."""
    before, after = round(settings.before_s * MICROSECONDS), round(settings.after_s * MICROSECONDS)
    until = incident.end + after
    start = (incident.end if kind == "end" else incident.start) - before
    start = max(start, until - round(settings.longest_s * MICROSECONDS))
    return RecordRequest(
        camera=incident.camera,
        start=start,
        until=max(until, start + 1),
        deadline_s=settings.after_s + SLACK_S,
        moment=incident.end,
        only_clip=kind == "end",
    )


def _write_all(draft: DraftFile, data: bytes) -> None:
    try:
        draft.write(data)
    except StorageError:
        draft.abandon()
        raise
    draft.commit()


def _read_known(file: Path, run: str) -> tuple[dict[str, str], dict[str, float]]:
    """Read the lives of known cameras, empty if of another run, and the removal times (Unix time) of cameras whose
    footage or records are still to be deleted, of any run."""
    try:
        body = json.loads(file.read_text())
        return dict(body["cameras"]) if body["run"] == run else {}, dict(body["unerased"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def _write_known(file: Path, body: str) -> None:
    try:
        with replacing(file) as part, open(part, "w", opener=open_private) as out:
            out.write(body)
    except OSError as error:
        log.error("cannot write %s: %s", file, error.strerror)
