"""The alerting actor: feeds every replica's answers and the controller's cameras to one ``AlertService``."""

import asyncio
import contextlib
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from actors.remote import ALERTING, REMOTE_CONTROLLER
from actors.startup import InnerProcess, run_task
from cluster.alerts.clips.footage_collector import FootageCollector
from cluster.alerts.clips.footage_store import FootageStore
from cluster.alerts.grpc_service import IncidentsServicer
from cluster.alerts.incident import AlertEvent
from cluster.alerts.service import AlertService
from cluster.config import CameraConfig, SightlineConfig
from cluster.decoder.footage.camera import clip_lookback_s
from cluster.decoder.footage.service import DecoderRecorder
from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.gateway import pictures_proxy as pictures
from cluster.gateway.merger import ResultsMerger
from cluster.security.private_files import FolderLock
from cluster.tracing import make_spans
from cluster.tracing.spans import AlertTraces
from cluster.wire.answers import AnswerHub, poll_pause_s
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer

log = logging.getLogger(__name__)

POLL_S = 1.0
ANSWERS = 50_000
"""Capacity of the queue of answers: alerting processes thousands a second, and a lost one may be an alert."""

FOLDER, KNOWN = "clips", "clips-cameras.json"
AGAIN_S = 600.0
"""Maximum age at which unfinished clips are recorded again after a restart, from the footage still available."""
ABANDONED_S = 60.0
"""Age after which a temporary folder, otherwise written every few seconds, is abandoned: no restart will reuse it."""
REACH_S = 30.0
"""Extra lookback of a clip: it starts at a keyframe, and its decoder answers with a delay."""


class Alerting(InnerProcess):
    """Ray actor. After a restart it resumes from its database and the replicas' answers of the last minute."""

    def __init__(self, config: SightlineConfig, run_id: str, host: str | None) -> None:
        super().__init__(config, ALERTING, "alerting", host)
        self._private = config.alerts.folder is None
        self._folder = private_folder(run_id) if config.alerts.folder is None else Path(config.alerts.folder)
        self._service = AlertService(config, self._folder, on_event=self._on_event)
        self._spans = make_spans(config.tracing, "alerting")
        self._traces = AlertTraces(self._spans) if self._spans is not None else None
        self._hub = AnswerHub(limit=ANSWERS)
        self._merger = ResultsMerger(self._hub, tls=self._tls)
        self._run_id = run_id
        self._locks: list[FolderLock] = []
        self._server = RpcServer(tls=self._tls)
        self._started = run_task(self._start(), told=SightlineError)
        self._cameras_known = asyncio.Event()
        self._lives: dict[str, str] = {}
        self._lives_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def ready(self) -> str:
        """``host:port`` of its gRPC server, once it listens. Raises ``ConfigError``: another cluster uses the folder,
        or its database has another schema version."""
        return await asyncio.shield(self._started)

    async def disk_trouble(self) -> str:
        """Current or imminent problem of the incidents' disk; empty if none."""
        return (await self._service.outbox()).disk

    async def stop(self) -> None:
        """Stop; pending alerts stay in the folder, unless it is private and deleted with the cluster."""
        for task in self._tasks:
            task.cancel()
        await self._merger.stop()
        await self._server.stop(grace_s=0.5)
        if self._started.done() and self._started.exception() is None:
            await self._footage.stop()
            await self._service.stop()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._private:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> str:
        # Before opening anything: another cluster's unfinished clips must not be touched.
        await asyncio.to_thread(self._lock_folders)
        if self._private:
            loop = asyncio.get_running_loop()
            loop.call_later(ABANDONED_S, loop.run_in_executor, None, delete_abandoned, self._folder)
        self._footage = self._footage_collector()
        self._service.routes.use_pictures(self._footage.snapshot)
        await self._service.start(self._footage.cameras)
        # With recording off, pending clips become missing ones.
        records = self._config.clips.enabled
        self._footage.start(lambda: self._service.pending_clips(time.time() - AGAIN_S if records else math.inf))
        self._server.add(IncidentsServicer(self._service))
        self._server.add(pictures.FootageServicer(self._footage, self._about, self._service.erase_camera))
        port = self._server.bind(self._host, 0)
        await self._server.start()
        loops = [
            self._take_answers(),
            self._watch_cameras(),
            self._merger.follow_replicas(REMOTE_CONTROLLER.replicas),
            self._service.run(),
            self._footage.run(),
            self._retain_footage(),
        ]
        self._tasks = [run_task(loop) for loop in loops]
        return f"{self._host}:{port}"

    def _footage_collector(self) -> FootageCollector:
        clips = self._config.clips
        store = FootageStore(
            Path(clips.folder) if clips.folder is not None else self._folder / FOLDER,
            max_bytes=clips.max_bytes,
            retention_s=clips.retention,
            keep_free=clips.keep_free,
            clip_lookback_s=clips.longest_s + REACH_S,
        )
        return FootageCollector(
            clips,
            store,
            DecoderRecorder(_decoder_of, ChannelPool(tls=self._tls)),
            self._service.set_clip_state,
            known=self._folder / KNOWN,
            run=self._run_id,
            erase=self._service.erase_removed_camera,
        )

    def _lock_folders(self) -> None:
        clips = self._config.clips.folder
        for folder, setting in ((self._folder, "alerts.folder"), (clips and Path(clips), "clips.folder")):
            try:
                if folder:
                    self._locks.append(FolderLock(folder, setting))
            except OSError as error:
                # Alerts are sent from memory until the folder becomes writable.
                log.error("cannot lock %s: %s", folder, error)

    def _on_event(self, event: AlertEvent) -> None:
        incident, trace = event.incident, ""
        if self._traces is not None:
            trace = self._traces.event_queued(incident.camera, incident.subject, event.kind)
        log.info("camera %s: incident %s, %s", incident.camera, incident.subject, event.kind, extra={"trace": trace})
        if self._config.clips.enabled:
            self._footage.handle_event(event)

    async def _about(self, incident_id: str) -> tuple[str, str]:
        incident = (await self._service.incident(incident_id)).incident
        return incident.camera, incident.footage_note

    async def _take_answers(self) -> None:
        with self._hub.subscribe() as answers:
            # Until then it knows no camera's rules.
            await self._cameras_known.wait()
            async for answer, missed in answers:
                if self._traces is not None:
                    self._traces.answer_received(answer)
                self._service.accept_answer(answer, missed)

    async def _watch_cameras(self) -> None:
        while True:
            began_s, pause_s = time.monotonic(), POLL_S
            try:
                watched = await REMOTE_CONTROLLER.camera_states(self._service.version)
                await self._service.update_cameras(watched)
                self._extend_lookback(watched.settings)
                self._cameras_known.set()
                self._lives = watched.lives
                self._lives_changed.set()
                pause_s = poll_pause_s(POLL_S, time.monotonic() - began_s)
            except UnavailableError as error:
                log.warning("cannot read the cameras' status: %s", error)
            await asyncio.sleep(pause_s)

    def _extend_lookback(self, cameras: Sequence[CameraConfig]) -> None:
        """Extend the clip lookback: longer windows and strides, overload included, start a camera's clips later."""
        store = self._footage.store
        for each in cameras:
            slowest_s = max(each.window.stride_s, each.window.length_s)
            reach_s = clip_lookback_s(each, self._config, slowest_s) + REACH_S
            store.clip_lookback_s = max(store.clip_lookback_s, reach_s)

    async def _retain_footage(self) -> None:
        """Separate from :meth:`_watch_cameras`: a slow disk must not delay rules and health checks."""
        while True:
            await self._lives_changed.wait()
            self._lives_changed.clear()
            await self._footage.retain_cameras(self._lives)


async def _decoder_of(camera: str) -> str:
    return (await REMOTE_CONTROLLER.where(camera)).to_decoder(camera)


def private_folder(run_id: str) -> Path:
    """Folder of alerting's files if ``alerts.folder`` is not set; deleted with the cluster."""
    return Path(tempfile.gettempdir(), f"sightline-alerts-{run_id}")


def delete_abandoned(own: Path) -> None:
    """Delete the private folders of killed clusters: their incidents and clips would stay forever."""
    for folder in set(own.parent.glob(private_folder("*").name)) - {own}:
        with contextlib.suppress(ConfigError, OSError):
            if max(each.stat().st_mtime for each in (folder, *folder.iterdir())) < time.time() - ABANDONED_S:
                FolderLock(folder, "alerts.folder", wait_s=0.0).release()
                shutil.rmtree(folder)
