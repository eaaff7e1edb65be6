"""What a fleet decides, as it tells it: how each camera runs, and what changes."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.control.ladder.policy import Step


@dataclass(frozen=True, slots=True)
class Move:
    """A camera changes its replica; ``to`` is ``None`` when nobody is left. ``warm``: its owner lives and can hand its
    state over, so that nothing is recomputed."""

    camera: str
    source: str | None
    to: str | None
    warm: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """What a tick decided; ``short_s``: seconds a second that are missing although everyone stands as low as may be."""

    steps: list[Step]
    moves: list[Move]
    short_s: float


@dataclass(frozen=True, slots=True)
class CameraPlan:
    """How a camera is to run; ``phase``: share of its stride by which its windows end later than those of phase 0."""

    camera: str
    owner: str | None
    rung: str
    phase: float
    why: str
