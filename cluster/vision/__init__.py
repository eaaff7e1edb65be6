"""Turns codec change into masks, and masks into patches: the vision stage of the decoder process (numpy only)."""

from cluster.vision.pruners.base import PruneDecision, Pruner, make_pruner

__all__ = ["PruneDecision", "Pruner", "make_pruner"]
