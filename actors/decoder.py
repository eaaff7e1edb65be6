"""The decoder actor: many cameras, one thread each, as assigned by the controller."""

import asyncio
import logging
import os
import time
import uuid
from functools import partial

from actors.remote import REMOTE_CONTROLLER
from actors.startup import InnerProcess, run_task
from cluster import metrics
from cluster.codec.nvdec import shared_nvdec
from cluster.config import SightlineConfig
from cluster.control.camera_record import Assignment, CameraAssignment
from cluster.decoder.decode_load import DecodeGate, DecodePressure
from cluster.decoder.discovery import NetworkSearch
from cluster.decoder.footage import service as recorder
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import RingBudget
from cluster.decoder.footage.service import Recorder
from cluster.decoder.frame_lanes import LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.ingest import IngestServicer, QueueSink
from cluster.decoder.pipeline import sender_queue
from cluster.decoder.running_camera import RunningCamera
from cluster.decoder.source_test import SourceTester
from cluster.errors import ConfigError, NotReadyError, UnavailableError, UnknownCameraError
from cluster.redaction import redact
from cluster.tracing import make_spans
from cluster.types.reports import CameraReport, DecoderInfo
from cluster.wire.server import RpcServer, push_message_bytes

log = logging.getLogger(__name__)

POLL_S = 10.0
KEPT_REPORTS = 1024
"""Maximum final reports of stopped cameras kept until the controller has them."""


class Decoder(InnerProcess):
    """Ray actor, named ``decoder-N``. After a restart it gets its cameras back from the controller."""

    def __init__(self, config: SightlineConfig, name: str, host: str | None) -> None:
        super().__init__(config, name, "decoder", host)
        self._instance = uuid.uuid4().hex[:12]
        self._cameras: dict[str, RunningCamera] = {}
        self._waiting: dict[str, CameraReport] = {}
        self._final_reports: list[CameraReport] = []
        self._sender = FrameSender(self._on_lost, max_queue=sender_queue(config), tls=self._tls)
        self._server = RpcServer(max_message_bytes=push_message_bytes(config.gateway.max_packet_bytes), tls=self._tls)
        self._spans = make_spans(config.tracing, name)
        self._decode_gate = DecodeGate()
        self._pressure = DecodePressure()
        metrics.decode_behind.set_function(lambda: self._pressure.behind)
        metrics.decode_keyframes_only.set_function(lambda: len(self._pressure.down))
        for device in ("cuda", "cpu"):
            metrics.decode_cameras.labels(device).set_function(partial(self._count, "decode", device))
        for state in ("learning", "on", "suspended"):
            metrics.lazy_cameras.labels(state).set_function(partial(self._count, "lazy", state))
        metrics.nvdec_sessions.set_function(lambda: shared_nvdec().sessions)
        self._assigned: dict[str, CameraAssignment] = {}
        self._rings = RingBudget(config.clips.ring_bytes)
        metrics.ring_bytes.set_function(lambda: self._rings.held)
        metrics.rings_short.set_function(lambda: self._rings.short)
        self._recorder = Recorder(config.clips, self._footage)
        self._tester = SourceTester(config)
        self._background: set[asyncio.Task[None]] = set()
        self._main = run_task(self._run())

    async def stop(self) -> None:
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
        servicer = IngestServicer(self._sink, max_packet_bytes=self._config.gateway.max_packet_bytes)
        self._server.add(servicer)
        self._server.add(
            recorder.RecorderServicer(
                self._recorder, self._tester, NetworkSearch(self._config.security.discovery_networks)
            )
        )
        port = self._server.bind(self._host, 0)
        await self._server.start()
        self._info = DecoderInfo(self._name, self._instance, f"{self._host}:{port}", self._page.address, os.getpid())
        await self._register()
        # Not a TaskGroup: in Python 3.11, one that fails leaves this task marked as cancelled, and run_task ignores it.
        await asyncio.gather(self._reconcile(), self._heartbeat())

    # -- the controller -------------------------------------------------------------------------
    async def _register(self) -> None:
        while True:
            try:
                await REMOTE_CONTROLLER.register_decoder(self._info, list(self._cameras))
                return
            except UnavailableError as error:
                log.warning("cannot register: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._config.cluster.heartbeat_s)
            self._apply_decode_pressure()
            # Cameras reduced to keyframes leave slots free.
            busy = 1.0 if self._pressure.down else self._decode_gate.take_busy_share()
            metrics.decode_busy.set(busy)
            for camera in self._cameras.values():
                camera.follow_schedule(time.time())
            final = self._final_reports
            reports = [camera.report() for camera in self._cameras.values()] + list(self._waiting.values())
            try:
                every = [*final, *reports]
                known = await REMOTE_CONTROLLER.heartbeat_decoder(self._name, self._instance, every, busy)
                if known:
                    delivered = set(map(id, final))
                    self._final_reports = [each for each in self._final_reports if id(each) not in delivered]
                else:
                    await self._register()
            except UnavailableError as error:
                log.warning("cannot send a heartbeat: %s", error)

    def _apply_decode_pressure(self) -> None:
        """Reduce cameras to keyframes when decoding falls behind, lowest priority first."""
        waits = [wait for camera in self._cameras.values() if (wait := camera.decode_backlog) is not None]
        step = self._pressure.decide(waits, time.monotonic())
        down = self._pressure.down
        for name, camera in self._cameras.items():
            # For every camera: one may have been restarted since.
            camera.set_behind(name in down)
        if step is None:
            return
        log.log(
            logging.WARNING if step.down else logging.INFO,
            "%s: %s %s",
            step.reason,
            "down to keyframes:" if step.down else "fully decoded again:",
            ", ".join(step.cameras),
        )

    async def _reconcile(self) -> None:
        """Run exactly the cameras that the controller assigns, following changes."""
        version = -1
        while True:
            try:
                assignment = await REMOTE_CONTROLLER.assignment(self._name, version, POLL_S)
                await self._apply(assignment)
                version = assignment.version
            except UnavailableError as error:
                log.warning("cannot get the assignment: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s / 2)

    async def _apply(self, assignment: Assignment) -> None:
        wanted = {name: self._assigned[name] for name in assignment.kept}
        wanted |= {assigned.settings.name: assigned for assigned in assignment.cameras}
        self._assigned = wanted
        self._tester.geometry = assignment.geometry or self._tester.geometry
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
        moved = await asyncio.gather(*(self._has_moved(camera) for camera in cameras))
        stopping = zip(cameras, moved, strict=True)
        await asyncio.gather(*(asyncio.to_thread(camera.stop, stop_s, moved=each) for camera, each in stopping))
        self._final_reports = (self._final_reports + [camera.last_report() for camera in cameras])[-KEPT_REPORTS:]
        self._waiting = {}
        # After closing moved cameras, so that the close does not take them away from their new decoders.
        self._sender.confirm(assignment.version)
        for name, assigned in wanted.items():
            if name not in self._cameras:
                # Starting hundreds takes seconds; frames, packets and heartbeats must not wait.
                await asyncio.sleep(0)
            self._run_camera(name, assigned, assignment.alive)

    async def _has_moved(self, camera: RunningCamera) -> bool:
        """Whether another decoder continues the camera's window at the same replica."""
        try:
            route = await REMOTE_CONTROLLER.where(camera.settings.name)
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
                    unsent=assigned.unsent,
                )
            except (ConfigError, RuntimeError) as error:
                self._waiting[name] = CameraReport(name, "error", redact(str(error)), life=assigned.life)
                return
        camera = self._cameras[name]
        camera.set_rung(assigned.rung)
        camera.route(assigned.replica_address, hand_over=camera.address in alive)

    # -- packets in, frames out -----------------------------------------------------------------
    async def _sink(self, name: str) -> QueueSink:
        camera = self._cameras.get(name)
        if camera is None:
            raise UnknownCameraError(f"{self._name} does not run camera {name!r} (yet)")
        if camera.sink is None:
            raise NotReadyError(
                f"camera {name!r} reads {camera.settings.source!r} itself; it accepts no pushed packets"
            )
        return camera.sink

    def _count(self, field: str, value: str) -> int:
        """Number of cameras whose pipeline status has this value in ``field``."""
        return sum(getattr(camera.pipeline_status, field) == value for camera in list(self._cameras.values()))

    def _footage(self, name: str) -> CameraFootage:
        camera = self._cameras.get(name)
        if camera is None:
            raise UnavailableError(f"{self._name} does not run camera {name!r} (yet)")
        return camera.footage

    def _on_lost(self, events: list[LostCamera]) -> None:
        """Pass losses to their cameras, and report broken connections to the controller, which probes the replica."""
        for event in events:
            if event.camera in self._cameras:
                self._cameras[event.camera].on_lost(event)
        for address in {event.address for event in events if not event.refused}:
            task = asyncio.create_task(self._report_broken(address))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _report_broken(self, address: str) -> None:
        try:
            await REMOTE_CONTROLLER.report_broken(address)
        except UnavailableError as error:
            log.warning("could not report the replica at %s: %s", address, error)
