"""The time of day, and when somebody sets it (``WallClock``)."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STEP_S = 2.0
"""Change against the monotonic clock that is a step."""


class WallClock:
    """``on_set`` is told by how many seconds it was set forward, before the new time is used."""

    def __init__(self, on_set: Callable[[float], None]) -> None:
        self._on_set = on_set
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since 1970."""
        now_s = time.time()
        step_s = now_s - time.monotonic() - self._offset_s
        self._offset_s += step_s
        if abs(step_s) > STEP_S:
            log.warning("the clock was set by %.1f s", step_s)
            self._on_set(step_s)
        return now_s
