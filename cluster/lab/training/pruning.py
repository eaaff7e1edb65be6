"""Which tokens of a training sequence are kept: the live pruners with drawn parameters, and random losses on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.lab.scenes import SceneEvent
from cluster.lab.training.labels import Instant, TokenLabels, token_labels
from cluster.lab.training.pictures import Sample, sampled_frame
from cluster.types import BoolGrid, FrameSample, PatchGrid, UInt8Array
from cluster.vision.pruners.base import Pruner
from cluster.vision.pruners.cells import any_in_group
from cluster.vision.pruners.codecsight import CodecSight
from cluster.vision.pruners.keep_all import KeepAll
from cluster.vision.pruners.replenish import Replenish
from cluster.vision.sampler import PatchSampler


@dataclass(frozen=True, slots=True, eq=False)
class SeenFrame:
    """One frame of a sequence: kept tokens only.

    * ``cells`` ``[t, 2]`` int64, ``patches`` ``[t * merge**2, T, 3, p, p]`` uint8 as in ``FrameSample``
    * ``complete``: nothing was pruned, a window may open here
    """

    time_s: float
    complete: bool
    cells: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    patches: UInt8Array
    labels: TokenLabels


@dataclass(frozen=True, slots=True)
class Pruning:
    """How one sequence is pruned.

    * ``pruner``: none, replenish or codecsight; ``margin``: grey levels a cell must change by
    * ``anchor``: frames between complete ones, ``phase``: of the first after the sequence's own beginning
    * ``loss``: share of the remaining tokens of a pruned frame that is dropped at random
    """

    pruner: str = "none"
    margin: float = 4.5
    anchor: int = 8
    phase: int = 0
    loss: float = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Pruning:
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
        """Whether the ``frame``-th of a sequence is complete by the clock."""
        return frame == 0 or frame % self.anchor == self.phase


def prune_samples(
    samples: Sequence[Sample],
    events: Sequence[SceneEvent],
    grid: PatchGrid,
    pruning: Pruning,
    rng: np.random.Generator,
) -> list[SeenFrame]:
    """Run a sequence's samples through the live sampler; the first frame is fresh and complete."""
    sampler = PatchSampler("training", pruning.make(), fps=2.0)
    frames: list[SeenFrame] = []
    luma: UInt8Array | None = None
    for index, sample in enumerate(samples):
        frame, second = divmod(index, grid.temporal)
        anchor = second == 0 and pruning.anchored(frame)
        sampled, luma = sampled_frame(index, sample, luma, grid, anchor=anchor, fresh=index == 0)
        cut = sampler.feed(sampled)
        if cut is not None:
            pair = [(s.second, s.objects) for s in samples[index + 1 - grid.temporal : index + 1]]
            frames.append(seen_frame(cut, pair, events, 0.0 if cut.anchor else pruning.loss, rng))
    return frames


def seen_frame(
    cut: FrameSample, pair: Sequence[Instant], events: Sequence[SceneEvent], loss: float, rng: np.random.Generator
) -> SeenFrame:
    """One frame as the sampler cut it, less the share ``loss`` of its tokens, with its labels.

    ``pair``: second and objects of each of its samples.
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
    return SeenFrame(
        time_s=pair[0][0],
        complete=len(patches) == grid.tokens * grid.merge**2,
        cells=np.argwhere(groups),
        patches=patches,
        labels=labels.take(groups.ravel()),
    )
