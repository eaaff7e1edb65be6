"""No pruning: the baseline every saving is measured against."""

from dataclasses import dataclass

from cluster.types import SampledPicture
from cluster.vision.pruners.base import PruneDecision, Pruner, changed_group_share, keep_everything


@dataclass(slots=True)
class KeepAll(Pruner):
    """Keep every cell of every sample.

    ``activity`` still reports how much moved, since the static gate and the scheduler want it under any policy.
    """

    luma_threshold: float = 5.0
    """Grey levels to the previous sample above which a cell counts as active; only ``activity`` depends on it."""

    def prune(self, frame: SampledPicture) -> PruneDecision:
        active = frame.change.luma > self.luma_threshold
        activity = 1.0 if frame.random_access else changed_group_share(active, frame.grid.merge)
        return PruneDecision(keep_everything(frame), activity)
