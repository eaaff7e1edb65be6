"""Baselines for our pruner: no pruning, and CodecSight's published rule."""

from dataclasses import dataclass, field
from typing import ClassVar

from cluster.types import BoolGrid, SampledPicture
from cluster.vision.pruners.base import PruneDecision, Pruner, changed_group_share, complete_groups, keep_everything


@dataclass(slots=True)
class KeepAll(Pruner):
    """Keep every cell of every sample: the baseline all savings are measured against.

    ``activity`` is still reported, since the static gate and the scheduler use it under any policy.
    """

    luma_threshold: float = 5.0
    """Luma difference to the previous sample above which a cell is active; affects ``activity`` only."""

    def prune(self, frame: SampledPicture) -> PruneDecision:
        active = frame.change.luma > self.luma_threshold
        activity = 1.0 if frame.random_access else changed_group_share(active, frame.grid.merge)
        return PruneDecision(keep_everything(frame), activity)


@dataclass(slots=True)
class CodecSight(Pruner):
    """Motion above a fixed threshold, sticky until the next anchor.

    CodecSight, eq. 1-4: ``M = V + alpha R``, ``dynamic = M > tau``; the active set is the union over the samples since
    the anchor, completed to whole groups. Vectors are resampled from blocks to cells by area. Beyond the paper, all
    pictures since the last sample count, B-pictures included, and cells that are mostly intra-coded or uncovered are
    dynamic, as new content has no vector. Without vectors (HEVC, AV1) ``V`` is zero and, unless ``alpha`` is set, luma
    above ``luma_threshold`` stands in for it.
    """

    knob: ClassVar[str] = "tau"

    tau: float = 0.25
    """Motion threshold in native pixels per frame; 0.25 is one step of a quarter-pel vector."""

    alpha: float = 0.0
    """Weight of the residual. Decoders do not export it; the cell's luma difference (grey levels) is its proxy."""

    intra_threshold: float = 0.5
    """Share of a cell, intra-coded or uncovered in some frame, above which it is new content."""

    luma_threshold: float = 5.0
    """Luma difference, in grey levels, that counts as motion if the codec exports no vectors."""

    _active: BoolGrid | None = field(default=None, init=False, repr=False)
    # Cells changed by luma but not dynamic since the last anchor: the next anchor is the first to show them.
    _unkept: BoolGrid | None = field(default=None, init=False, repr=False)

    def prune(self, frame: SampledPicture) -> PruneDecision:
        change = frame.change
        dynamic = (change.max_motion + self.alpha * change.luma) > self.tau
        dynamic |= change.intra > self.intra_threshold
        changed = change.luma > self.luma_threshold
        if change.cue == "luma" and self.alpha == 0:
            dynamic |= changed
        if frame.random_access or self._active is None or self._unkept is None or self._active.shape != dynamic.shape:
            activity = 1.0
        else:
            # An I-frame has no vectors: new content in it is only visible in luma.
            known = dynamic | changed | self._unkept if frame.anchor else dynamic
            activity = changed_group_share(known, frame.grid.merge)
            if not frame.anchor:
                self._active |= dynamic
                self._unkept |= changed & ~dynamic
                return PruneDecision(complete_groups(self._active, frame.grid.merge), activity)
        keep_all = keep_everything(frame)
        self._active, self._unkept = ~keep_all, ~keep_all
        return PruneDecision(keep_all, activity)
