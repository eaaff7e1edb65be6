"""Pruning of training sequences: the production pruners with random parameters, and random token loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
from PIL import Image, ImageFilter

from cluster.lab.scenes import Scene, SceneEvent, SceneObject, SceneRenderer
from cluster.lab.training.config import Shape
from cluster.lab.training.labels import LabelledInstant, TokenLabels, token_labels
from cluster.types import BoolGrid, ChangeGrid, FloatGrid, FrameSample, PatchGrid, SampledPicture, UInt8Array
from cluster.vision.pruners.base import Pruner, any_in_group, cell_means
from cluster.vision.pruners.baselines import CodecSight, KeepAll
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import PatchSampler

_PATCH, _MERGE, _TEMPORAL = 14, 2, 2


def picture_grid(shape: Shape) -> PatchGrid:
    """The patch grid of a shape's pictures."""
    return PatchGrid(shape.height // _PATCH, shape.width // _PATCH, _PATCH, _MERGE, _TEMPORAL)


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """One sampled picture ``[height, width, 3]`` uint8, its time, and its visible objects."""

    second: float
    rgb: UInt8Array
    objects: tuple[SceneObject, ...]


@dataclass(frozen=True, slots=True)
class ImageDegradation:
    """Random effect of a camera and encoder on pictures, one per scene.

    * ``gain``, ``gamma``: exposure; ``blur``: radius in pixels, 0 for none
    * ``quality``: JPEG quality, in place of the codec's loss; None for none
    """

    gain: float = 1.0
    gamma: float = 1.0
    blur: float = 0.0
    quality: int | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """Half of the scenes are compressed, a third is blurred; exposure varies by a fifth."""
        return cls(
            gain=float(rng.uniform(0.85, 1.15)),
            gamma=float(rng.uniform(0.85, 1.2)),
            blur=float(rng.uniform(0.3, 0.9)) if rng.random() < 0.35 else 0.0,
            quality=int(rng.integers(30, 95)) if rng.random() < 0.5 else None,
        )

    def apply(self, rgb: UInt8Array) -> UInt8Array:
        """``[height, width, 3]`` uint8 -> the same, degraded."""
        if self.gain != 1.0 or self.gamma != 1.0:
            levels = np.arange(256, dtype=np.float64) / 255
            rgb = np.clip(255 * self.gain * levels**self.gamma, 0, 255).astype(np.uint8)[rgb]
        if not self.blur and self.quality is None:
            return rgb
        picture = Image.fromarray(rgb)
        if self.blur:
            picture = picture.filter(ImageFilter.GaussianBlur(self.blur))
        if self.quality is not None:
            stream = BytesIO()
            picture.save(stream, "JPEG", quality=self.quality)
            picture = Image.open(stream)
        return np.asarray(picture.convert("RGB"))


def sample_times(seconds: float, fps: float, rng: np.random.Generator) -> list[float]:
    """Sample times of a whole scene: regular from a random phase, rounded to a camera's frame clock.

    A camera of 12.5 fps, for example, has no frame at exactly every half second.
    """
    phase = float(rng.uniform(0, 1 / fps))
    clock = float(rng.choice([10.0, 12.0, 12.5, 15.0, 20.0, 24.0, 25.0]))
    count = int((seconds - phase) * fps)
    return [round((phase + k / fps) * clock) / clock for k in range(count - count % _TEMPORAL)]


def render_samples(
    scene: Scene, shape: Shape, times: list[float], degradation: ImageDegradation
) -> list[RenderedSample]:
    """Render a scene at these seconds, degraded."""
    renderer = SceneRenderer(scene, shape.width, shape.height)
    fps = scene.camera.fps
    return [
        RenderedSample(
            second, degradation.apply(renderer.picture(second, round(second * fps))), tuple(renderer.objects(second))
        )
        for second in times
    ]


def make_sampled_picture(
    index: int, sample: RenderedSample, before: UInt8Array | None, grid: PatchGrid, *, anchor: bool, fresh: bool
) -> tuple[SampledPicture, UInt8Array]:
    """Output of a codec processor without motion vectors, and the luma for the next call.

    ``before``: luma of the previous sample, None for the first.
    """
    luma = to_luma(sample.rgb)
    still: FloatGrid = np.zeros((grid.rows, grid.cols), np.float32)
    change = still
    if before is not None:
        change = cell_means(np.maximum(luma, before) - np.minimum(luma, before), grid)
    cue = ChangeGrid(max_motion=still, net_motion=still, intra=still, luma=change, cue="luma", frames=1)
    frame = SampledPicture(index, round(sample.second * 1_000_000), anchor, fresh, grid, sample.rgb, luma, cue)
    return frame, luma


def to_luma(rgb: UInt8Array) -> UInt8Array:
    """BT.601 luma ``[height, width]`` uint8."""
    wide = rgb.astype(np.uint16)
    luma: UInt8Array = ((77 * wide[..., 0] + 150 * wide[..., 1] + 29 * wide[..., 2]) >> 8).astype(np.uint8)
    return luma


@dataclass(frozen=True, slots=True, eq=False)
class PrunedFrame:
    """Kept tokens of one frame.

    * ``cells`` ``[t, 2]`` int64, ``patches`` ``[t * merge**2, T, 3, p, p]`` uint8 as in ``FrameSample``
    * ``complete``: nothing pruned, so a window may open here
    """

    time_s: float
    complete: bool
    cells: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    patches: UInt8Array
    labels: TokenLabels


@dataclass(frozen=True, slots=True)
class Pruning:
    """Pruning of one sequence.

    * ``pruner``: none, replenish or codecsight; ``margin``: grey levels a cell must change by
    * ``anchor``: frames between complete ones, ``phase``: index of the first after frame 0
    * ``loss``: share of a pruned frame's remaining tokens dropped at random
    """

    pruner: str = "none"
    margin: float = 4.5
    anchor: int = 8
    phase: int = 0
    loss: float = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """Mostly the default policy around its default parameters, with anchors every 8 frames or more often."""
        pruner = "replenish" if rng.random() < 0.75 else "codecsight"
        anchor = int(rng.choice([8, 4, 2, 16], p=[0.45, 0.25, 0.15, 0.15]))
        return cls(
            pruner=pruner,
            margin=float(np.exp(rng.normal(np.log(5.0), 0.35))),
            anchor=anchor,
            phase=int(rng.integers(anchor)),
            loss=float(rng.uniform(0.05, 0.35)) if rng.random() < 0.35 else 0.0,
        )

    def make(self) -> Pruner:
        if self.pruner == "none":
            return KeepAll()
        if self.pruner == "codecsight":
            return CodecSight(luma_threshold=self.margin + 1.0)
        return Replenish(margin=self.margin)

    def anchored(self, frame: int) -> bool:
        """Whether the ``frame``-th is a scheduled anchor."""
        return frame == 0 or frame % self.anchor == self.phase


def prune_samples(
    samples: Sequence[RenderedSample],
    events: Sequence[SceneEvent],
    grid: PatchGrid,
    pruning: Pruning,
    rng: np.random.Generator,
) -> list[PrunedFrame]:
    """Run samples through the production sampler; the first frame is fresh and complete."""
    sampler = PatchSampler("training", pruning.make(), fps=2.0)
    frames: list[PrunedFrame] = []
    luma: UInt8Array | None = None
    for index, sample in enumerate(samples):
        frame, second = divmod(index, grid.temporal)
        anchor = second == 0 and pruning.anchored(frame)
        sampled, luma = make_sampled_picture(index, sample, luma, grid, anchor=anchor, fresh=index == 0)
        cut = sampler.feed(sampled)
        if cut is not None:
            pair = [(s.second, s.objects) for s in samples[index + 1 - grid.temporal : index + 1]]
            frames.append(make_pruned_frame(cut, pair, events, 0.0 if cut.anchor else pruning.loss, rng))
    return frames


def make_pruned_frame(
    cut: FrameSample,
    pair: Sequence[LabelledInstant],
    events: Sequence[SceneEvent],
    loss: float,
    rng: np.random.Generator,
) -> PrunedFrame:
    """A sampler's frame with labels, less the share ``loss`` of its tokens.

    ``pair``: time and objects of each of its samples.
    """
    grid = cut.grid
    groups: BoolGrid = any_in_group(cut.mask, grid.merge)
    patches = cut.patches
    if loss:
        stays = rng.random(int(groups.sum())) >= loss
        groups = groups.copy()
        groups[groups] = stays
        patches = patches[np.repeat(stays, grid.merge**2)]
    labels = token_labels(pair, events, grid)
    return PrunedFrame(
        time_s=pair[0][0],
        complete=len(patches) == grid.tokens * grid.merge**2,
        cells=np.argwhere(groups),
        patches=patches,
        labels=labels.take(groups.ravel()),
    )
