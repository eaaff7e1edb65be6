"""Connection of a simulated camera: the edge agent of `sightline push`, fed from the event loop instead of a thread."""

import asyncio

from cluster.codec.push import PushSource
from cluster.codec.source import StreamHeader
from cluster.errors import UnavailableError
from cluster.types import EncodedPacket
from cluster.wire.push import PushAgent, PushOptions, PushStatus
from cluster.wire.tls import ClientCredentials

BUFFER_PACKETS, BUFFER_BYTES = 512, 16 * 2**20
"""Buffer limits per agent, some minutes of video: hundreds of agents share one process."""


class FedAgent(PushAgent):
    """:class:`~cluster.wire.push.PushAgent` without its reader thread, so that one process can run hundreds.

    ``gather_s``: seconds for which packets are gathered into one message. Everything downstream of the buffer (flow
    control, acknowledgements, reconnecting, retransmission) is the production agent's code.
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
        self._connection_task: asyncio.Task[bool] | None = None
        self._cut = False

    async def run(self) -> PushStatus:
        """Run until cancelled. Raises ``SightlineError``: see ``PushAgent.run``."""
        self._loop = asyncio.get_running_loop()
        self._on_header(self._header)
        try:
            await self._send()
        finally:
            self._buffer.close()
        return self.status

    def deliver(self, packet: EncodedPacket) -> None:
        """Enqueue the camera's next packet; a gap in sequence numbers means packets lost before the agent. Never
        blocks: if the buffer is full, its oldest GOP is dropped and counted."""
        self._on_packet(packet)

    def lose(self) -> None:
        """Lose a packet on its way to the agent: the gap in sequence numbers shows it, so nothing is to be done."""

    def cut(self) -> None:
        """Break the connection; the agent reconnects after its backoff and resumes where it was."""
        if self._connection_task is not None and not self._connection_task.done():
            self._cut = True
            self._connection_task.cancel()

    def _wake(self) -> None:
        # Already on the loop; PushAgent's thread has to schedule a callback on it.
        self._changed.set()

    async def _connection(self) -> bool:
        self._connection_task = asyncio.ensure_future(super()._connection())
        try:
            return await self._connection_task
        except asyncio.CancelledError:
            if not self._cut:
                self._connection_task.cancel()
                raise
            raise UnavailableError("the connection was cut") from None
        finally:
            self._cut = False
