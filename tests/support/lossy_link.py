"""A link that loses everything from some moment on while both ends stay connected, as behind a dead switch."""

from __future__ import annotations

import asyncio
from typing import Self


class LossyLink:
    """A TCP proxy to ``target``, ``host:port``; an async context manager. ``delay_s``: of all it forwards."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._host, _, self._port = target.rpartition(":")
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Forward nothing more of the connections that there are; later ones are whole."""
        for pump in self._pumps:
            pump.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(self._host, int(self._port))
        for source, target in ((reader, ours), (theirs, writer)):
            pump = asyncio.create_task(_forward(source, target, self._delay_s))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)


async def _forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_s: float) -> None:
    try:
        while data := await source.read(65536):
            await asyncio.sleep(delay_s)
            target.write(data)
            await target.drain()
    except OSError:
        pass
    except asyncio.CancelledError:
        await asyncio.Event().wait()
    target.close()
