"""What our pruner is measured against: no pruning, and CodecSight's published rule."""

from dataclasses import dataclass, field
from typing import ClassVar

from cluster.types import BoolGrid, SampledPicture
from cluster.vision.pruners.base import PruneDecision, Pruner, changed_group_share, complete_groups, keep_everything


@dataclass(slots=True)
class KeepAll(Pruner):
    """Keep every cell of every sample: the baseline every saving is measured against.

    ``activity`` still reports how much moved, since the static gate and the scheduler want it under any policy.
    """

    luma_threshold: float = 5.0
    """Grey levels to the previous sample above which a cell counts as active; only ``activity`` depends on it."""

    def prune(self, frame: SampledPicture) -> PruneDecision:
        active = frame.change.luma > self.luma_threshold
        activity = 1.0 if frame.random_access else changed_group_share(active, frame.grid.merge)
        return PruneDecision(keep_everything(frame), activity)


@dataclass(slots=True)
class CodecSight(Pruner):
    """Motion above a fixed threshold, sticky until the next anchor.

    CodecSight, eq. 1-4: ``M = V + alpha R``, ``dynamic = M > tau``, the active set being the union over the samples
    since the anchor; then group-complete. Beyond the paper, vectors are of all pictures since the last sample, B too,
    and intra-coded and uncovered cells are dynamic: they are new content without a vector. On a stream without vectors
    (HEVC, AV1) ``V`` is zero and, unless ``alpha`` is set, the luma plane stands in for it with ``luma_threshold``.
    """

    knob: ClassVar[str] = "tau"

    tau: float = 0.25
    """Motion threshold in native pixels per frame; 0.25 is one step of a quarter-pel vector."""

    alpha: float = 0.0
    """Weight of the residual. Decoders do not give it: the luma difference of the cell (grey levels) is its proxy."""

    intra_threshold: float = 0.0
    """A cell is new content when more than this share of it was intra-coded or uncovered in some frame."""

    luma_threshold: float = 5.0
    """Grey levels that stand for motion where the codec exports no vectors."""

    _active: BoolGrid | None = field(default=None, init=False, repr=False)
    # Changed by luma and kept by no vector since the last anchor, which is the first to show it.
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
            # An I-frame has no vectors: what appears in it is seen by its luma alone.
            known = dynamic | changed | self._unkept if frame.anchor else dynamic
            activity = changed_group_share(known, frame.grid.merge)
            if not frame.anchor:
                self._active |= dynamic
                self._unkept |= changed & ~dynamic
                return PruneDecision(complete_groups(self._active, frame.grid.merge), activity)
        keep_all = keep_everything(frame)
        self._active, self._unkept = ~keep_all, ~keep_all
        return PruneDecision(keep_all, activity)
