"""Change to masks, masks to patches: the half of vision that runs beside the decoder (numpy only)."""

from cluster.vision import codecsight, keep_all, replenish
from cluster.vision.pruner import Decision, Pruner, pruners

__all__ = ["Decision", "Pruner", "codecsight", "keep_all", "pruners", "replenish"]
