"""Wall-clock time with detection of clock steps (``WallClock``)."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STEP_S = 2.0
"""Drift against the monotonic clock, in seconds, that counts as a step."""


class WallClock:
    """Wall clock. Calls ``on_set`` with each step, in seconds (positive: forward), before returning the new time."""

    def __init__(self, on_set: Callable[[float], None]) -> None:
        self._on_set = on_set
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Unix time, in seconds."""
        now_s = time.time()
        step_s = now_s - time.monotonic() - self._offset_s
        self._offset_s += step_s
        if abs(step_s) > STEP_S:
            log.warning("the system clock was stepped by %+.1f s", step_s)
            self._on_set(step_s)
        return now_s
