"""A simulated camera's connection: the edge agent of `sightline push`, fed on the event loop instead of by a thread."""

import asyncio

from cluster.codec.push import PushSource
from cluster.codec.source import StreamHeader
from cluster.errors import UnavailableError
from cluster.types import EncodedPacket
from cluster.wire.push import PushAgent, PushOptions, PushStatus
from cluster.wire.tls import ClientCredentials

BUFFER_PACKETS, BUFFER_BYTES = 512, 16 * 2**20
"""An agent of a load test holds at most some minutes of a camera, hundreds of which share one process."""


class FedAgent(PushAgent):
    """:class:`~cluster.wire.push.PushAgent` without its thread, whose source nobody reads: one process holds hundreds.

    ``gather_s``: for so long it gathers packets into one message. Everything from the buffer on (credit,
    acknowledgements, reconnecting, sending again) is the agent's own.
    """

    def __init__(
        self,
        header: StreamHeader,
        address: str,
        camera: str,
        *,
        gather_s: float = 0.05,
        credentials: ClientCredentials | None = None,
    ) -> None:
        options = PushOptions(flush_s=gather_s, buffer_packets=BUFFER_PACKETS, buffer_bytes=BUFFER_BYTES)
        fixed = credentials or ClientCredentials()
        super().__init__(PushSource(), address, camera, options=options, credentials=lambda: fixed)
        self._header = header
        self._line: asyncio.Task[bool] | None = None
        self._cut = False

    async def run(self) -> PushStatus:
        """Until cancelled. Raises ``SightlineError``: see ``PushAgent.run``."""
        self._loop = asyncio.get_running_loop()
        self._on_header(self._header)
        try:
            await self._send()
        finally:
            self._buffer.close()
        return self.status

    def deliver(self, packet: EncodedPacket) -> None:
        """The camera's next packet; a number that is missing is a packet lost on the way here. Never waits: when the
        buffer is full, its oldest GOP is dropped and counted."""
        self._on_packet(packet)

    def lose(self) -> None:
        """The next packet is lost on the way: its number, which nobody sends, says so."""

    def cut(self) -> None:
        """Break the connection; the agent comes back after its backoff and goes on where it was."""
        if self._line is not None and not self._line.done():
            self._cut = True
            self._line.cancel()

    def _wake(self) -> None:
        # On the loop itself, where PushAgent's thread would have to call across.
        self._changed.set()

    async def _connection(self) -> bool:
        self._line = asyncio.ensure_future(super()._connection())
        try:
            return await self._line
        except asyncio.CancelledError:
            if not self._cut:
                self._line.cancel()
                raise
            raise UnavailableError("the connection was cut") from None
        finally:
            self._cut = False
