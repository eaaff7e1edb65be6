"""Every open connection: not more than may be, and none whose client does not take what it asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster import metrics

SWEEP_S = 0.5


@dataclass(slots=True)
class _Open:
    """``unsent``: bytes that the client has not taken, ``since`` when there were last none, or fewer."""

    unsent: int = 0
    since: float = 0.0


class Connections:
    """Counts connections up to ``limit``, and closes those whose client takes nothing for ``stall_s``.

    aiohttp itself waits for ever for a client to take a reply.
    """

    def __init__(self, limit: int, stall_s: float) -> None:
        self._limit = limit
        self._stall_s = stall_s
        self._open: dict[asyncio.Transport, _Open] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.refused = 0
        self.cut = 0

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Begin to look after them, on the running loop."""
        self._sweeping = asyncio.create_task(self._sweep(), name="http connections")

    def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    def room(self, unborn: int) -> bool:
        """Whether one more may come, besides ``unborn`` ones that are not open yet; counted when not."""
        if len(self._open) + unborn >= self._limit:
            self._drop_closed()
        if len(self._open) + unborn < self._limit:
            return True
        self.refused += 1
        metrics.http_dropped.labels("refused").inc()
        return False

    def opened(self, transport: asyncio.Transport) -> None:
        """A connection is there."""
        self._open[transport] = _Open()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_S, self._stall_s / 4))
            self._drop_closed()
            now = loop.time()
            for transport, one in list(self._open.items()):
                unsent = transport.get_write_buffer_size()
                if not unsent or not one.unsent or unsent < one.unsent:
                    one.since = now
                one.unsent = unsent
                if unsent and now - one.since > self._stall_s:
                    self.cut += 1
                    metrics.http_dropped.labels("cut").inc()
                    transport.abort()
                    del self._open[transport]

    def _drop_closed(self) -> None:
        for transport in [each for each in self._open if each.is_closing()]:
            del self._open[transport]
