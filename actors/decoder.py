"""The decoder actor: many cameras, one thread each, as assigned by the controller."""

import asyncio
import logging
import math
import os
import time
import uuid
from functools import partial
from pathlib import Path

from actors.remote import ask_controller, await_reply, controller, own_host
from actors.startup import configure_logging, describe_process
from cluster import metrics
from cluster.alerts.clips.footage_collector import ClipOutcome, FootageCollector
from cluster.alerts.clips.footage_store import FootageStore
from cluster.alerts.service import AlertService
from cluster.codec.nvdec import shared_nvdec
from cluster.config import SightlineConfig
from cluster.config.secrets import peer_tls
from cluster.control.camera_record import Assignment, CameraAssignment, Route
from cluster.decoder.decode_gate import make_decode_gate
from cluster.decoder.decode_pressure import DecodePressure
from cluster.decoder.discovery import NetworkSearch
from cluster.decoder.footage import service as recorder
from cluster.decoder.footage.camera import CameraFootage, clip_shortages
from cluster.decoder.footage.ring import RingBudget
from cluster.decoder.footage.service import DecoderRecorder, Recorder
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.packet_sink import PushedCameraSink
from cluster.decoder.pipeline import sender_queue
from cluster.decoder.running_camera import RunningCamera
from cluster.decoder.source_test import SourceTester
from cluster.errors import ConfigError, NotReadyError, UnavailableError, UnknownCameraError
from cluster.redaction import redact
from cluster.tracing import make_spans
from cluster.types.reports import CameraReport, DecoderInfo
from cluster.wire import ingest
from cluster.wire.channel import ChannelPool
from cluster.wire.metrics_server import serve_metrics
from cluster.wire.server import RpcServer, push_message_bytes

FOLDER, KNOWN = "clips", "clips-cameras.json"
AGAIN_S = 600.0
"""Age up to which unfinished clips of incidents are recorded again after a restart, from what is still available."""
REACH_S = 30.0
"""Extra lookback of a clip beyond its length: answers are late, and a clip begins with a keyframe."""


def footage_collector(
    config: SightlineConfig, folder: Path, run_id: str, channels: ChannelPool, service: AlertService
) -> FootageCollector | None:
    """Create the footage collector; None where the folder cannot be used: alerts go on without clips, and the log says
    why.

    Args:
        config: of the cluster.
        folder: of the alerts.
        run_id: of this cluster.
        channels: to the decoders.
        service: owns the incidents.
    """
    clips = config.clips
    for sentence in clip_shortages(config):
        log.warning("%s", sentence)
    try:
        store = FootageStore(
            Path(clips.folder) if clips.folder is not None else folder / FOLDER,
            max_bytes=clips.max_bytes,
            retention_s=clips.retention,
            keep_free=clips.keep_free,
            clip_lookback_s=clips.longest_s + REACH_S,
        )
    except OSError as error:
        log.error("snapshots and clips are disabled: %s", error)
        return None

    async def tell(news: ClipOutcome) -> None:
        await service.set_clip_state(news.incident, news.clip, news.note)

    return FootageCollector(
        clips,
        store,
        DecoderRecorder(_decoder_of, channels),
        tell,
        known=folder / KNOWN,
        run=run_id,
        erase=service.erase_removed_camera,
    )


async def start_footage(collector: FootageCollector, service: AlertService, enabled: bool) -> None:
    """Start the collector once the service has loaded its incidents. Not ``enabled``: pending clips are recorded as
    missing."""
    waiting = await service.pending_clips(time.time() - AGAIN_S if enabled else math.inf)
    collector.start(waiting)


async def _decoder_of(camera: str) -> str:
    route: Route = await ask_controller("where", camera)
    if route.decoder_address is None:
        raise UnavailableError(f"no decoder is ready for camera {camera!r} yet")
    return str(route.decoder_address)


log = logging.getLogger(__name__)

POLL_S = 10.0
KEPT_REPORTS = 1024
"""Last reports of stopped cameras, kept until the controller has them."""


class Decoder:
    """Ray actor, named ``decoder-N``. After a restart it gets its cameras back from the controller."""

    def __init__(self, config: SightlineConfig, name: str, host: str | None) -> None:
        configure_logging(name, config.cluster)
        describe_process(config, "decoder")
        self._config = config
        self._name = name
        self._host = own_host(host)
        self._instance = uuid.uuid4().hex[:12]
        self._cameras: dict[str, RunningCamera] = {}
        self._waiting: dict[str, CameraReport] = {}
        self._last_words: list[CameraReport] = []
        self._replicas: dict[str, str] = {}
        self._tls = peer_tls(config.security)
        self._sender = FrameSender(self._on_lost, max_queue=sender_queue(config), tls=self._tls)
        self._server = RpcServer(max_message_bytes=push_message_bytes(config.gateway.max_packet_bytes), tls=self._tls)
        self._spans = make_spans(config.tracing, name)
        self._decode_gate = make_decode_gate()
        self._pressure = DecodePressure()
        metrics.decode_behind.set_function(lambda: self._pressure.behind)
        metrics.decode_keyframes_only.set_function(lambda: len(self._pressure.down))
        for device in ("cuda", "cpu"):
            metrics.decode_cameras.labels(device).set_function(partial(self._decoded_on, device))
        for state in ("learning", "on", "suspended"):
            metrics.lazy_cameras.labels(state).set_function(partial(self._lazy_cameras, state))
        metrics.nvdec_sessions.set_function(lambda: shared_nvdec().sessions)
        self._rings = RingBudget(config.clips.ring_bytes)
        metrics.ring_bytes.set_function(lambda: self._rings.held)
        metrics.rings_short.set_function(lambda: self._rings.short)
        self._recorder = Recorder(config.clips, self._footage)
        self._tester = SourceTester(config)
        self._background: set[asyncio.Task[None]] = set()
        self._main = asyncio.create_task(self._run())

    async def ready(self) -> bool:
        """True once the process takes calls."""
        return True

    async def process_id(self) -> int:
        """Process id, for operators and tests."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop all cameras."""
        self._main.cancel()
        cameras = list(self._cameras.values())
        stop_s = self._config.cluster.stop_timeout_s / 2
        await asyncio.gather(*(asyncio.to_thread(camera.stop, stop_s) for camera in cameras))
        await self._sender.stop(flush_s=0.5)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self._server.stop(grace_s=0.5)
        self._recorder.close()

    async def _run(self) -> None:
        servicer = ingest.IngestServicer(self._sink, max_packet_bytes=self._config.gateway.max_packet_bytes)
        self._server.add(servicer)
        self._server.add(
            recorder.RecorderServicer(
                self._recorder, self._tester, NetworkSearch(self._config.security.discovery_networks)
            )
        )
        port = self._server.bind(self._host, 0)
        await self._server.start()
        self._info = DecoderInfo(
            self._name,
            self._instance,
            f"{self._host}:{port}",
            serve_metrics(self._host, self._config.cluster.metrics_ports, lambda: self._name, tls=self._tls).address,
            os.getpid(),
        )
        await self._register()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reconcile())
            group.create_task(self._heartbeat())

    # -- the controller -------------------------------------------------------------------------
    async def _register(self) -> None:
        while True:
            try:
                await ask_controller("register_decoder", self._info, list(self._cameras))
                return
            except UnavailableError as error:
                log.warning("cannot register: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._config.cluster.heartbeat_s)
            self._apply_decode_pressure()
            # Cameras that are reduced to keyframes leave slots free.
            busy = 1.0 if self._pressure.down else self._decode_gate.take_busy_share()
            metrics.decode_busy.set(busy)
            for camera in self._cameras.values():
                camera.follow_schedule(time.time())
            last_words = self._last_words
            reports = [camera.report() for camera in self._cameras.values()] + list(self._waiting.values())
            try:
                beat = controller().heartbeat_decoder.remote(self._name, self._instance, [*last_words, *reports], busy)
                if await await_reply(beat):
                    self._last_words = [each for each in self._last_words if each not in last_words]
                else:
                    await self._register()
            except UnavailableError as error:
                log.warning("no heartbeat: %s", error)

    def _apply_decode_pressure(self) -> None:
        """Reduce cameras to keyframes when decoding falls behind, the least important first."""
        waits = [wait for camera in self._cameras.values() if (wait := camera.decode_backlog) is not None]
        step = self._pressure.decide(waits, time.monotonic())
        for name, camera in self._cameras.items():
            # Also a camera that was restarted in the meantime.
            camera.set_behind(name in self._pressure.down)
        if step is None:
            return
        log.log(
            logging.WARNING if step.down else logging.INFO,
            "%s: %s %s",
            step.reason,
            "down to keyframes:" if step.down else "decoded whole again:",
            ", ".join(step.cameras),
        )

    async def _reconcile(self) -> None:
        """Run exactly what the controller assigns, following changes."""
        version = -1
        while True:
            try:
                asked = controller().assignment.remote(self._name, version, POLL_S)
                assignment: Assignment = await await_reply(asked, timeout_s=2 * POLL_S)
                await self._apply(assignment)
                version = assignment.version
            except UnavailableError as error:
                log.warning("no assignment: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s / 2)

    async def _apply(self, assignment: Assignment) -> None:
        wanted = {assigned.settings.name: assigned for assigned in assignment.cameras}
        self._tester.geometry = assignment.geometry or self._tester.geometry
        self._replicas = {a.replica_address: a.replica for a in wanted.values() if a.replica_address and a.replica}
        gone = [
            name
            for name, camera in self._cameras.items()
            if name not in wanted
            or camera.life != wanted[name].life
            or camera.geometry != wanted[name].geometry
            or not camera.apply_settings(wanted[name].settings)
        ]
        cameras = [self._cameras.pop(name) for name in gone]
        stop_s = self._config.cluster.stop_timeout_s / 2
        moved = await asyncio.gather(*(self._goes_on(camera) for camera in cameras))
        stopping = zip(cameras, moved, strict=True)
        await asyncio.gather(*(asyncio.to_thread(camera.stop, stop_s, moved=each) for camera, each in stopping))
        self._last_words = (self._last_words + [camera.last_report() for camera in cameras])[-KEPT_REPORTS:]
        self._waiting = {}
        # After closing cameras assigned to other decoders, so that the close does not take them away from those.
        self._sender.confirm(assignment.version)
        for name, assigned in wanted.items():
            self._run_camera(name, assigned, assignment.alive)

    async def _goes_on(self, camera: RunningCamera) -> bool:
        """Whether another decoder goes on with a camera's window at the replica that it is sent to."""
        try:
            route: Route = await ask_controller("where", camera.settings.name)
        except (UnavailableError, UnknownCameraError):
            return False
        return route.decoder != self._name and route.replica_address == camera.address

    def _run_camera(self, name: str, assigned: CameraAssignment, alive: frozenset[str]) -> None:
        if assigned.geometry is None:
            self._waiting[name] = CameraReport(name, "waiting", "no replica is ready yet", life=assigned.life)
            return
        if name not in self._cameras:
            try:
                self._cameras[name] = RunningCamera(
                    assigned.settings,
                    assigned.geometry,
                    self._sender,
                    self._config,
                    self._rings,
                    self._spans,
                    self._decode_gate,
                    life=assigned.life,
                )
            except ConfigError as error:
                self._waiting[name] = CameraReport(name, "error", redact(str(error)), life=assigned.life)
                return
        camera = self._cameras[name]
        camera.set_rung(assigned.rung)
        camera.route(assigned.replica_address, hand_over=camera.address in alive)

    # -- packets in, frames out -----------------------------------------------------------------
    async def _sink(self, name: str) -> PushedCameraSink:
        camera = self._cameras.get(name)
        if camera is None:
            raise UnknownCameraError(f"{self._name} does not run camera {name!r} (yet)")
        if camera.sink is None:
            raise NotReadyError(
                f"camera {name!r} reads {camera.settings.source!r} itself; it accepts no pushed packets"
            )
        return PushedCameraSink(camera)

    def _decoded_on(self, device: str) -> int:
        return sum(camera.pipeline_status.decode == device for camera in list(self._cameras.values()))

    def _lazy_cameras(self, state: str) -> int:
        return sum(camera.pipeline_status.lazy == state for camera in list(self._cameras.values()))

    def _footage(self, name: str) -> CameraFootage:
        camera = self._cameras.get(name)
        if camera is None:
            raise UnavailableError(f"{self._name} does not run camera {name!r} (yet)")
        return camera.footage

    def _on_lost(self, events: list[LostCamera]) -> None:
        """Report a broken connection or refusal, so that the controller probes the replica."""
        for event in events:
            if event.camera in self._cameras:
                self._cameras[event.camera].on_lost(event)
        for address in {event.address for event in events if not event.refused} & self._replicas.keys():
            task = asyncio.create_task(self._report_broken(self._replicas[address], address))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _report_broken(self, replica: str, address: str) -> None:
        try:
            await ask_controller("report_broken", replica, address)
        except UnavailableError as error:
            log.warning("could not report %s: %s", replica, error)
