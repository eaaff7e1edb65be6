"""The demo's second part: the same clips, in full and ours, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.cli.demo.plan import SCENE_SECONDS
from actors.cli.demo.truth import LoopedTruth
from cluster.codec.processor import CodecOptions
from cluster.config import CameraConfig, SightlineConfig, camera_settings
from cluster.engine.native.engine import NativeEngine
from cluster.lab.report.measure import compare, count_windows, picture_frames, prune, sample_clip
from cluster.lab.report.model import ComparedWindow, SampleFrame
from cluster.models import load_model
from cluster.types import MICROSECONDS, FrameSample, SampledFrame
from cluster.vision import make_pruner

PICTURES = 5


@dataclass(frozen=True, slots=True)
class MeasuredClip:
    """One clip both ways, and what its frames look like."""

    codec: str
    width: int
    height: int
    cue: str
    compared: tuple[ComparedWindow, ...]
    frames: tuple[SampleFrame, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """All clips; ``parameters`` of the model."""

    random_weights: bool
    parameters: int
    clips: dict[str, MeasuredClip]


def seconds_to_measure(camera: CameraConfig) -> float:
    """Video per clip: until the window is whole, and then one round of the scene."""
    return camera.window.length_s + SCENE_SECONDS


def windows_to_measure(config: SightlineConfig, clips: dict[str, Path]) -> int:
    """Windows of all clips."""
    cameras = [camera_settings(config, name) for name in clips]
    return sum(count_windows(camera.stream_spec(), seconds_to_measure(camera)) for camera in cameras)


def measure(
    config: SightlineConfig, clips: dict[str, Path], truths: Mapping[str, LoopedTruth], on_window: Callable[[], None]
) -> Measured:
    """Every clip under the settings of the camera of its name; full and ours take turns, window by window."""
    settings = config.model
    # A core stays free for whatever else runs here: arithmetic threads that wait for each other suffer most from it.
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))
    model = load_model(settings.name, device=settings.device, dtype=settings.dtype, seed=settings.seed)
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
        clip = sample_clip(path, engine.geometry, options, seconds_to_measure(camera))
        ours = prune(clip, name, make_pruner(camera.pruning.policy, camera.pruning.options))
        whole = prune(clip, name, make_pruner("none"))
        compared = compare(
            engine, camera.stream_spec(), [sample for sample, _ in ours], [sample for sample, _ in whole], on_window
        )
        kinds = [question.id for question in camera.questions]
        told = [replace(each, truth=truths[name].labels(kinds, each.start_s, each.end_s)) for each in compared]
        found[name] = MeasuredClip(
            clip.codec, clip.width, clip.height, clip.cue, tuple(told), picture_frames(_once(ours), PICTURES)
        )
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    return Measured(model.random_weights, parameters, found)


def _once(frames: Sequence[tuple[FrameSample, SampledFrame]]) -> list[tuple[FrameSample, SampledFrame]]:
    """The frames before the scene starts again."""
    end = frames[0][0].pts + round(SCENE_SECONDS * MICROSECONDS)
    return [pair for pair in frames if pair[0].pts < end]
