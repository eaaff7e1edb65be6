"""Builds the demo's report from its live run and measurements."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.cli.demo.live import LiveRun
from actors.cli.demo.plan import CAMERAS, SCENE_SECONDS
from cluster.codec.processor import CodecOptions
from cluster.codec.stream_state import CodecStats
from cluster.config import CameraConfig, SightlineConfig, camera_settings
from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.frames import PrunedClip, prune_clip, read_clip
from cluster.lab.bench.harness import machine
from cluster.lab.report.compare import compare, count_windows, picture_frames
from cluster.lab.report.records import CameraRecord, ComparedWindow, EventInterval, LiveWindow, Report, SampleFrame
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import SceneEvent, window_label
from cluster.models.loading import load_model
from cluster.types import MICROSECONDS, Answer, CameraStatus, FrameSample, LastAnswer, Question, SampledPicture

PICTURES = 5


@dataclass(frozen=True, slots=True)
class MeasuredClip:
    """Full and incremental measurements of one clip, with sample pictures."""

    stats: CodecStats
    compared: tuple[ComparedWindow, ...]
    frames: tuple[SampleFrame, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of all clips; ``parameters``: the model's parameter count."""

    random_weights: bool
    parameters: int
    clips: dict[str, MeasuredClip]


def seconds_to_measure(camera: CameraConfig) -> float:
    """Seconds of video measured per clip: a full window, then one round of the scene."""
    return camera.window.length_s + SCENE_SECONDS


def windows_to_measure(config: SightlineConfig, clips: dict[str, Path]) -> int:
    """Number of windows measured, over all clips."""
    cameras = [camera_settings(config, name) for name in clips]
    return sum(count_windows(camera.stream_spec(), seconds_to_measure(camera)) for camera in cameras)


def measure(
    config: SightlineConfig, clips: dict[str, Path], truths: Mapping[str, LoopedTruth], on_window: Callable[[], None]
) -> Measured:
    """Measure every clip with its camera's settings; full and incremental computation alternate, window by window."""
    settings = config.model
    # Leave one core free: parallel kernels wait for their slowest thread, so other work on its core delays them all.
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))
    model = load_model(
        settings.name,
        device=settings.device,
        dtype=settings.dtype,
        seed=settings.seed,
        max_pixels=settings.max_pixels,
    )
    engine = NativeEngine(
        model,
        score_temperature=settings.score_temperature,
        score_bias=settings.score_bias,
        max_new_tokens=settings.max_new_tokens,
    )
    found: dict[str, MeasuredClip] = {}
    for name, path in clips.items():
        camera = camera_settings(config, name)
        options = CodecOptions(fps=camera.sampling.fps, anchor_interval_s=camera.sampling.anchor_interval_s)
        seconds = seconds_to_measure(camera)
        clip = read_clip(path, engine.geometry, options=options, at_least=seconds, at_most=seconds)
        ours = prune_clip(clip, name, camera.pruning.policy, camera.pruning.options)
        whole = prune_clip(clip, name, "none").samples
        compared = compare(engine, camera.stream_spec(), ours.samples, whole, on_window)
        kinds = [question.id for question in camera.questions]
        told = [replace(each, truth=truths[name].labels(kinds, each.start_s, each.end_s)) for each in compared]
        found[name] = MeasuredClip(clip.stats, tuple(told), picture_frames(_first_round(ours), PICTURES))
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    return Measured(model.random_weights, parameters, found)


def _first_round(clip: PrunedClip) -> list[tuple[FrameSample, SampledPicture]]:
    """Frames before the scene repeats, each with its picture."""
    end = clip.samples[0].pts + round(SCENE_SECONDS * MICROSECONDS)
    return [pair for pair in zip(clip.samples, clip.pictures, strict=True) if pair[0].pts < end]


@dataclass(frozen=True, slots=True)
class LoopedTruth:
    """Events of a looped scene of ``round_s`` seconds. Times are seconds since its first start.

    ``window_s``: length of the windows asked about.
    """

    events: tuple[SceneEvent, ...]
    round_s: float
    window_s: float

    @classmethod
    def of_clip(cls, clip: Path, window_s: float) -> LoopedTruth:
        """Read the ground truth beside an encoded scene. Raises ``ConfigError``: there is none."""
        truth = SceneTruth.load(truth_path(clip))
        return cls(truth.scene_events, truth.seconds, window_s)

    def label(self, kind: str, start_s: float, end_s: float) -> bool | None:
        """Whether a window shows an event of ``kind``; ``None`` if too little of it is in the window to tell.

        A window across the seam covers the end of one round and the beginning of the next.
        """
        return window_label(self.between(start_s, end_s), kind, start_s, end_s)

    def labels(self, kinds: Iterable[str], start_s: float, end_s: float) -> dict[str, bool | None]:
        return {kind: self.label(kind, start_s, end_s) for kind in kinds}

    def of_answer(self, answer: LastAnswer) -> bool | None:
        """Ground truth of an answer, whose question is named after the event's kind."""
        end_s = answer.end / MICROSECONDS
        return self.label(answer.question, max(0.0, end_s - self.window_s), end_s)

    def between(self, start_s: float, end_s: float) -> list[SceneEvent]:
        """Every event of every round that overlaps ``[start_s, end_s)``, in order."""
        found = []
        for number in range(max(0, math.floor(start_s / self.round_s)), math.floor(end_s / self.round_s) + 1):
            shift = number * self.round_s
            for event in self.events:
                if event.start_s + shift < end_s and event.end_s + shift > start_s:
                    found.append(replace(event, start_s=event.start_s + shift, end_s=event.end_s + shift))
        return found

    def intervals(self, kinds: Iterable[str], start_s: float, end_s: float) -> tuple[EventInterval, ...]:
        """The same events of these kinds as report intervals, cut to ``[start_s, end_s]``."""
        asked = set(kinds)
        return tuple(
            EventInterval(event.kind, max(start_s, event.start_s), min(end_s, event.end_s))
            for event in self.between(start_s, end_s)
            if event.kind in asked
        )


def make_report(
    config: SightlineConfig, run: LiveRun, measured: Measured, truths: Mapping[str, LoopedTruth], command: str
) -> Report:
    """Build the report."""
    cameras = []
    for camera in CAMERAS:
        settings = camera_settings(config, camera.name)
        status = run.statuses.get(camera.name, CameraStatus(camera.name))
        clip = measured.clips[camera.name]
        push = run.pushes.get(camera.name)
        truth = truths[camera.name]
        questions = tuple(question.question() for question in settings.questions)
        live = live_windows(run.answers.get(camera.name, []), truth)
        cameras.append(
            CameraRecord(
                name=camera.name,
                description=camera.about,
                fed_by=camera.fed_by,
                codec=clip.stats.codec,
                width=clip.stats.width,
                height=clip.stats.height,
                cue=status.cue or clip.stats.cue,
                state=status.state,
                reason=status.reason,
                questions=questions,
                live=live,
                compared=clip.compared,
                frames=clip.frames,
                windows_dropped=status.windows_dropped,
                windows_lost=status.windows_lost,
                packets_dropped=push.dropped + push.cluster_dropped if push else 0,
                decode_errors=status.decode_errors,
                gaps=status.gaps,
                live_events=_events(truth, live, questions),
                compared_events=_events(truth, clip.compared, questions),
            )
        )
    window, sampling = config.window, config.sampling
    return Report(
        created=time.strftime("%Y-%m-%d %H:%M"),
        command=command,
        model=config.model.name,
        random_weights=measured.random_weights,
        live_seconds=run.seconds,
        settings={
            "parameters": f"{measured.parameters / 1e6:.1f} million",
            "window": f"{window.length_s:g} s every {window.stride_s:g} s",
            "sampling": f"{sampling.fps:g} frames per second, an anchor every {sampling.anchor_interval_s:g} s",
            "pruning": config.pruning.policy,
            "refresh": window.refresh,
            "processes": f"gateway, controller, {config.cluster.decoders} decoders, {config.cluster.replicas} replica",
        },
        machine=machine(),
        cameras=tuple(cameras),
    )


def live_windows(answers: Sequence[Answer], truth: LoopedTruth) -> tuple[LiveWindow, ...]:
    """Answers of one camera, grouped by window. Their times and the clip's both begin at 0."""
    found: dict[int, LiveWindow] = {}
    for answer in answers:
        known = found.get(answer.window)
        start_s, end_s = answer.start / MICROSECONDS, answer.end / MICROSECONDS
        found[answer.window] = LiveWindow(
            start_s=start_s,
            end_s=end_s,
            scores={**(known.scores if known else {}), answer.question: answer.score},
            gated=answer.gated,
            full=answer.tokens.full,
            kept=answer.tokens.kept,
            computed=0 if answer.gated else answer.tokens.computed,
            latency_s=answer.timing.latency_s,
            truth={**(known.truth if known else {}), answer.question: truth.label(answer.question, start_s, end_s)},
        )
    return tuple(found[window] for window in sorted(found))


def _events(
    truth: LoopedTruth, windows: Sequence[LiveWindow] | Sequence[ComparedWindow], questions: Sequence[Question]
) -> tuple[EventInterval, ...]:
    """Events of the requested kinds during these windows."""
    if not windows:
        return ()
    return truth.intervals([question.id for question in questions], windows[0].start_s, windows[-1].end_s)
