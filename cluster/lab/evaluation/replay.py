"""One pass of a video through the live code path (source, codec, pruner, engine) under many settings.

Samples go to one patch sampler per pruning policy, and from there to one engine stream per setting.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.windows import opening_index, window_time
from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.evaluation.results import VideoRun, WindowResult
from cluster.lab.evaluation.settings import Setting
from cluster.lab.report.compare import video_samples
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample, PatchGrid, Question, SampledPicture, StreamSpec, WindowRequest
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler


def replay(
    engine: NativeEngine, video: LabelledVideo, settings: Sequence[Setting], questions: Mapping[str, str]
) -> dict[str, VideoRun]:
    """Answer every window of a video under each setting; setting's key -> run.

    Only whole windows are recorded: shorter ones at the start say little about full computation. The engine still steps
    through them, so that the first whole window finds the live state; full computation, which reuses nothing, skips
    them.

    Args:
        engine: its model answers; streams are removed afterwards.
        video: read once.
        settings: of one sampling rate and anchor interval.
        questions: kind of event -> text; those of ``video.kinds`` are asked in each window.

    Raises:
        SourceError: the video cannot be read to its end.
    """
    shapes = {(setting.shape.fps, setting.shape.anchor_interval_s) for setting in settings}
    if len(shapes) != 1:
        raise ValueError(f"one pass has one rate and one anchor interval, not {sorted(shapes)}")
    ((fps, interval),) = shapes
    asked = tuple(Question(kind, questions[kind]) for kind in video.kinds)
    processor = CodecProcessor(engine.geometry, CodecOptions(fps=fps, anchor_interval_s=interval))
    branches = _pruner_streams(engine, settings, asked, fps)
    motion = _MotionSum()
    try:
        for frame in video_samples(video.path, processor):
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


def _pruner_streams(
    engine: NativeEngine, settings: Sequence[Setting], asked: tuple[Question, ...], fps: float
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
        branches[policy].streams.append(_SettingStream(engine, setting, spec))
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
class _FrameInfo:
    """A frame without its patches."""

    pts: int
    duration: int
    complete: bool
    grid: PatchGrid


class _SettingStream:
    """One setting on one engine stream."""

    def __init__(self, engine: NativeEngine, setting: Setting, spec: StreamSpec) -> None:
        self.engine = engine
        self.setting = setting
        self.spec = spec
        self.windows: list[WindowResult] = []
        # Start of the video, and of the stream since its last restart; microseconds.
        self._begin: int | None = None
        self._origin = 0
        self._frames: list[_FrameInfo] = []
        self._tower: dict[PatchGrid, int] = {}

    def push(self, sample: FrameSample) -> None:
        """Push a frame and answer the windows it completes."""
        if self._begin is None:
            self._begin = sample.pts
        if sample.fresh:
            self._origin = sample.pts
            self._frames.clear()
        if self.setting.recompute:
            self._frames.append(_FrameInfo(sample.pts, sample.duration, sample.complete, sample.grid))
        self._answer(self.engine.push(replace(sample, stream=self.spec.stream)))

    def finish(self) -> None:
        """End of the video: answer the last, shortened window, as the live system does."""
        if self._begin is not None:
            self._answer(self.engine.flush(self.spec.stream))

    def _answer(self, requests: Sequence[WindowRequest]) -> None:
        length = round(self.spec.window_s * MICROSECONDS)
        for request in requests:
            whole = request.end - self._origin >= length
            if whole or not self.setting.recompute:
                result = self._step(request)
                if whole and result is not None:
                    self.windows.append(result)

    def _step(self, request: WindowRequest) -> WindowResult | None:
        began = time.perf_counter()
        answers = self.engine.step([request])
        latency_s = time.perf_counter() - began
        if not answers or self._begin is None:
            return None
        (stats,) = self.engine.stats.windows
        tokens, tower_flops = stats.tokens, stats.tower_flops
        if self.setting.recompute:
            tower_flops, visual = self._full_tower_cost(request)
            # Scale the tower's time from the new frames to all frames.
            latency_s += stats.timing.vision_s * (visual / tokens.encoded - 1) if tokens.encoded else 0.0
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

    def _full_tower_cost(self, request: WindowRequest) -> tuple[int, int]:
        """FLOPs and visual tokens of the vision tower for every frame of the window.

        Full computation encodes each frame again in every window. The results are identical, so the engine's cached
        tokens are used and only the cost is counted.
        """
        # Later windows open no earlier.
        self._frames = self._frames[opening_index(self._frames, request.start) :]
        frames = [frame for frame in self._frames if window_time(frame) < request.end]
        for grid in {frame.grid for frame in frames} - self._tower.keys():
            self._tower[grid] = complete_frame_flops(self.engine.model, grid)
        return sum(self._tower[frame.grid] for frame in frames), sum(frame.grid.tokens for frame in frames)


def complete_frame_flops(model: VisionLanguageModel, grid: PatchGrid) -> int:
    """Tower FLOPs of one unpruned frame."""
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    # tower_flops counts cells and reads no pixels.
    pixels = torch.empty(grid.rows * grid.cols, 0, dtype=torch.uint8)
    return model.tower_flops([PatchBatch(pixels, cells, grid)])
