"""What the controller tells of its table: where a camera lives, and what a decoder must run."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import CameraConfig
from cluster.control.ladder import Rung
from cluster.types import PatchGeometry


@dataclass(frozen=True, slots=True)
class Route:
    """Where a camera lives now; ``None`` where no process is ready for it."""

    decoder: str | None
    decoder_address: str | None
    replica: str | None
    replica_address: str | None


@dataclass(frozen=True, slots=True)
class CameraAssignment:
    """A camera a decoder must run at ``rung``. Without ``geometry`` no replica has ever been ready: it has to wait.
    One of another ``life`` is another camera, whatever its settings are."""

    settings: CameraConfig
    geometry: PatchGeometry | None
    replica: str | None
    replica_address: str | None
    rung: Rung
    life: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """All cameras of one decoder at one ``version`` of the table; ``alive``: addresses of all replicas that are."""

    version: int
    cameras: tuple[CameraAssignment, ...]
    alive: frozenset[str] = frozenset()
