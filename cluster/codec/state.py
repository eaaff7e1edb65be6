"""What a camera's source is doing, as operators see it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CameraState(StrEnum):
    """WAITING for a pushing client, CONNECTING, RUNNING, in BACKOFF before a new attempt, ERROR or ENDED for good."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    RUNNING = "running"
    BACKOFF = "backoff"
    ERROR = "error"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A state with its reason (one sentence, empty when all is well) and, in BACKOFF, the seconds to the next attempt.

    ``attempts`` counts failures since the source last ran well; ``reconnects`` all successful re-openings.
    """

    state: CameraState
    reason: str = ""
    retry_in_s: float = 0.0
    attempts: int = 0
    reconnects: int = 0
