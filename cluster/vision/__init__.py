"""Change to masks, masks to patches: the half of vision that runs beside the decoder (numpy only)."""

from cluster.vision.pruners.base import PruneDecision, Pruner, make_pruner

__all__ = ["PruneDecision", "Pruner", "make_pruner"]
