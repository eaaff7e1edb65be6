"""Codec change to masks, masks to patches: the part of vision that runs in the decoder process (numpy only)."""

from cluster.vision.pruners.base import PruneDecision, Pruner, make_pruner

__all__ = ["PruneDecision", "Pruner", "make_pruner"]
