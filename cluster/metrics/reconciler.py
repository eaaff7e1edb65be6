"""How the reconciler of ``Camera`` resources does: what it follows, how old that is, and what became of each."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from cluster.metrics.families import camera_resources, reconciler_age, reconciler_watch_restarts

ResourceState = Literal["accepted", "conflict", "invalid", "no_room", "waiting"]
RESOURCE_STATES: tuple[ResourceState, ...] = ("accepted", "conflict", "invalid", "no_room", "waiting")

WatchEnd = Literal["ended", "broken", "expired", "failed"]
WATCH_ENDS: tuple[WatchEnd, ...] = ("ended", "broken", "expired", "failed")


class WatchMetrics:
    """How one copy of the resources follows the server; callable from any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listed_s = self._heard_s = -math.inf
        reconciler_age.labels("list").set_function(lambda: self._clock() - self._listed_s)
        reconciler_age.labels("word").set_function(lambda: self._clock() - self._heard_s)

    def listed(self) -> None:
        """All resources were listed."""
        self._listed_s = self._heard_s = self._clock()

    def heard(self) -> None:
        """The server said something on a watch, or ended one in good order."""
        self._heard_s = self._clock()

    def restarted(self, why: WatchEnd) -> None:
        """The watch is over, and another one begins."""
        reconciler_watch_restarts.labels(why).inc()


def show_resources(states: Iterable[ResourceState]) -> None:
    """Show how many resources are in each state; ``states`` has one for each resource."""
    found = Counter(states)
    for state in RESOURCE_STATES:
        camera_resources.labels(state).set(found[state])
