"""Pruned frames of training sequences: the production pruners with random parameters, random token loss, and dense
labels of the tokens, which train the tower and the language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from cluster.lab.scenes import Scene, SceneEvent, SceneObject, SceneRenderer
from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.vocabulary import EVENT_KINDS, LANES, OBJECT_KINDS, STATES
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
"""Minimum overlap, as a share of the token or of a smaller object, to label the token."""

_COLUMN = {label: column for column, label in enumerate(LABELS)}


LabelledInstant = tuple[float, Sequence[SceneObject]]
"""Time, and the objects visible then."""


@dataclass(frozen=True, slots=True)
class TokenLabels:
    """Labels of some tokens of one frame.

    * ``hot`` ``[t, len(LABELS)]`` uint8, multi-hot
    * ``velocity`` ``[t, 2]`` float32, shares of the picture per second, of the object that covers most of the token
    * ``covered`` ``[t]`` bool: some object is there (``velocity`` is valid)
    """

    hot: npt.NDArray[np.uint8]
    velocity: npt.NDArray[np.float32]
    covered: npt.NDArray[np.bool_]

    def take(self, tokens: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Self:
        return type(self)(self.hot[tokens], self.velocity[tokens], self.covered[tokens])


def coverage(box: tuple[float, float, float, float], rows: int, cols: int) -> npt.NDArray[np.float64]:
    """``[rows, cols]``: overlap of a box (shares of the picture) with each cell, as a share of the smaller of both."""
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
    """Labels of all tokens of one frame, row-major; ``instants``: time and objects of each sample.

    Labels are the union over samples; an event labels its actors' tokens while it lasts.
    """
    rows, cols = grid.group_rows, grid.group_cols
    hot = np.zeros((rows * cols, len(LABELS)), np.uint8)
    velocity = np.zeros((rows * cols, 2), np.float32)
    most = np.zeros(rows * cols)
    for second, objects in instants:
        for seen in objects:
            share = coverage(seen.box, rows, cols).ravel()
            here = share >= MIN_COVERAGE
            # As a share of the token: a small object covers little of it.
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
    """Pruning of one sequence.

    * ``pruner``: none, replenish or codecsight; ``margin``: grey levels a cell must change by; ``restate``: samples
      between two that show again what stands, 0 for none
    * ``anchor``: frames between complete ones, ``phase``: index of the first after frame 0
    * ``loss``: share of a pruned frame's remaining tokens dropped at random
    """

    pruner: str = "none"
    margin: float = 4.5
    anchor: int = 8
    phase: int = 0
    loss: float = 0.0
    restate: int = 2

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        """Mostly the default policy around its default parameters, with anchors every 16 frames or more often."""
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
    """Labelled frames of the samples; the first is fresh and complete."""
    instants = [(sample.second, sample.objects) for sample in samples]
    return [
        make_pruned_frame(
            cut,
            instants[number * grid.temporal : (number + 1) * grid.temporal],
            events,
            0.0 if cut.anchor else pruning.loss,
            rng,
        )
        for number, cut in enumerate(sample_frames(samples, grid, pruning))
    ]


def sample_frames(samples: Sequence[RenderedSample], grid: PatchGrid, pruning: Pruning) -> Iterator[FrameSample]:
    """Samples through the production sampler, as a codec processor without motion vectors gives them."""
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
