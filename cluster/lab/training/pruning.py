"""Pruned frames of training sequences: the production pruners with random parameters, random token loss, and dense
token labels, which supervise the tower and the language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from cluster.lab.scenes.actors import COLORS, Scene
from cluster.lab.scenes.render import SceneObject, SceneRenderer
from cluster.lab.scenes.vocabulary import EVENT_KINDS, LANES, OBJECT_KINDS, STATES, SceneEvent
from cluster.lab.training.config import Shape
from cluster.types import (
    MICROSECONDS,
    BoolGrid,
    ChangeGrid,
    FrameSample,
    PatchGrid,
    SampledPicture,
    UInt8Array,
    cell_means,
)
from cluster.vision.pruners.base import Pruner, any_in_group
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
    """Simulated camera and encoder artefacts, drawn once per scene.

    * ``gain``, ``gamma``: exposure; ``blur``: Gaussian radius in pixels, 0 for none
    * ``quality``: JPEG quality, a stand-in for the codec's loss; None for no compression
    """

    gain: float = 1.0
    gamma: float = 1.0
    blur: float = 0.0
    quality: int | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """Compresses half of the scenes, blurs a third and varies exposure by up to a fifth."""
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
    """Sample times of a whole scene, in seconds: regular from a random phase, rounded to a random camera's frame clock.

    A 12.5 fps camera, for example, does not have a frame at every half second.
    """
    phase = float(rng.uniform(0, 1 / fps))
    clock = float(rng.choice([10.0, 12.0, 12.5, 15.0, 20.0, 24.0, 25.0]))
    count = int((seconds - phase) * fps)
    return [round((phase + k / fps) * clock) / clock for k in range(count - count % _TEMPORAL)]


def render_samples(
    scene: Scene, shape: Shape, times: list[float], degradation: ImageDegradation
) -> list[RenderedSample]:
    """Render a scene at these times (seconds) and degrade the pictures."""
    renderer = SceneRenderer(scene, shape.width, shape.height)
    fps = scene.camera.fps
    return [
        RenderedSample(
            second, degradation.apply(renderer.picture(second, round(second * fps))), tuple(renderer.objects(second))
        )
        for second in times
    ]


def to_luma(rgb: UInt8Array) -> UInt8Array:
    """BT.601 luma ``[height, width]`` uint8."""
    wide = rgb.astype(np.uint16)
    luma: UInt8Array = ((77 * wide[..., 0] + 150 * wide[..., 1] + 29 * wide[..., 2]) >> 8).astype(np.uint8)
    return luma


LABELS = (
    *(f"kind:{kind}" for kind in OBJECT_KINDS),
    *(f"state:{state}" for state in STATES),
    *(f"color:{color}" for color in COLORS),
    *(f"event:{kind}" for kind in EVENT_KINDS),
    *(f"lane:{lane}" for lane in LANES),
)
"""Columns of :attr:`TokenLabels.hot`."""

MIN_COVERAGE = 0.2
"""Minimum overlap to label a token, as a share of the smaller of token and object."""

_COLUMN = {label: column for column, label in enumerate(LABELS)}


LabelledInstant = tuple[float, Sequence[SceneObject]]
"""Time in seconds, and the objects visible at it."""


@dataclass(frozen=True, slots=True)
class TokenLabels:
    """Labels of ``t`` tokens of one frame.

    * ``hot`` ``[t, len(LABELS)]`` uint8, multi-hot
    * ``velocity`` ``[t, 2]`` float32, shares of the picture per second, of the object that covers most of the token
    * ``covered`` ``[t]`` bool: an object covers the token (``velocity`` is valid)
    """

    hot: npt.NDArray[np.uint8]
    velocity: npt.NDArray[np.float32]
    covered: npt.NDArray[np.bool_]

    def take(self, tokens: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Self:
        return type(self)(self.hot[tokens], self.velocity[tokens], self.covered[tokens])


def coverage(box: tuple[float, float, float, float], rows: int, cols: int) -> npt.NDArray[np.float64]:
    """``[rows, cols]``: overlap of a box (in shares of the picture) with each cell, relative to the smaller of them."""
    x0, y0, x1, y1 = box
    wide = _overlap(x0, x1, cols)
    high = _overlap(y0, y1, rows)
    area = max((x1 - x0) * cols * (y1 - y0) * rows, 1e-9)
    share: npt.NDArray[np.float64] = np.outer(high, wide) / min(1.0, area)
    return share


def _overlap(low: float, high: float, cells: int) -> npt.NDArray[np.float64]:
    edges = np.arange(cells, dtype=np.float64)
    overlap: npt.NDArray[np.float64] = np.clip(
        np.minimum(high * cells, edges + 1) - np.maximum(low * cells, edges), 0, 1
    )
    return overlap


def token_labels(instants: Sequence[LabelledInstant], events: Sequence[SceneEvent], grid: PatchGrid) -> TokenLabels:
    """Labels of all tokens of one frame, row-major; ``instants``: time and objects of each of its samples.

    Labels are the union over samples; an ongoing event labels its actors' tokens.
    """
    rows, cols = grid.group_rows, grid.group_cols
    hot = np.zeros((rows * cols, len(LABELS)), np.uint8)
    velocity = np.zeros((rows * cols, 2), np.float32)
    most = np.zeros(rows * cols)
    for second, objects in instants:
        for seen in objects:
            share = coverage(seen.box, rows, cols).ravel()
            here = share >= MIN_COVERAGE
            # From here on relative to the token, of which a small object covers little.
            share = share * min(1.0, (seen.box[2] - seen.box[0]) * cols * (seen.box[3] - seen.box[1]) * rows)
            if not here.any():
                continue
            names = [f"kind:{seen.kind}", f"state:{seen.state}", f"color:{seen.colour}", f"lane:{seen.lane}"]
            names += [f"event:{e.kind}" for e in events if seen.id in e.actors and e.start_s <= second < e.end_s]
            for column in (_COLUMN[name] for name in names if name in _COLUMN):
                hot[here, column] = 1
            nearer = here & (share > most)
            velocity[nearer] = seen.velocity
            most = np.where(nearer, share, most)
    return TokenLabels(hot, velocity, most > 0)


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
    """Pruning parameters of one sequence.

    * ``pruner``: none, replenish or codecsight; ``margin``: luma change, in grey levels, above which a cell is kept;
      ``restate``: interval, in samples, at which the replenish pruner keeps standing foreground again, 0 for never
    * ``anchor``: frames between anchors, ``phase``: index of the first after frame 0
    * ``loss``: share of a pruned frame's kept tokens dropped at random
    """

    pruner: str = "none"
    margin: float = 4.5
    anchor: int = 8
    phase: int = 0
    loss: float = 0.0
    restate: int = 2

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """Mostly the default pruner around its default parameters, with an anchor every 2 to 16 frames."""
        pruner = "replenish" if rng.random() < 0.75 else "codecsight"
        anchor = int(rng.choice([16, 8, 4, 2], p=[0.35, 0.25, 0.25, 0.15]))
        return cls(
            pruner=pruner,
            margin=float(np.exp(rng.normal(np.log(5.0), 0.35))),
            anchor=anchor,
            phase=int(rng.integers(anchor)),
            loss=float(rng.uniform(0.05, 0.35)) if rng.random() < 0.35 else 0.0,
            restate=int(rng.choice([2, 4, 0], p=[0.6, 0.2, 0.2])),
        )

    def make(self) -> Pruner:
        if self.pruner == "none":
            return KeepAll()
        if self.pruner == "codecsight":
            return CodecSight(luma_threshold=self.margin + 1.0)
        return Replenish(margin=self.margin, restate=self.restate)


def prune_samples(
    samples: Sequence[RenderedSample],
    events: Sequence[SceneEvent],
    grid: PatchGrid,
    pruning: Pruning,
    rng: np.random.Generator,
) -> list[PrunedFrame]:
    """Prune and label the frames of these samples, and drop a random share of the tokens of those that are no anchors
    (``pruning.loss``); the first is fresh and complete."""
    frames: list[PrunedFrame] = []
    for number, cut in enumerate(sample_frames(samples, grid, pruning)):
        shown = samples[number * grid.temporal : (number + 1) * grid.temporal]
        groups: BoolGrid = any_in_group(cut.mask, grid.merge)
        patches = cut.patches
        if pruning.loss and not cut.anchor:
            stays = rng.random(int(groups.sum())) >= pruning.loss
            groups[groups] = stays
            patches = patches[np.repeat(stays, grid.merge**2)]
        labels = token_labels([(sample.second, sample.objects) for sample in shown], events, grid)
        frames.append(
            PrunedFrame(
                time_s=shown[0].second,
                complete=len(patches) == grid.tokens * grid.merge**2,
                cells=np.argwhere(groups),
                patches=patches,
                labels=labels.take(groups.ravel()),
            )
        )
    return frames


def sample_frames(samples: Sequence[RenderedSample], grid: PatchGrid, pruning: Pruning) -> Iterator[FrameSample]:
    """Feed samples to the production sampler as a codec processor without motion vectors would."""
    sampler = PatchSampler("training", pruning.make(), fps=2.0)
    change = still = np.zeros((grid.rows, grid.cols), np.float32)
    before: UInt8Array | None = None
    for index, sample in enumerate(samples):
        frame, second = divmod(index, grid.temporal)
        anchor = second == 0 and (frame == 0 or frame % pruning.anchor == pruning.phase)
        luma = to_luma(sample.rgb)
        if before is not None:
            change = cell_means(np.maximum(luma, before) - np.minimum(luma, before), grid)
        before = luma
        cue = ChangeGrid(max_motion=still, net_motion=still, intra=still, luma=change, cue="luma", frames=1)
        pts = round(sample.second * MICROSECONDS)
        cut = sampler.feed(SampledPicture(index, pts, anchor, index == 0, grid, sample.rgb, luma, cue))
        if cut is not None:
            yield cut
