"""Training examples from encoded clips, through the production source, codec processor and pruners.

Decoding a clip costs more than a training step, so a few prunings of each clip are cached on disk; segments and
questions are drawn anew for every example.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.errors import ConfigError
from cluster.files import replacing
from cluster.lab.evaluation.work import code_digest, digest
from cluster.lab.report.compare import video_samples
from cluster.lab.scenes.actors import Scene
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.training.config import SHAPES, Shape
from cluster.lab.training.examples import Example, growing_window_example, limit_tokens, sliding_window_example
from cluster.lab.training.pruning import LabelledInstant, PrunedFrame, TokenLabels, make_pruned_frame, picture_grid
from cluster.types import MICROSECONDS, PatchGeometry
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

# Cached prunings per clip.
VARIANTS = 4
_TRAIN = "train"


@dataclass(frozen=True, slots=True)
class EncodedExamples:
    """Maps an example number to a segment of one of the clips in ``folder``; pruned frames are cached in ``cache``."""

    folder: str
    cache: str
    shape: str
    seed: int

    def __call__(self, number: int) -> Example:
        rng = np.random.default_rng([self.seed, 3, number])
        clips = _clips(self.folder)
        clip = clips[number % len(clips)]
        truth = SceneTruth.load(truth_path(clip))
        scene = regenerate_scene(truth)
        frames = self._frames(clip, scene, int(rng.integers(VARIANTS)))
        if all(frame.complete for frame in frames) or rng.random() < 0.35:
            return growing_window_example(scene, _segment(frames, rng), rng)
        return sliding_window_example(scene, limit_tokens(frames), rng)

    def _frames(self, clip: Path, scene: Scene, variant: int) -> list[PrunedFrame]:
        """The clip under its ``variant``-th pruning; the cache key includes the code's digest."""
        made = digest(str(clip.stat().st_size), self.shape, code_digest())
        path = Path(self.cache) / f"{clip.stem}-{variant}-{made}.pt"
        if not path.is_file():
            # Independent of the run's seed: concurrent runs share the cache.
            rng = np.random.default_rng([4, scene.index, variant])
            write_frames(path, prune_clip(clip, scene, SHAPES[self.shape], sample_live_pruning(variant, rng), rng))
        return read_frames(path)


@dataclass(frozen=True, slots=True)
class LivePruning:
    """A pruner with options, the codec processor's anchor interval, and the share of tokens also dropped at random."""

    pruner: str
    options: dict[str, float]
    anchor_interval_s: float
    loss: float


def sample_live_pruning(variant: int, rng: np.random.Generator) -> LivePruning:
    """Variant 0 prunes nothing, variant 1 is CodecSight's rule; the others vary the default pruner's parameters."""
    interval = float(rng.choice([8.0, 4.0, 16.0], p=[0.7, 0.12, 0.18]))
    loss = float(rng.uniform(0.05, 0.3)) if rng.random() < 0.3 else 0.0
    if variant == 0:
        return LivePruning("none", {}, interval, 0.0)
    if variant == 1:
        return LivePruning("codecsight", {"tau": float(rng.choice([0.25, 0.5, 1.0]))}, interval, loss)
    margin = float(np.exp(rng.normal(np.log(4.5), 0.3)))
    return LivePruning("replenish", {"margin": margin, "lowest": margin + 0.5}, interval, loss)


def list_training_clips(folder: Path) -> list[Path]:
    """Clips with ground truth, sorted by name. Raises ``ConfigError``: there are none, or the ground truth of one (not
    its file name) says that it belongs to a split reserved for evaluation."""
    clips = sorted(path for path in folder.glob("*.mp4") if truth_path(path).is_file())
    if not clips:
        raise ConfigError(f"{folder} has no encoded scenes; make some with `sightline scenes make --split {_TRAIN}`")
    for clip in clips:
        split = SceneTruth.load(truth_path(clip)).split
        if split != _TRAIN:
            raise ConfigError(f"{clip} belongs to the {split} split; only the {_TRAIN} split may be trained on")
    return clips


_clips = functools.cache(lambda folder: list_training_clips(Path(folder)))


def regenerate_scene(truth: SceneTruth) -> Scene:
    """Rebuild the scene of a ground truth. Raises ``ConfigError``: this generator version makes a different scene."""
    split: Any = truth.split
    scene = make_scene(split, truth.index, seconds=truth.seconds, event=truth.event)
    if scene.seed != truth.seed or scene.events != truth.scene_events:
        raise ConfigError(f"{truth.name} was made by another version of the scene generator; regenerate the scenes")
    return scene


def prune_clip(
    clip: Path, scene: Scene, shape: Shape, pruning: LivePruning, rng: np.random.Generator
) -> list[PrunedFrame]:
    """Run a clip through the live front end and label its frames. Raises ``SourceError``: the clip cannot be read;
    ``ConfigError``: its patch grid differs from the model's."""
    geometry = PatchGeometry(patch=14, merge=2, temporal=2, max_pixels=shape.max_pixels)
    processor = CodecProcessor(geometry, CodecOptions(fps=shape.fps, anchor_interval_s=pruning.anchor_interval_s))
    sampler = PatchSampler("training", make_pruner(pruning.pruner, pruning.options), shape.fps)
    renderer = SceneRenderer(scene, shape.width, shape.height)
    grid = picture_grid(shape)
    pair: list[LabelledInstant] = []
    frames: list[PrunedFrame] = []
    for sample in video_samples(clip, processor):
        if sample.grid != grid:
            raise ConfigError(f"{clip} does not have the aspect ratio that the model is trained on (16:9)")
        if sample.random_access:
            pair.clear()
        second = sample.pts / MICROSECONDS
        pair.append((second, renderer.objects(second)))
        cut = sampler.feed(sample)
        if cut is not None:
            frames.append(make_pruned_frame(cut, pair, scene.events, 0.0 if cut.anchor else pruning.loss, rng))
            pair.clear()
    return frames


def write_frames(path: Path, frames: Sequence[PrunedFrame]) -> None:
    """Write frames to one file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = ((each.cells, each.patches, each.labels.hot, each.labels.velocity, each.labels.covered) for each in frames)
    tensors = [tuple(map(torch.from_numpy, each)) for each in arrays]
    with replacing(path) as part:
        torch.save([(each.time_s, each.complete, *rest) for each, rest in zip(frames, tensors, strict=True)], part)


def read_frames(path: Path) -> list[PrunedFrame]:
    """Inverse of :func:`write_frames`."""
    return [
        PrunedFrame(time_s, complete, cells.numpy(), patches.numpy(), TokenLabels(*(each.numpy() for each in labels)))
        for time_s, complete, cells, patches, *labels in torch.load(path, weights_only=True)
    ]


def _segment(frames: Sequence[PrunedFrame], rng: np.random.Generator) -> list[PrunedFrame]:
    """A segment of 12 to 28 frames from a random complete frame on, fewer if they exceed the token limit."""
    complete = [index for index, frame in enumerate(frames[: max(1, len(frames) - 8)]) if frame.complete]
    first = complete[int(rng.integers(len(complete)))]
    return limit_tokens(list(frames[first : first + int(rng.integers(12, 29))]))
