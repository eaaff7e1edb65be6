"""A scene as a camera's sampled pictures, without a codec: thirty times cheaper, and near enough for bulk training."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageFilter

from cluster.lab.scenes import Scene, SceneObject, SceneRenderer
from cluster.lab.training.config import Shape
from cluster.types import ChangeGrid, FloatGrid, PatchGrid, SampledPicture, UInt8Array
from cluster.vision.pruners.cells import cell_means

_TEMPORAL = 2


def picture_grid(shape: Shape, patch: int = 14, merge: int = 2) -> PatchGrid:
    """The patch grid of a shape's pictures."""
    return PatchGrid(shape.height // patch, shape.width // patch, patch, merge, _TEMPORAL)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled picture ``[height, width, 3]`` uint8, when it was taken, and what is to be seen on it."""

    second: float
    rgb: UInt8Array
    objects: tuple[SceneObject, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """What a camera and its encoder do to pictures, drawn once per scene.

    * ``gain``, ``gamma``: exposure; ``blur``: radius in pixels, 0 for none
    * ``quality``: of JPEG, which stands in for the codec's loss; None for none
    """

    gain: float = 1.0
    gamma: float = 1.0
    blur: float = 0.0
    quality: int | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Damage:
        """Half of the scenes are compressed, a third is blurred; exposure varies by a fifth."""
        return cls(
            gain=float(rng.uniform(0.85, 1.15)),
            gamma=float(rng.uniform(0.85, 1.2)),
            blur=float(rng.uniform(0.3, 0.9)) if rng.random() < 0.35 else 0.0,
            quality=int(rng.integers(30, 95)) if rng.random() < 0.5 else None,
        )

    def apply(self, rgb: UInt8Array) -> UInt8Array:
        """The picture as it would arrive, ``[height, width, 3]`` uint8."""
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
    """Seconds of the samples of a whole scene: an even pace from a random phase, rounded to a camera's own clock.

    A camera of 12.5 pictures a second cannot be sampled at exactly every half second; some are exact.
    """
    phase = float(rng.uniform(0, 1 / fps))
    clock = float(rng.choice([10.0, 12.0, 12.5, 15.0, 20.0, 24.0, 25.0]))
    count = int((seconds - phase) * fps)
    return [round((phase + k / fps) * clock) / clock for k in range(count - count % _TEMPORAL)]


def draw_samples(scene: Scene, shape: Shape, times: list[float], damage: Damage) -> list[Sample]:
    """Render a scene at these seconds, as its camera's pictures would arrive."""
    renderer = SceneRenderer(scene, shape.width, shape.height)
    fps = scene.camera.fps
    return [
        Sample(second, damage.apply(renderer.picture(second, round(second * fps))), tuple(renderer.objects(second)))
        for second in times
    ]


def sampled_frame(
    index: int, sample: Sample, before: UInt8Array | None, grid: PatchGrid, *, anchor: bool, fresh: bool
) -> tuple[SampledPicture, UInt8Array]:
    """What a codec processor without motion vectors would hand on, and the luma to compare the next sample with.

    ``before``: luma of the sample before, None for the first.
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
