"""Rates: how many calls one principal may make."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from cluster.errors import CapacityError

KEPT = 4096
"""Principals whose rate is remembered; a token that has not called for longest is forgotten first."""


class RateLimit:
    """A bucket of ``burst`` calls per principal that fills with ``per_s`` calls a second."""

    def __init__(self, per_s: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(f"a rate must let something through, not {per_s:g}/s in bursts of {burst}")
        self._per_s, self._burst = per_s, burst
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, principal: str, cost: float = 1.0) -> None:
        """Count one call, or a share of one.

        Raises:
            CapacityError: it comes too early.
        """
        with self._lock:
            now = self._clock()
            left, since = self._buckets.pop(principal, (float(self._burst), now))
            left = min(self._burst, left + max(0.0, now - since) * self._per_s)
            if left >= cost:
                left -= cost
                early = 0.0
            else:
                early = (cost - left) / self._per_s
            self._buckets[principal] = (left, now)
            if len(self._buckets) > KEPT:
                self._buckets.popitem(last=False)
        if early:
            raise CapacityError(f"{principal!r} calls too often; try again in {early:.1f} s")
