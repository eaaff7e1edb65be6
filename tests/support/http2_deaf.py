"""A client of ``Push`` in raw HTTP/2 that gives the server no window at all: no reply ever reaches it."""

from __future__ import annotations

import asyncio
import struct

from sightline.v1 import ingest_pb2

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_HEADERS, _END_STREAM, _ACK = 4, 1, 1
_INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """An HPACK header: literal, not indexed, not compressed."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _message(request: ingest_pb2.PushRequest) -> bytes:
    body = request.SerializeToString()
    return b"\x00" + struct.pack(">I", len(body)) + body


class DeafClient:
    """Opens ``Push`` on stream 1 and takes no reply before :meth:`listen`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._listening = False

    @classmethod
    async def connect(cls, address: str) -> DeafClient:
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/sightline.v1.Ingest/Push",
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        client._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        client._writer.write(_frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)))
        client._writer.write(_frame(_HEADERS, _END_HEADERS, 1, b"".join(_literal(*pair) for pair in headers.items())))
        await client._writer.drain()
        return client

    async def send(self, request: ingest_pb2.PushRequest) -> None:
        self._writer.write(_frame(_DATA, 0, 1, _message(request)))
        await self._writer.drain()

    def listen(self) -> None:
        """Open the window."""
        self._writer.write(_frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 65535)))
        self._listening = True

    async def ended(self) -> int:
        """Wait until the server ends the stream or the connection; returns how many replies came before."""
        replies = 0
        while True:
            try:
                head = await self._reader.readexactly(9)
                await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionError):
                return replies
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            assert kind != _DATA or self._listening, "there was no window for a reply"
            replies += kind == _DATA
            if kind == _SETTINGS and not flags & _ACK:
                self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
            if kind in (_RST_STREAM, _GOAWAY) or (stream == 1 and kind == _HEADERS and flags & _END_STREAM):
                return replies

    def close(self) -> None:
        self._writer.close()
