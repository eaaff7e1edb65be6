"""Sends every packet of a fleet when it is due, from one task, and keeps account of how late it was itself."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Iterator

from loadtest.script import Due

POLL_S = 0.1

TICK_S = 0.01
"""Packets that are due within so long leave together: waking for each would cost more than sending it."""


class Pacer:
    """One heap of packets for all cameras, in monotonic seconds. A camera's packets come from an iterator that never
    ends; ``send`` must not wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int]] = []
        self._lines: dict[int, tuple[float, Due, Iterator[Due], Callable[[Due], None]]] = {}
        self._order = itertools.count()
        self._woken = asyncio.Event()
        self.lateness = array("d")

    def add(self, began_s: float, packets: Iterator[Due], send: Callable[[Due], None]) -> int:
        """A camera begins at ``began_s``; returns its ticket for :meth:`remove`."""
        ticket = next(self._order)
        self._queue(ticket, began_s, packets, send)
        self._woken.set()
        return ticket

    def remove(self, ticket: int) -> None:
        """Nothing more of this camera is sent."""
        self._lines.pop(ticket, None)

    def take_lateness(self) -> array[float]:
        """Seconds by which each packet since the last call was sent late, 0 for none."""
        taken, self.lateness = self.lateness, array("d")
        return taken

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = self._clock()
            self.send_due(now)
            wait_s = min(POLL_S, self._heap[0][0] - now) if self._heap else POLL_S
            if wait_s > 0:
                self._woken.clear()
                try:
                    async with asyncio.timeout(max(wait_s, TICK_S)):
                        await self._woken.wait()
                except TimeoutError:
                    continue
            else:
                # Behind: the agents need the loop all the same.
                await asyncio.sleep(0)

    def send_due(self, now: float, most: int = 256) -> None:
        """Send what is due, at most ``most`` packets, so that a pacer that is behind does not hold the loop."""
        while self._heap and self._heap[0][0] <= now and most > 0:
            due_s, _, ticket = heapq.heappop(self._heap)
            line = self._lines.get(ticket)
            if line is None:
                continue
            most -= 1
            began_s, due, packets, send = line
            self.lateness.append(max(0.0, self._clock() - due_s))
            send(due)
            self._queue(ticket, began_s, packets, send)

    def _queue(self, ticket: int, began_s: float, packets: Iterator[Due], send: Callable[[Due], None]) -> None:
        due = next(packets)
        self._lines[ticket] = (began_s, due, packets, send)
        heapq.heappush(self._heap, (began_s + due.at_s, next(self._order), ticket))
