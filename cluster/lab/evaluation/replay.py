"""Replays a video once through the live code path (source, codec, pruner, engine) under many settings.

Samples are fanned out to one patch sampler per pruner, and from there to one engine stream per setting.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import av
import torch
from av.video.frame import VideoFrame
from torch import Tensor

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.engine.window.windows import opening_index, window_time
from cluster.errors import ConfigError, SourceError
from cluster.lab.evaluation.datasets import LabelledVideo
from cluster.lab.evaluation.results import VideoRun, WindowResult
from cluster.lab.evaluation.settings import Setting
from cluster.lab.report.compare import video_samples
from cluster.lab.scenes.encode import VideoEncoding, write_video
from cluster.models.base import FrameTokens, PatchBatch, VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample, Question, StreamSpec, WindowRequest
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler


def replay(
    engine: NativeEngine, video: LabelledVideo, settings: Sequence[Setting], questions: Mapping[str, str]
) -> dict[str, VideoRun]:
    """Answer every window of a video under each setting; returns setting key -> run.

    Only windows of full length are recorded: shorter ones at the start say little about full computation. The engine
    still computes them, so that the first full-length window finds live state; settings that reuse nothing skip them.
    ``settings`` must share sampling rate, anchor interval and source. ``questions``: kind of event -> text. Raises
    ``SourceError``: the video cannot be read to its end.
    """
    inputs = {setting.input for setting in settings}
    if len(inputs) != 1:
        raise ValueError(f"settings of one pass must share rate, anchor interval and source, not {sorted(inputs)}")
    ((fps, interval, source),) = inputs
    asked = tuple(Question(kind, questions[kind]) for kind in video.kinds)
    processor = CodecProcessor(engine.geometry, CodecOptions(fps=fps, anchor_interval_s=interval))
    tower = TowerCache(engine.model)
    branches = _pruner_streams(engine, tower, settings, asked, fps)
    # Per sample: mean motion in native pixels, mean luma change in grey levels.
    moved: list[float] = []
    changed: list[float] = []
    try:
        with tower.used(), _source(video.path, source, fps, interval) as path:
            for frame in video_samples(path, processor):
                if not frame.random_access:
                    moved.append(float(frame.change.net_motion.mean()))
                    changed.append(float(frame.change.luma.mean()))
                for branch in branches:
                    branch.push(branch.sampler.feed(frame))
            for branch in branches:
                branch.push(branch.sampler.flush())
                for stream in branch.streams:
                    stream.finish()
    finally:
        for branch in branches:
            for stream in branch.streams:
                engine.evict(stream.spec.stream)
    heights = fps / processor.stats.height if processor.stats.height else 0.0
    samples = max(1, len(moved))
    speed = None if processor.stats.cue == "luma" else sum(moved) / samples * heights
    return {
        stream.setting.key: VideoRun(video.kinds, tuple(stream.windows), speed, sum(changed) / samples)
        for branch in branches
        for stream in branch.streams
    }


@contextmanager
def _source(path: Path, source: str, fps: float, interval: float) -> Iterator[Path]:
    """The video itself, or a temporary copy re-encoded as in CodecSight's paper (section 6.1): sampled at ``fps``, as
    H.264 with a GOP of ``interval`` seconds and no B-frames. Raises ``SourceError``: the video cannot be read."""
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
                # 4:2:0 needs even sizes; frames of odd size are scaled by one pixel.
                width, height = picture.width // 2 * 2, picture.height // 2 * 2
                encoding = VideoEncoding("libx264", options, width, height, fps, gop, 0)
                write_video(copy, encoding, _resample(video.decode(picture), fps))
        except av.FFmpegError as error:
            raise SourceError(f"{path} cannot be re-encoded: {error}", retryable=False) from None
        yield copy


def _resample(pictures: Iterable[VideoFrame], fps: float) -> Iterator[VideoFrame]:
    """Resample to ``fps``, counted from the first picture: each instant yields the first picture at or after it."""
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
class _PrunerStreams:
    """One pruning policy and the settings that share its samples."""

    sampler: PatchSampler
    streams: list[_SettingStream] = field(default_factory=list)

    def push(self, sample: FrameSample | None) -> None:
        if sample is not None:
            for stream in self.streams:
                stream.push(sample)


class _SettingStream:
    """One setting on one engine stream."""

    def __init__(self, engine: NativeEngine, tower: TowerCache, setting: Setting, spec: StreamSpec) -> None:
        self.engine = engine
        self.tower = tower
        self.setting = setting
        self.spec = spec
        self.windows: list[WindowResult] = []
        self._reuse = None if setting.similarity is None else SimilarityReuse(engine.model, setting.similarity)
        # First timestamp of the video, and of the stream since its last restart, in microseconds.
        self._begin: int | None = None
        self._origin = 0
        # Frames that future windows may include.
        self._frames: list[FrameSample] = []

    def push(self, sample: FrameSample) -> None:
        """Push a frame and answer the windows that it completes."""
        if self._begin is None:
            self._begin = sample.pts
        if sample.fresh:
            self._origin = sample.pts
            self._frames.clear()
        if self.setting.tower == "every window":
            self._frames.append(sample)
        self._answer_windows(self.engine.push(replace(sample, stream=self.spec.stream)))

    def finish(self) -> None:
        """Flush the stream and answer its last, shortened window, as the live system does at the end of a video."""
        if self._begin is not None:
            self._answer_windows(self.engine.flush(self.spec.stream))

    def _answer_windows(self, requests: Sequence[WindowRequest]) -> None:
        length = round(self.spec.window_s * MICROSECONDS)
        for request in requests:
            whole = request.end - self._origin >= length
            if whole or self.setting.tower == "once" or self.setting.refresh != "all":
                result = self._step(request, timed=whole and not self.windows)
                if whole and result is not None:
                    self.windows.append(result)

    def _step(self, request: WindowRequest, *, timed: bool) -> WindowResult | None:
        self.tower.saved_s = 0.0
        began = time.perf_counter()
        with self._reuse(self.tower) if self._reuse else nullcontext(), self._layer_profile():
            answers = self.engine.step([request])
        latency_s = time.perf_counter() - began
        if not answers or self._begin is None:
            return None
        (stats,) = self.engine.stats.windows
        tokens, tower_flops = stats.tokens, stats.tower_flops
        if self.setting.tower == "every window":
            tower_flops, tower_s = self._tower_cost(request, timed=timed)
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

    def _layer_profile(self) -> AbstractContextManager[object]:
        """Context in which the model uses the setting's layer profile, if it has one."""
        if self.setting.profile is None:
            return nullcontext()
        model = self.engine.model
        return mock.patch.object(model, "settings", replace(model.settings, layer_profile=self.setting.profile))

    def _tower_cost(self, request: WindowRequest, *, timed: bool) -> tuple[int, float]:
        """FLOPs and seconds of encoding every frame of the window; seconds are ``nan`` unless ``timed``.

        The tower's output would equal the engine's cached embeddings, so those are used; the tower only runs again to
        be timed, in one window per video.
        """
        # Later windows never open earlier.
        self._frames = self._frames[opening_index(self._frames, request.start) :]
        batches = patch_batches([StreamFrame.of(each) for each in self._frames if window_time(each) < request.end])
        seconds = math.nan
        if timed:
            began = time.perf_counter()
            self.tower.tower(batches)
            seconds = time.perf_counter() - began
        return self.engine.model.tower_flops([batch for batch in batches if len(batch.cells)]), seconds


# -- the vision tower: outputs shared between settings, or reused for similar patches ---------------
class TowerCache:
    """Encodes identical frames only once, in the context :meth:`used`.

    The engine still counts the tower's FLOPs. ``saved_s``: original encoding time of the cache hits since it was last
    reset to 0, in seconds; latencies add it.
    """

    def __init__(self, model: VisionLanguageModel) -> None:
        self._model = model
        self._known: dict[bytes, tuple[FrameTokens, float]] = {}
        self.saved_s = 0.0
        # The uncached tower, for timing.
        self.tower = model.encode

    def used(self) -> AbstractContextManager[object]:
        """Context in which the model encodes through the cache."""
        return mock.patch.object(self._model, "encode", self._encode)

    def _encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        keys = [_digest(frame) for frame in frames]
        for key in keys:
            if key in self._known:
                self.saved_s += self._known[key][1]
        fresh = {key: frame for key, frame in zip(keys, frames, strict=True) if key not in self._known}
        began = time.perf_counter()
        encoded = self.tower(list(fresh.values()))
        seconds = (time.perf_counter() - began) / max(1, sum(len(frame.patches) for frame in fresh.values()))
        for (key, frame), tokens in zip(fresh.items(), encoded, strict=True):
            self._known[key] = tokens, seconds * len(frame.patches)
        return [self._known[key][0] for key in keys]


def _digest(frame: PatchBatch) -> bytes:
    hasher = hashlib.blake2b(f"{frame.grid} {frame.time_s}".encode(), digest_size=16)
    for part in (frame.cells, frame.patches):
        hasher.update(part.contiguous().numpy().data)
    return hasher.digest()


class SimilarityReuse:
    """Similarity reuse in the vision tower, after Déjà Vu (Hwang et al. 2025) without its training.

    A patch group keeps its previous token if its cosine similarity (of normalised pixels) to the group last encoded at
    its position is at least ``similarity``; the others are encoded together. Holds the state of one stream, whose
    frames arrive unpruned and in order. ``flops``: tower FLOPs since it was last reset to 0. Encoding raises
    ``ConfigError`` for model families that write text around frames.
    """

    def __init__(self, model: VisionLanguageModel, similarity: float) -> None:
        self._model = model
        self._similarity = similarity
        self._patches: Tensor | None = None
        self._tokens = torch.empty(0)
        self.flops = 0

    def __call__(self, tower: TowerCache) -> AbstractContextManager[object]:
        """Context in which the model reuses similar tokens; ``tower`` encodes the others."""
        return mock.patch.object(self._model, "encode", lambda frames: [self._frame(tower, frame) for frame in frames])

    def _frame(self, tower: TowerCache, frame: PatchBatch) -> FrameTokens:
        if self._model.frame_text_tokens(frame.grid):
            raise ConfigError(f"similarity reuse cannot serve {self._model.family}, which writes text around frames")
        groups = frame.patches.reshape(len(frame.cells), frame.grid.merge**2, *frame.patches.shape[1:])
        if self._patches is None or self._patches.shape != groups.shape:
            fresh = torch.ones(len(groups), dtype=torch.bool)
            self._patches, self._tokens = groups.clone(), torch.empty(0)
        else:
            fresh = self._compare(groups, self._patches) < self._similarity
            self._patches[fresh] = groups[fresh]
        if fresh.any():
            part = PatchBatch(groups[fresh].flatten(0, 1), frame.cells[fresh], frame.grid, frame.time_s)
            (encoded,) = tower.tower([part])
            self.flops += self._model.tower_flops([part])
            tokens = self._tokens.clone() if len(self._tokens) else encoded.embeds.new_empty(encoded.embeds.shape)
            tokens[fresh] = encoded.embeds
            self._tokens = tokens
        return FrameTokens(self._tokens, frame.cells, frame.grid)

    def _compare(self, a: Tensor, b: Tensor) -> Tensor:
        """Cosine similarity ``[g]`` of pixel groups ``[g, merge**2, T, C, p, p]``, normalised as for the tower."""
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self._model.mean, self._model.std))
        now, before = (((each / 255 - mean) / std).flatten(1) for each in (a, b))
        return torch.nn.functional.cosine_similarity(now, before)
