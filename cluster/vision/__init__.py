"""Change to masks, masks to patches: the half of vision that runs beside the decoder (numpy only)."""

from cluster.vision.pruners.base import Decision, Pruner, make_pruner

__all__ = ["Decision", "Pruner", "make_pruner"]
