"""Change to masks, masks to patches: the half of vision that runs beside the decoder (numpy only)."""

from cluster.vision.pruners import codecsight, keep_all, replenish
from cluster.vision.pruners.base import Decision, Pruner, make_pruner, pruners

__all__ = ["Decision", "Pruner", "codecsight", "keep_all", "make_pruner", "pruners", "replenish"]
