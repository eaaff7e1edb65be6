"""Pipeline of one camera, from its source to kept patches, on its own thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from cluster.codec import Backoff, CameraState, Source, SourceStatus, SourceSupervisor, StreamHeader, open_source
from cluster.codec.lazy import LazyDecode
from cluster.codec.lazy_processor import LazyProcessor
from cluster.codec.nvdec import Nvdec, shared_nvdec
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.codec.stream_state import CodecStats
from cluster.config import CameraConfig, SightlineConfig
from cluster.config.sources import file_roots
from cluster.control.ladder import Rung
from cluster.decoder.decode_load import DecodeGate
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.picture_statistics import PictureStatistics
from cluster.errors import CapacityError, SourceError, first_line
from cluster.types import EncodedPacket, FrameSample, PatchGeometry, PictureHealth, SampledPicture, StreamSpec
from cluster.types.cameras import name_share
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import Cut, PatchSampler

if TYPE_CHECKING:
    from cluster.decoder.gpu.frontend import DeviceCamera

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PipelineSettings(CodecOptions):
    """Settings of one pipeline. ``pruner``: registry name; ``pruner_options``: its parameters. ``lazy``: leave quiet
    video undecoded (H.264 and HEVC on the CPU); ``lazy_wait_s``: see LazyDecode."""

    pruner: str = "replenish"
    pruner_options: Mapping[str, float] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    lazy: bool = False
    lazy_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """Status of one camera; counters run from its start.

    * ``retry_in_s``: seconds until the next attempt, in BACKOFF
    * ``last_frame_age_s``: seconds since the last decoded picture, None before the first
    * ``samples_dropped``: frames it refused, and frames left incomplete by a gap in a temporal pair
    * ``picture``: statistics of the newest sample, None before the first
    * ``decode``: "cuda" or "cpu", empty before the stream is open; ``reason`` says why a requested GPU is not used
    * ``lazy``, ``lazy_events``: state and event counts of lazy decoding (see LazyDecode), empty if off
    """

    camera: str
    state: CameraState
    reason: str
    retry_in_s: float
    stats: CodecStats
    last_frame_age_s: float | None
    samples_dropped: int
    picture: PictureHealth | None
    decode: str
    lazy: str
    lazy_events: Mapping[str, int]

    @property
    def decoding(self) -> str:
        """Decoding device, with the share of frames that lazy decoding spares, or its state if not "on"."""
        if not self.lazy:
            return self.decode
        stats = self.stats
        spared = stats.frames_spared / max(1, stats.frames_decoded + stats.frames_spared)
        return f"{self.decode}, {f'{spared:.0%} spared' if self.lazy == 'on' else self.lazy}"


SILENT_S = 10.0
"""Seconds without a picture after which a connected camera's status says so."""
SILENT = "connected, but no picture for more than 10 s: it sends nothing, or nothing that can be decoded"
BLIND = "no keyframe within 10 s after missing or damaged video; reconnecting to get one"

Sink = Callable[[FrameSample, Cut], None]


class CameraPipeline:
    """Runs one camera; any error puts it into state ``backoff`` or ``error`` and affects no other camera.

    ``sink`` is called in the camera's thread with every frame, still without patches, and what cuts them: of a frame
    that is not sent, nobody reads them. If it raises :class:`CapacityError`, the frame is dropped and counted, and the
    next one is sent whole, as following a gap. ``on_end`` is called in that thread once the camera has ended for good.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        geometry: PatchGeometry,
        settings: PipelineSettings,
        sink: Sink,
        on_end: Callable[[PipelineStatus], None] | None = None,
        footage: CameraFootage | None = None,
        gate: DecodeGate | None = None,
        nvdec: Nvdec | None = None,
    ) -> None:
        """``footage``: receives every packet and the pictures to show. ``gate``: shared by a process's cameras, held
        for one packet at a time. ``nvdec``: default, the process's. Raises ConfigError: unknown pruner or option."""
        self.name = name
        self._sink = sink
        self._on_end = on_end
        self._footage = footage or CameraFootage()
        self._gate: AbstractContextManager[object] = nullcontext() if gate is None else gate
        self._supervisor = SourceSupervisor(source, settings.backoff)
        self._nvdec = nvdec or shared_nvdec()
        self._sampler = PatchSampler(name, make_pruner(settings.pruner, settings.pruner_options), settings.fps)
        self._processor = CodecProcessor(geometry, settings, self._nvdec)
        self._lazy: LazyDecode | None = None
        if settings.lazy:
            self._processor = lazily = LazyProcessor(geometry, self._sampler.shows_change, settings, self._nvdec)
            self._lazy = lazily.lazy
            self._lazy.wait_s = settings.lazy_wait_s
        self._statistics = PictureStatistics()
        self._on_device: DeviceCamera | None = None
        self._logged_device = "", ""
        self._thread = threading.Thread(target=self._run, name=f"camera-{name}", daemon=True)
        self._stopping = threading.Event()
        self._fps = settings.fps
        self._wanted = self._quality = (1.0, 1.0)
        self._keyframes_only = False
        self._status = SourceStatus(CameraState.WAITING)
        self._status_at = time.monotonic()
        self._last_frame_at: float | None = None
        self._unshown: tuple[SampledPicture, float] | None = None
        self._refused = 0
        # Unix seconds of the newest packet, for tracing; read in the camera's thread.
        self.taken_s = self.decoded_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the camera; returns False if its thread is still busy after ``timeout_s`` (it ends as soon as it can)."""
        self._stopping.set()
        self._supervisor.stop()
        if self._thread.ident is None:
            return True
        return self.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait for the camera to end; returns False after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def force_anchor(self) -> None:
        """Send the next frame whole, as following a gap, after the camera's replica has missed frames."""
        self._sampler.force_anchor()

    def set_quality(self, *, prune: float = 1.0, fps: float = 1.0) -> None:
        """From the next packet on, scale the configured pruning threshold by ``prune`` and sampling rate by ``fps``.
        Keeps source, decoder and pruner state."""
        self._wanted = (prune, fps)

    def set_lazy_wait(self, wait_s: float) -> None:
        """Let samples wait for a keyframe for up to ``wait_s`` (see LazyDecode)."""
        if self._lazy is not None:
            self._lazy.wait_s = wait_s

    def set_keyframes_only(self, on: bool) -> None:
        """From the next packet on, decode keyframes only, each shown and offered to the sink as a frame of its own.
        Off: full decoding resumes at the next keyframe."""
        self._keyframes_only = on

    def status(self) -> PipelineStatus:
        """Snapshot; callable from any thread."""
        source, stats, now = self._status, self._processor.stats, time.monotonic()
        if source.state is CameraState.RUNNING and stats.refusal:
            # Packets keep coming: decoding resumes once the stream needs less memory.
            source = replace(source, state=CameraState.ERROR, reason=stats.refusal)
        device = self._processor.device
        if source.state is CameraState.RUNNING and device.fallback:
            source = replace(source, reason=f"decodes on the CPU: {device.fallback}")
        lazy = self._lazy if device.name == "cpu" else None
        if source.state is CameraState.RUNNING and lazy is not None and lazy.state == "suspended":
            source = replace(source, reason="decodes everything: lazy decoding missed changes")
        silent = self._supervisor.source.live and now - max(self._status_at, self._last_frame_at or 0.0) > SILENT_S
        if source.state is CameraState.RUNNING and silent:
            source = replace(source, reason=SILENT)
        return PipelineStatus(
            camera=self.name,
            state=source.state,
            reason=source.reason,
            retry_in_s=max(0.0, source.retry_in_s - (now - self._status_at)),
            stats=replace(stats, resyncs=stats.resyncs.copy()),
            last_frame_age_s=None if self._last_frame_at is None else now - self._last_frame_at,
            samples_dropped=self._refused + self._sampler.dropped,
            picture=self._statistics.health,
            decode=device.name,
            lazy="" if lazy is None else lazy.state,
            lazy_events={} if lazy is None else dict(lazy.events),
        )

    # -- the camera's thread --------------------------------------------------------------------
    def _run(self) -> None:
        try:
            final = self._supervisor.run(self._open, self._feed, self._on_state, self._on_defect)
            if not self._stopping.is_set():
                self._finish()
                stats = self._processor.stats
                if final.state is CameraState.ENDED and (stats.refusal or stats.frames_decoded == 0):
                    reason = f"the video ended without a decodable picture ({stats.decode_errors} decoding errors)"
                    final = SourceStatus(CameraState.ERROR, stats.refusal or reason)
        except SourceError as error:
            final = SourceStatus(CameraState.ERROR, str(error))
        except Exception as error:
            logger.exception("camera %s failed", self.name)
            final = SourceStatus(CameraState.ERROR, f"internal error: {type(error).__name__}: {error}")
        self._log_state(final)
        if self._on_end is not None:
            self._on_end(self.status())

    def _on_defect(self) -> None:
        logger.exception("camera %s failed and reconnects", self.name)
        self._drop_picture_state()

    def _drop_picture_state(self) -> None:
        self._sampler.drop_waiting()
        self._sampler.pruner.reset()
        self._on_device = None

    def _on_state(self, status: SourceStatus) -> None:
        # _run reports the end, after the decoder's remaining pictures have been sent.
        if status.state not in (CameraState.ENDED, CameraState.ERROR):
            self._log_state(status)

    def _log_state(self, status: SourceStatus) -> None:
        self._status, self._status_at = status, time.monotonic()
        if status.state is not CameraState.RUNNING:
            ended = self._supervisor.source.ended
            self._footage.pause("the video ended" if ended else "the connection to the camera was lost")

    def _open(self, header: StreamHeader) -> None:
        self._footage.open(header)
        self._processor.open(header)
        self._note_device()

    def _note_device(self) -> None:
        """Log a change of decoding device, and why it is not the GPU."""
        device = self._processor.device
        before, self._logged_device = self._logged_device, (device.name, device.fallback)
        if before == self._logged_device:
            return
        if device.name != before[0]:
            # Samples of two devices cannot form a frame, and a device's state is stale when it is used again.
            self._drop_picture_state()
        if device.fallback:
            logger.warning("camera %s decodes on the CPU: %s", self.name, device.fallback)
        elif device.name != "cpu":
            logger.info("camera %s decodes on the GPU", self.name)

    def _feed(self, packet: EncodedPacket) -> None:
        self._footage.add_packet(packet)
        if self._quality != self._wanted:
            self._quality = prune, fps = self._wanted
            self._processor.change_fps(self._fps * fps)
            self._sampler.reconfigure(prune=prune, fps=self._fps * fps)
        keyframes_only = self._keyframes_only
        before = self._processor.stats.frames_decoded
        self.taken_s = time.time()
        # Skipping a packet is cheap and needs no slot.
        with nullcontext() if keyframes_only and not packet.keyframe else self._gate:
            frames = self._processor.decode_keyframe_only(packet) if keyframes_only else self._processor.feed(packet)
        self.decoded_s = time.time()
        # A camera whose pictures are skipped on purpose must not look silent.
        held = self._lazy is not None and self._lazy.holding
        last, now, source = self._last_frame_at or 0.0, time.monotonic(), self._supervisor.source
        if keyframes_only or held or self._processor.stats.frames_decoded != before:
            self._last_frame_at = now
        elif source.live and not source.pushed and self._status_at < last < now - SILENT_S:
            # Keyframes may be minutes apart: reconnect for one. A session without any picture yet waits for its first.
            raise SourceError(BLIND, retryable=True)
        self._note_device()
        self._process(frames, unpaired=keyframes_only)
        self._process_on_device(unpaired=keyframes_only)

    def _finish(self) -> None:
        """Flush decoder and sampler after the last packet."""
        self._process(self._processor.drain())
        self._process_on_device()
        if self._on_device is None:
            if (last := self._sampler.flush_selection()) is not None:
                self._send(last.frame, last.cut)
        elif (whole := self._on_device.flush()) is not None:
            self._send(whole, partial(getattr, whole, "patches"))

    def _process(self, frames: list[SampledPicture], *, unpaired: bool = False) -> None:
        """Sample and send pictures; ``unpaired``: no later picture can be paired with them."""
        for frame in frames:
            with self._gate:
                if not frame.repeated:
                    self._statistics.add_sample(frame)
                    # Shown once its frame is complete; a repeated picture may complete it.
                    self._unshown = frame, time.monotonic()
                selection = self._sampler.select(frame)
                if self._lazy is not None and not frame.repeated:
                    self._lazy.label(self._sampler.activity > 0)
                if selection is None and unpaired:
                    selection = self._sampler.flush_selection()
            if selection is not None:
                if self._unshown is not None:
                    picture, decoded_at = self._unshown
                    self._footage.show(picture, selection.frame.mask, decoded_at)
                self._unshown = None
                self._send(selection.frame, selection.cut)

    def _process_on_device(self, *, unpaired: bool = False) -> None:
        """Sample and send pictures on the GPU; without the gate, so that other cameras can join the batch."""
        for picture in self._processor.pop_device_pictures():
            # Imports torch, which decoding on the CPU does not need.
            from torch import AcceleratorError

            from cluster.decoder.gpu.frontend import DeviceCamera, shared_frontend

            self._on_device = camera = self._on_device or DeviceCamera(self._sampler)
            try:
                sample = shared_frontend().process(camera, picture)
                frame = camera.flush() if sample.frame is None and unpaired else sample.frame
            except (NotImplementedError, RuntimeError) as error:
                reason = f"the GPU failed: {first_line(error)}"
                if isinstance(error, AcceleratorError):
                    # No further GPU call of this process will succeed.
                    self._nvdec.fail(reason)
                self._processor.leave_device(reason)
                self._note_device()
                return
            self._statistics.add(sample.picture, sample.thumbnail, sample.difference)
            if frame is not None:
                self._footage.show(sample, frame.mask, time.monotonic())
                self._send(frame, partial(getattr, frame, "patches"))

    def _send(self, sample: FrameSample, cut: Cut) -> None:
        try:
            self._sink(sample, cut)
        except CapacityError:
            self._refused += 1
            self._sampler.force_anchor()


def stream_spec_at(spec: StreamSpec, rung: Rung) -> StreamSpec:
    """Stream specification of a camera at ``rung``."""
    budget = spec.refresh_budget
    if rung.refresh_budget is not None:
        budget = rung.refresh_budget if budget is None else min(budget, rung.refresh_budget)
    return replace(spec, stride_s=rung.stride_s(spec.stride_s, spec.window_s), refresh_budget=budget)


def make_source(settings: CameraConfig, config: SightlineConfig) -> Source:
    """Create the camera's source, unopened."""
    own, limits = settings.source_options, config.cluster
    if settings.is_pushed:
        return open_source("", max_packets=limits.packet_queue, max_bytes=limits.packet_queue_bytes)
    roots = file_roots(config, settings.source)
    if settings.is_file:
        return open_source(settings.source, loop=own.loop, realtime=own.realtime, speed=own.speed, roots=roots)
    return open_source(
        settings.source,
        connect_timeout_s=own.connect_timeout_s,
        frozen_timeout_s=own.frozen_timeout_s,
        follow_redirects=config.security.follow_redirects,
        roots=roots,
        ca_file=own.ca_file,
    )


def pipeline_settings(settings: CameraConfig) -> PipelineSettings:
    """Pipeline settings of a camera's configuration."""
    backoff, stride_s = settings.source_options.backoff, settings.window.stride_s
    interval_s = settings.sampling.anchor_interval_s
    # Whole strides, so that windows still open at their start.
    strides = math.floor(interval_s / stride_s * name_share(settings.name))
    return PipelineSettings(
        fps=settings.sampling.fps,
        anchor_interval_s=interval_s,
        first_interval_s=interval_s - strides * stride_s,
        pruner=settings.pruning.policy,
        pruner_options=settings.pruning.options,
        backoff=Backoff(first_s=backoff.initial_s, longest_s=backoff.max_s, jitter=backoff.jitter),
        masks=tuple(settings.privacy_masks),
        zones=tuple(settings.zones),
        decoded_bytes=settings.source_options.decoded_bytes,
        decode=settings.decode,
        lazy=settings.sampling.lazy_decode == "auto",
        lazy_wait_s=stride_s / 2,
    )


def sender_queue(config: SightlineConfig) -> int:
    """Limit on a camera's frames queued in the decoder, in addition to ``cluster.frame_queue`` in flight."""
    return max(8, config.cluster.frame_queue // 2)
