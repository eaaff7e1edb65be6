"""One camera of a decoder process: its pipeline, its path to the replica, and its accounting of lost windows."""

import logging
import threading
import time
import uuid
from collections import Counter
from dataclasses import replace

from cluster import metrics
from cluster.codec import CameraState, FileSource, NetworkSource, PushSource
from cluster.config import CameraConfig, SightlineConfig
from cluster.control.ladder import FULL, Rung
from cluster.decoder.decode_load import DecodeBacklog, DecodeGate
from cluster.decoder.footage.camera import camera_footage, clip_lookback_s
from cluster.decoder.footage.ring import RingBudget
from cluster.decoder.frame_lanes import LaneStatus, LostCamera
from cluster.decoder.frame_sender import FrameSender
from cluster.decoder.ingest import QueueSink
from cluster.decoder.pipeline import (
    CameraPipeline,
    PipelineStatus,
    make_source,
    pipeline_settings,
    stream_spec_at,
)
from cluster.decoder.windows_in_flight import AccountedFrames, UnsentWindows, WindowsInFlight
from cluster.errors import CapacityError
from cluster.tracing import Spans
from cluster.tracing.spans import CameraTrace, FrameTimes
from cluster.types import CameraStateName, FrameSample, PatchGeometry, StreamSpec
from cluster.types.cameras import NOT_ASKED, Priority
from cluster.types.reports import CameraReport, Totals
from cluster.vision.sampler import Cut

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.02
ASKED = frozenset({"name", "priority", "window", "memory", "questions"})
"""Settings that can change without restarting the pipeline, as they do not affect pictures."""
RING_IDLE_S = 600.0
"""Seconds without packets after which the packet ring is cleared: no clip would use its content."""
PATIENT_FRAMES = 8
"""Limit on in-flight frames of a patient camera: a file would fill any queue, and all of it is lost with a replica."""


class RunningCamera:
    """A camera that starts on construction. ``_send`` runs in the camera's thread, the rest on the event loop."""

    def __init__(
        self,
        settings: CameraConfig,
        geometry: PatchGeometry,
        sender: FrameSender,
        config: SightlineConfig,
        rings: RingBudget | None = None,
        spans: Spans | None = None,
        gate: DecodeGate | None = None,
        *,
        life: str = "",
        unsent: int = 0,
    ) -> None:
        """``rings``: byte budget of this process's packet rings; ``spans``: trace exporter; ``gate``: the process's
        decode gate; ``life``: see :class:`~cluster.types.StreamSpec`; ``unsent``: windows that earlier decoders
        counted as dropped. Raises ``ConfigError``: invalid source address or pruning policy; ``RuntimeError``: no room
        for its thread."""
        self.settings, self.geometry = settings, geometry
        self.life, self._unsent_before = life, unsent
        self._run = uuid.uuid4().hex[:16]
        self.rung = FULL
        self.idle = not settings.asks_at(time.time())
        self.spec = self._spec_at(FULL)
        self.address: str | None = None
        self.refusal = ""
        self._behind = False
        self._sender, self._gate, self._config = sender, gate, config
        self._lock = threading.Lock()
        self._in_flight = WindowsInFlight(self.spec.stride_s)
        self._unsent = UnsentWindows()
        self._accounted = AccountedFrames()
        self._lost = 0
        self._moves = self._begun = self._stopping = False
        self._totals = Totals()
        self._metrics = metrics.CameraMetrics(settings.name)
        self._counted: Counter[str] = Counter()
        self._trace = CameraTrace(spans, settings.name, config.tracing.ratio) if spans is not None else None
        self.footage = camera_footage(settings, config, rings)
        self.sink: QueueSink | None = None
        try:
            self._start_pipeline()
        except Exception:
            self.footage.close()
            self._metrics.remove()
            raise

    def _start_pipeline(self) -> None:
        self._started_s = time.monotonic()
        self._source = make_source(self.settings, self._config)
        if isinstance(self._source, PushSource):
            if self.sink is None:
                self.sink = QueueSink(self._source, max_credit=self._config.gateway.credit, camera=self)
            self.sink.source = self._source
        self._pipeline = CameraPipeline(
            self.settings.name,
            self._source,
            self.geometry,
            pipeline_settings(self.settings),
            self._send,
            self._on_end,
            self.footage,
            self._gate,
        )
        self._pipeline.set_quality(prune=self.rung.prune, fps=self.rung.fps)
        self._update_keyframes_only()
        self._pipeline.start()

    def restart(self) -> None:
        """Restart a push camera after its session has ended or it has failed."""
        self._totals.update("pipeline", _counts(self._pipeline.status()))
        self._totals.end("pipeline")
        self._end_windows()
        self._start_pipeline()
        if self._stopping:
            # stop() ran concurrently in another thread, perhaps on the old pipeline.
            self._pipeline.stop(0.0)
        else:
            self._assign()

    @property
    def ended(self) -> bool:
        return not self._pipeline.running

    @property
    def pipeline_status(self) -> PipelineStatus:
        return self._pipeline.status()

    def stop(self, timeout_s: float, *, moved: bool = False) -> bool:
        """Stop the camera: end its thread, and close it at the replica unless it has ``moved`` to another decoder."""
        self._stopping = True
        if self.sink is not None:
            self.sink.retire()
        stopped = self._pipeline.stop(timeout_s)
        self.footage.close()
        (self._sender.release if moved else self._sender.close)(self.settings.name)
        self._metrics.remove()
        return stopped

    # -- path to the replica --------------------------------------------------------------------
    def route(self, address: str | None, *, hand_over: bool = False) -> None:
        """Send to the replica at ``address``, or to none for ``None``. ``hand_over``: the previous replica is alive and
        can hand over the window."""
        if address == self.address:
            return
        with self._lock:
            self._read_acknowledged()
        if address is None:
            self._sender.drop_queue(self.settings.name)
        handed = False
        if address is not None and not (self.idle or self.ended):
            handed = self._sender.assign(self.spec, address, hand_over=hand_over)
        with self._lock:
            self._count_cut()
            if self.address is not None and not handed:
                self._count_lost(self._in_flight.count_lost())
            self._moves = handed
        self.refusal = ""
        self.address = address
        self._pipeline.force_anchor()

    def _assign(self) -> None:
        """Send the stream specification to the replica, if there is one and the camera has questions to answer."""
        if self.address is not None and not (self.idle or self.ended):
            self._sender.assign(self.spec, self.address)

    def set_rung(self, rung: Rung) -> None:
        """Change the quality rung; keeps source, window and pruner state."""
        if rung == self.rung:
            return
        self.rung = rung
        self._metrics.quality.set(rung.value)
        self._pipeline.set_quality(prune=rung.prune, fps=rung.fps)
        self._update_keyframes_only()
        self._update_spec()
        if not rung.shed:
            self._assign()

    def set_behind(self, behind: bool) -> None:
        """While ``behind``, as this process cannot keep up, the camera decodes keyframes only, sends nothing, and its
        windows count as dropped."""
        if behind != self._behind:
            self._behind = behind
            self._update_keyframes_only()

    def _update_keyframes_only(self) -> None:
        """Decode keyframes only, for the live view, while nothing is sent. A patient file is decoded in full."""
        unsent = self._behind or self.rung.shed or self.idle
        self._pipeline.set_keyframes_only(unsent and not self.spec.patient)

    @property
    def decode_backlog(self) -> DecodeBacklog | None:
        """Decode backlog; ``None`` for a patient file, which cannot fall behind."""
        if self.spec.patient:
            return None
        assert isinstance(self._source, PushSource | NetworkSource | FileSource)
        priority, behind_s = Priority.of(self.settings.priority), self._source.behind_s
        decodes = self.pipeline_status.state is CameraState.RUNNING and not (self.idle or self.rung.shed)
        return DecodeBacklog(self.settings.name, priority, behind_s, self.spec.stride_s, decodes)

    def apply_settings(self, settings: CameraConfig) -> bool:
        """Apply settings between two frames, keeping source and window. Returns ``False`` if they need a new source or
        pipeline: the camera must then be restarted."""
        if settings == self.settings:
            return True
        if any(
            getattr(settings, key) != getattr(self.settings, key) for key in type(settings).model_fields.keys() - ASKED
        ):
            return False
        self.settings = settings
        self.refusal = ""
        self._pipeline.set_lazy_wait(pipeline_settings(settings).lazy_wait_s)
        self._update_spec()
        self._assign()
        self.follow_schedule(time.time())
        return True

    def follow_schedule(self, now_s: float) -> None:
        """Ask the questions scheduled at ``now_s`` (Unix seconds). Without any, the camera is idle: closed at its
        replica, decoded in keyframes only for the live view, and none of its windows count as dropped."""
        idle = not self.settings.asks_at(now_s)
        if idle != self.idle:
            log.info("camera %s: %s", self.settings.name, "no question is asked now" if idle else "asked again")
            self.idle = idle
            self._update_keyframes_only()
            if idle:
                self._end_windows()
                self._sender.close(self.settings.name, flush=True)
                return
            self._pipeline.force_anchor()
        elif idle or self._spec_at(self.rung, now_s) == self.spec:
            return
        with self._lock:
            self.spec = self._spec_at(self.rung, now_s)
        if not self.rung.shed:
            self._assign()

    def _spec_at(self, rung: Rung, now_s: float | None = None) -> StreamSpec:
        spec = self.settings.stream_spec(time.time() if now_s is None else now_s)
        return stream_spec_at(replace(spec, life=self.life), rung)

    def _update_spec(self) -> None:
        with self._lock:
            self.spec = self._spec_at(self.rung)
            if self.footage.ring is not None:
                # The stride determines how late incidents open, hence how far back their clips reach.
                self.footage.ring.keep_s = clip_lookback_s(self.settings, self._config, self.spec.stride_s)
            if not self.rung.shed:
                self._in_flight.set_stride(self.spec.stride_s)

    def on_lost(self, event: LostCamera) -> None:
        """Handle a lost replica or connection, or a refusal."""
        if event.refused == "spec":
            self.refusal = event.reason
        if event.refused == "not_open":
            # The replica is reachable and counts the windows missed until the camera is reopened.
            with self._lock:
                self._read_acknowledged()
                self._in_flight.restart()
        log.warning("camera %s at %s: %s (%d frames lost)", event.camera, event.address, event.reason, event.frames)
        if event.settled is None:
            self._pipeline.force_anchor()
            return
        with self._lock:
            self._count_lost(self._in_flight.cancel_hand_over(event.settled))

    def _end_windows(self) -> None:
        """Expect no window until the next frame; the replica answers the part of the last one it has."""
        with self._lock:
            self._read_acknowledged()
            self._in_flight.restart()
            self._unsent.end()
            self._accounted.reset()

    def _count_lost(self, windows: int) -> None:
        self._lost += windows
        metrics.lose_window(windows)

    def _read_acknowledged(self) -> LaneStatus | None:
        """Read window counts from frame acknowledgements; an answer is therefore known one frame later."""
        lane = self._sender.status(self.settings.name)
        if lane is None or lane.address != self.address:
            return None
        windows = lane.windows
        self._count_lost(self._in_flight.apply_counts(windows.settled, windows.closed, windows.end))
        return lane

    def _send(self, sample: FrameSample, patches: Cut) -> None:
        """Sink of the pipeline. Raises ``CapacityError`` if the frame was dropped: the next one follows a gap."""
        if self.spec.patient and not self.idle:
            self._wait_for_room()
        if self.idle or self._stopping:  # The sender may already serve a new camera of this name, with other masks.
            metrics.frames_dropped.labels("not_asked").inc()
            raise CapacityError(f"camera {self.settings.name!r} is not asked anything now")
        unwanted = "shed" if self.rung.shed else "decoder_slow" if self._behind and not self.spec.patient else ""
        with self._lock:
            self._in_flight.note_arrival(sample, time.monotonic())
            self._count_cut()
            # Count during shedding, not only at its end, which may be hours away.
            if dropped := self._unsent.count(sample, self.spec.stride_s):
                metrics.drop_window(self._unsent.reason, dropped)
            sample = replace(sample, windows_dropped=self._unsent_before + self._unsent.windows)
            if sample.fresh and not self._begun:
                # The replica may hold a window of another decoder's frames; it decides whether that continues.
                sample = replace(sample, fresh=False, gap=True)
            self._begun = True
        if self._trace is not None and self.address is not None and not unwanted:
            waited_s = self._source.waited_s if isinstance(self._source, PushSource) else 0.0
            taken_s = self._pipeline.taken_s
            times = FrameTimes(taken_s - waited_s, taken_s, self._pipeline.decoded_s)
            sample = self._trace.trace_frame(sample, self.spec.stride_s, times)
        taken = self.address is not None and not self.refusal and not unwanted and self._sender.send(sample, patches)
        reason = unwanted or ("replica_slow" if self.address else "no_replica")
        with self._lock:
            cut = self._take_cut()
            if taken:
                moved = self._moves and sample.random_access
                self._count_lost(self._in_flight.add_frame(sample, moved=moved, unsent=self._unsent.windows))
                self._moves = self._moves and not moved
                self._unsent.end()
            else:
                self._unsent.begin(self._in_flight.uncounted_since(sample, cut), reason)
            if not self.spec.patient:
                self._accounted.add(sample, time.monotonic())
        if not taken:
            metrics.frames_dropped.labels(reason).inc()
            raise CapacityError(f"camera {self.settings.name!r} sends no frames now: {reason}")

    def _take_cut(self) -> int | None:
        """Start of a queue dropped since the last call, or ``None``; takes its windows out of flight."""
        cut = self._sender.take_cut(self.settings.name)
        if cut is not None:
            self._in_flight.truncate(cut)
        return cut

    def _count_cut(self) -> None:
        """Count windows whose frames were all dropped from the queue as dropped, not as in flight."""
        if self._take_cut() is not None:
            self._unsent.begin(self._in_flight.last_window_end, "no_replica")

    def _wait_for_room(self) -> None:
        """Block a patient file until the replica has capacity, or is back."""
        while not self._stopping:
            lane = self._sender.status(self.settings.name)
            under_way = lane.queued + lane.in_flight if lane is not None else 0
            ready = self.address is not None and not self.rung.shed
            if self.refusal or (ready and under_way < PATIENT_FRAMES):
                return
            time.sleep(ROOM_POLL_S)

    def _on_end(self, status: PipelineStatus) -> None:
        if not self._stopping:
            log.info("camera %s: %s %s", status.camera, status.state.value, status.reason)
            self._end_windows()
            self._sender.close(status.camera, flush=status.state is CameraState.ENDED)

    # -- reports --------------------------------------------------------------------------------
    def report(self) -> CameraReport:
        """Build the heartbeat report; also updates this process's metrics."""
        if self.footage.ring is not None:
            self.footage.ring.expire(RING_IDLE_S)
        status = self._pipeline.status()
        with self._lock:
            lane = self._read_acknowledged()
        report, now_s = self.last_report(status), time.monotonic()
        state: CameraStateName = status.state.value
        reason = status.reason
        if self.refusal:
            state, reason = "error", self.refusal
        elif status.state is CameraState.RUNNING:
            late = backlog.reason if (backlog := self.decode_backlog) else ""
            reason = self._reason_unsent(lane) or reason or late or self.footage.shortage(self.settings.name)
        self._measure(status, state)
        return replace(
            report,
            state=state,
            reason=reason,
            retry_in_s=status.retry_in_s,
            codec=status.stats.codec,
            width=status.stats.width,
            height=status.stats.height,
            cue=status.stats.cue,
            decode=status.decoding,
            # Before the first picture, time since start: earlier pictures may have gone to another decoder.
            last_frame_age_s=now_s - self._started_s if status.last_frame_age_s is None else status.last_frame_age_s,
            picture=status.picture,
        )

    def _reason_unsent(self, lane: LaneStatus | None) -> str:
        """Why a running camera sends no frames; empty if it does."""
        if self.idle:
            return NOT_ASKED
        if self.address is None:
            return "no replica is ready for it"
        if lane is not None and lane.unreachable:
            return "its decoder cannot reach its replica"
        if lane is not None and lane.refused:
            return f"its replica refuses its frames: {lane.refused}"
        if self.rung.shed:
            return "shed: the replicas are overloaded"
        return "keyframes only: its decoder is overloaded" if self._behind else ""

    def last_report(self, status: PipelineStatus | None = None) -> CameraReport:
        """Final counts, reported after the camera stopped. ``status``: of the pipeline, read now if not given."""
        self._totals.update("pipeline", _counts(status or self._pipeline.status()))
        with self._lock:
            counts = self._totals.counts() | {"windows_lost": self._lost, "windows_dropped": self._unsent.windows}
            accounted = self._accounted.span(self._in_flight, self._unsent)
        return CameraReport(
            self.settings.name,
            "ended",
            counts=counts,
            life=self.life,
            run=self._run,
            now_s=time.monotonic(),
            accounted=accounted,
            idle=self.idle or (self.ended and not self._stopping),
        )

    def _measure(self, status: PipelineStatus, state: str) -> None:
        self._metrics.set_state(state)
        self._metrics.asked.set(not self.idle)
        if status.last_frame_age_s is not None:
            self._metrics.frame_decoded(time.monotonic() - status.last_frame_age_s)
        totals = self._totals.counts()
        self._metrics.decode_errors.inc(self._counter_increase("decode_errors", totals["decode_errors"]))
        self._metrics.gaps.inc(self._counter_increase("gaps", totals["gaps"]))
        for result, frames in (("decoded", status.stats.frames_decoded), ("spared", status.stats.frames_spared)):
            metrics.video_frames.labels(result).inc(self._counter_increase(result, frames))
        self._metrics.count_lazy_events(
            {name: self._counter_increase(name, n) for name, n in status.lazy_events.items()}
        )

    def _counter_increase(self, name: str, value: int) -> int:
        before, self._counted[name] = self._counted[name], value
        return value - before if value >= before else value


def _counts(status: PipelineStatus) -> dict[str, int]:
    names = "frames_decoded", "frames_sampled", "decode_errors", "gaps"
    return {name: getattr(status.stats, name) for name in names}
