"""The quality ladder: rungs with their measured loss, and the policy that walks cameras up and down."""

from cluster.control.ladder.rung import FILE, FULL, CameraOnLadder, Ladder, LadderPolicy, Rung, Step, default

__all__ = ["FILE", "FULL", "CameraOnLadder", "Ladder", "LadderPolicy", "Rung", "Step", "default"]
