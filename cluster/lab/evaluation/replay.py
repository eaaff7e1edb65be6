"""One pass of a video through the live code path (source, codec, pruner, engine) under many settings.

Samples go to one patch sampler per pruning policy, and from there to one engine stream per setting.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import av
from av.video.frame import VideoFrame

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.engine.window.windows import opening_index, window_time
from cluster.errors import SourceError
from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.evaluation.results import VideoRun, WindowResult
from cluster.lab.evaluation.settings import Setting
from cluster.lab.evaluation.towers import SimilarityReuse, TowerCache
from cluster.lab.report.compare import video_samples
from cluster.lab.scenes.encode import VideoEncoding, write_video
from cluster.models.base import PatchBatch
from cluster.types import MICROSECONDS, FrameSample, Question, SampledPicture, StreamSpec, WindowRequest
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler


def replay(
    engine: NativeEngine, video: LabelledVideo, settings: Sequence[Setting], questions: Mapping[str, str]
) -> dict[str, VideoRun]:
    """Answer every window of a video under each setting; setting's key -> run.

    Only whole windows are recorded: shorter ones at the start say little about full computation. The engine still steps
    through them, so that the first whole window finds the live state; settings that reuse nothing skip them.

    Args:
        engine: its model answers; streams are removed afterwards.
        video: read once.
        settings: of one sampling rate, anchor interval and source.
        questions: kind of event -> text; those of ``video.kinds`` are asked in each window.

    Raises:
        SourceError: the video cannot be read to its end.
    """
    inputs = {setting.input for setting in settings}
    if len(inputs) != 1:
        raise ValueError(f"one pass has one rate, one anchor interval and one source, not {sorted(inputs)}")
    ((fps, interval, source),) = inputs
    asked = tuple(Question(kind, questions[kind]) for kind in video.kinds)
    processor = CodecProcessor(engine.geometry, CodecOptions(fps=fps, anchor_interval_s=interval))
    tower = TowerCache(engine.model)
    branches = _pruner_streams(engine, tower, settings, asked, fps)
    motion = _MotionSum()
    try:
        with tower, _source(video.path, source, fps, interval) as path:
            for frame in video_samples(path, processor):
                motion.add(frame)
                for branch in branches:
                    branch.feed(frame)
            for branch in branches:
                branch.finish()
    finally:
        for branch in branches:
            for stream in branch.streams:
                engine.evict(stream.spec.stream)
    heights = fps / processor.stats.height if processor.stats.height else 0.0
    moved, changed = motion.means()
    speed = None if processor.stats.cue == "luma" else moved * heights
    return {
        stream.setting.key: VideoRun(video.kinds, tuple(stream.windows), speed, changed)
        for branch in branches
        for stream in branch.streams
    }


@contextmanager
def _source(path: Path, source: str, fps: float, interval: float) -> Iterator[Path]:
    """The video, or a temporary copy encoded as CodecSight's paper has it (section 6.1): ``fps`` pictures a second, the
    last before each instant, as H.264 with a GOP of ``interval`` seconds and P frames only.

    Raises:
        SourceError: the video cannot be read.
    """
    if source == "camera":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.with_suffix(".mp4").name
        try:
            with av.open(str(path)) as video:
                picture = video.streams.video[0]
                gop = max(1, round(fps * interval))
                options = {"preset": "medium", "crf": "23", "sc_threshold": "0"}
                encoding = VideoEncoding("libx264", options, picture.width, picture.height, fps, gop, 0)
                write_video(copy, encoding, _sampled(video.decode(picture), fps))
        except av.FFmpegError as error:
            raise SourceError(f"{path} cannot be encoded again: {error}", retryable=False) from None
        yield copy


def _sampled(pictures: Iterable[VideoFrame], fps: float) -> Iterator[VideoFrame]:
    """Pictures at ``fps`` a second, from the first on."""
    first: float | None = None
    taken = 0
    for picture in pictures:
        seconds = picture.time or 0.0
        first = seconds if first is None else first
        while seconds - first >= taken / fps - 1e-6:
            taken += 1
            yield picture.reformat(format="yuv420p")


def _pruner_streams(
    engine: NativeEngine, tower: TowerCache, settings: Sequence[Setting], asked: tuple[Question, ...], fps: float
) -> list[_PrunerStreams]:
    branches: dict[tuple[str, tuple[tuple[str, float], ...]], _PrunerStreams] = {}
    for number, setting in enumerate({setting.key: setting for setting in settings}.values()):
        policy = (setting.pruner, setting.options)
        if policy not in branches:
            branches[policy] = _PrunerStreams(
                PatchSampler("video", make_pruner(setting.pruner, dict(setting.options)), fps)
            )
        spec = StreamSpec(
            stream=f"setting {number}",
            questions=asked,
            window_s=setting.shape.window_s,
            stride_s=setting.shape.stride_s,
            refresh=setting.refresh,
            refresh_budget=setting.budget,
            static_gate=False,
            patient=True,
        )
        engine.admit(spec)
        branches[policy].streams.append(_SettingStream(engine, tower, setting, spec))
    return list(branches.values())


@dataclass(slots=True)
class _MotionSum:
    """Motion and luma change of a video, summed over its samples."""

    moved: float = 0.0
    changed: float = 0.0
    samples: int = 0

    def add(self, frame: SampledPicture) -> None:
        if not frame.random_access:
            self.moved += float(frame.change.net_motion.mean())
            self.changed += float(frame.change.luma.mean())
            self.samples += 1

    def means(self) -> tuple[float, float]:
        """Motion in native pixels per sample, luma change in grey levels."""
        count = max(1, self.samples)
        return self.moved / count, self.changed / count


@dataclass(slots=True)
class _PrunerStreams:
    """One pruning policy and the settings that share its samples."""

    sampler: PatchSampler
    streams: list[_SettingStream] = field(default_factory=list)

    def feed(self, frame: SampledPicture) -> None:
        self._send(self.sampler.feed(frame))

    def finish(self) -> None:
        self._send(self.sampler.flush())
        for stream in self.streams:
            stream.finish()

    def _send(self, sample: FrameSample | None) -> None:
        if sample is not None:
            for stream in self.streams:
                stream.push(sample)


@dataclass(frozen=True, slots=True)
class _WindowFrame:
    """A frame of the windows to come, and its input to the tower."""

    pts: int
    duration: int
    complete: bool
    batch: PatchBatch


class _SettingStream:
    """One setting on one engine stream."""

    def __init__(self, engine: NativeEngine, tower: TowerCache, setting: Setting, spec: StreamSpec) -> None:
        self.engine = engine
        self.tower = tower
        self.setting = setting
        self.spec = spec
        self.windows: list[WindowResult] = []
        self._reuse = None if setting.similarity is None else SimilarityReuse(engine.model, setting.similarity)
        # Start of the video, and of the stream since its last restart; microseconds.
        self._begin: int | None = None
        self._origin = 0
        self._frames: list[_WindowFrame] = []

    def push(self, sample: FrameSample) -> None:
        """Push a frame and answer the windows it completes."""
        if self._begin is None:
            self._begin = sample.pts
        if sample.fresh:
            self._origin = sample.pts
            self._frames.clear()
        if self.setting.tower == "every window":
            (batch,) = patch_batches([StreamFrame.of(sample)])
            self._frames.append(_WindowFrame(sample.pts, sample.duration, sample.complete, batch))
        self._answer(self.engine.push(replace(sample, stream=self.spec.stream)))

    def finish(self) -> None:
        """End of the video: answer the last, shortened window, as the live system does."""
        if self._begin is not None:
            self._answer(self.engine.flush(self.spec.stream))

    def _answer(self, requests: Sequence[WindowRequest]) -> None:
        length = round(self.spec.window_s * MICROSECONDS)
        for request in requests:
            whole = request.end - self._origin >= length
            if whole or self.setting.tower == "once" or self.setting.refresh != "all":
                result = self._step(request)
                if whole and result is not None:
                    self.windows.append(result)

    def _step(self, request: WindowRequest) -> WindowResult | None:
        self.tower.saved_s = 0.0
        began = time.perf_counter()
        with self._reuse(self.tower) if self._reuse else nullcontext():
            answers = self.engine.step([request])
        latency_s = time.perf_counter() - began
        if not answers or self._begin is None:
            return None
        (stats,) = self.engine.stats.windows
        tokens, tower_flops = stats.tokens, stats.tower_flops
        if self.setting.tower == "every window":
            tower_flops, tower_s = self._tower_cost(request, timed=not self.windows)
            latency_s += tower_s - stats.timing.vision_s
        elif self._reuse:
            tower_flops, self._reuse.flops = self._reuse.flops, 0
        else:
            latency_s += self.tower.saved_s
        return WindowResult(
            start_s=(request.start - self._begin) / MICROSECONDS,
            end_s=(request.end - self._begin) / MICROSECONDS,
            scores=tuple(answer.score for answer in answers),
            full=tokens.full,
            kept=tokens.kept,
            refreshed=tokens.refreshed,
            new=tokens.new,
            query=tokens.query,
            tower_flops=tower_flops,
            llm_flops=stats.llm_flops,
            latency_s=latency_s,
        )

    def _tower_cost(self, request: WindowRequest, *, timed: bool) -> tuple[int, float]:
        """FLOPs and seconds of the tower for every frame of the window; seconds are ``nan`` unless ``timed``.

        The results are those that the engine has kept, so they are used; the tower runs again only to be timed, in one
        window of a video.
        """
        # Later windows open no earlier.
        self._frames = self._frames[opening_index(self._frames, request.start) :]
        batches = [frame.batch for frame in self._frames if window_time(frame) < request.end]
        seconds = math.nan
        if timed:
            began = time.perf_counter()
            self.tower.tower(batches)
            seconds = time.perf_counter() - began
        return self.engine.model.tower_flops([batch for batch in batches if len(batch.cells)]), seconds
