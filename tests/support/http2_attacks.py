"""What a caller without a token can send to a gateway: each attack is bounded in count and time, and goes to this
machine only.

Frames of HTTP/2 are written by hand (RFC 9113): clients of gRPC finish what they begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cluster.security.roles import RULES

ATTACK_S = 3.0
CONNECTIONS = 1500
"""More than a gateway has room for."""
MESSAGE = 8 * 2**20
NAME = 4 * 2**20
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CALLS = [method for method in RULES if method.startswith("/")]

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = 16384


@dataclass(slots=True)
class Target:
    """``rpc``, ``http``: ports of 127.0.0.1. ``seen``: what became of connections and calls."""

    rpc: int
    http: int
    seen: Counter[str] = field(default_factory=Counter)


Attack = Callable[[Target], Awaitable[None]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers(path: str, **more: str) -> bytes:
    """The headers of a gRPC call: literals that are not indexed (RFC 7541, 6.2.2)."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    pairs |= {"content-type": "application/grpc", **{name.replace("_", "-"): text for name, text in more.items()}}
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs.items())


def message(announced: int, sent: bytes, *, compressed: bool = False) -> bytes:
    """A message of gRPC that says it has ``announced`` bytes, and has ``sent``."""
    return bytes([compressed]) + announced.to_bytes(4, "big") + sent


def name_request(length: int) -> bytes:
    """A ``HealthCheckRequest`` with a name of ``length`` bytes."""
    return b"\x0a" + _varint(length) + b"x" * length


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number % 128 | 128)
        number //= 128
    return bytes([*out, number])


def _text(text: str) -> bytes:
    """A string of HPACK, without Huffman's code (RFC 7541, 5.2)."""
    data = text.encode()
    return (bytes([len(data)]) if len(data) < 127 else b"\x7f" + _varint(len(data) - 127)) + data


class Http2:
    """One connection: sends as much as flow control lets it, and reads whatever comes."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target, self._reader, self._writer = target, reader, writer
        self._initial, self._connection = 65535, 65535
        self._windows: dict[int, int] = {}
        self._moved = asyncio.Event()
        self._next = 1
        self.over = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, target: Target) -> Http2:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.rpc)
        target.seen["opened"] += 1
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        return cls(target, reader, writer)

    def begin(self, path: str, **more: str) -> int:
        """The headers of a call; returns its stream."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._writer.write(frame(HEADERS, END_HEADERS, stream, headers(path, **more)))
        return stream

    async def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """All of ``data``, or until the stream, the connection or the attack is over."""
        at = 0
        while at < len(data) and not self.over and stream in self._windows:
            count = min(FRAME, len(data) - at, self._connection, self._windows[stream])
            if count <= 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            last = end and at + count == len(data)
            self._writer.write(frame(DATA, END_STREAM if last else 0, stream, data[at : at + count]))
            self._connection -= count
            self._windows[stream] -= count
            at += count
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload)
                self._moved.set()
        except (OSError, asyncio.IncompleteReadError):
            self._target.seen["closed"] += 1
        finally:
            self.over = True
            self._moved.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._connection += more
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if payload[at : at + 2] == b"\0\4":
                    initial = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for each in self._windows:
                        self._windows[each] += initial - self._initial
                    self._initial = initial
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, payload))
        elif kind == HEADERS and (found := re.search(rb"grpc-status.(\d+)", payload)):
            # Later ones of a connection refer to the first.
            self._target.seen[f"status {found[1].decode()}"] += 1
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self._windows.pop(stream, None)


async def every(connections: int, one: Callable[[int], Awaitable[None]]) -> None:
    """``one`` of each connection at once, until :data:`ATTACK_S` is over; one that the gateway ends is over earlier."""

    async def attempt(number: int) -> None:
        with contextlib.suppress(OSError):
            await one(number)

    began = time.monotonic()
    tasks = [asyncio.create_task(attempt(number)) for number in range(connections)]
    done, left = await asyncio.wait(tasks, timeout=ATTACK_S)
    await asyncio.sleep(max(0.0, began + ATTACK_S - time.monotonic()))
    for task in left:
        task.cancel()
    for task in done:
        # An attack that is wrong itself must not pass for one that was beaten off.
        task.result()


def calls(methods: list[str], data: bytes, *, connections: int, streams: int, end: bool = True, **more: str) -> Attack:
    """``streams`` calls on each connection, one method after the other, with ``data`` as the request."""

    async def attack(target: Target) -> None:
        async def one(number: int) -> None:
            connection = await Http2.open(target)
            sends = []
            for count in range(streams):
                if connection.over:
                    break
                stream = connection.begin(methods[(number + count) % len(methods)], **more)
                sends.append(connection.send(stream, data, end=end))
            await asyncio.gather(*sends)
            await asyncio.sleep(ATTACK_S)

        await every(connections, one)

    return attack


def silent(port: str, first: bytes = b"", drip: bytes = b"", *, connections: int = CONNECTIONS) -> Attack:
    """Connections that send ``first`` and then a byte of ``drip`` now and then, come again when they are closed, and
    read nothing before."""

    async def attack(target: Target) -> None:
        async def one(number: int) -> None:
            while True:
                reader, writer = await asyncio.open_connection("127.0.0.1", getattr(target, port))
                target.seen["opened"] += 1
                writer.write(first)
                try:
                    for at in range(len(drip)):
                        await asyncio.sleep(0.2)
                        writer.write(drip[at : at + 1])
                        await writer.drain()
                    while got := await reader.read(4096):
                        if got.startswith(b"HTTP/1.1 "):
                            target.seen[f"HTTP {got[9:12].decode()}"] += 1
                except OSError:
                    pass
                target.seen["closed"] += 1
                writer.close()
                # Many who come again all the time would measure this process.
                await asyncio.sleep(0.5 + number % 10 / 20)

        await every(connections, one)

    return attack


def unread(port: str, data: bytes, *, connections: int) -> Attack:
    """Connections that ask again and again, and take no reply."""

    async def attack(target: Target) -> None:
        async def one(_number: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", getattr(target, port), limit=1)
            target.seen["opened"] += 1
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            if port == "rpc":
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
            stream = 1
            while True:
                part = data or frame(HEADERS, END_HEADERS | END_STREAM, stream, headers(CALLS[0]))
                stream += 2
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

        await every(connections, one)

    return attack


def hello() -> bytes:
    """What a TLS client says first."""
    context, incoming, outgoing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO(), ssl.MemoryBIO()
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def shaken(port: str, first: bytes, *, connections: int) -> Attack:
    """Handshakes that are finished, ``first``, and nothing more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"] if port == "rpc" else ["http/1.1"])

    async def attack(target: Target) -> None:
        async def one(_number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", getattr(target, port), ssl=context)
            target.seen["opened"] += 1
            writer.write(first)
            with contextlib.suppress(OSError):
                while await reader.read(4096):
                    pass
            target.seen["closed"] += 1

        await every(connections, one)

    return attack


_HALF = message(MESSAGE, bytes(MESSAGE - 1))
_POST = b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
_REFUSED = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS | END_STREAM, 1, headers(CALLS[0]))


async def gzip_bomb(target: Target) -> None:
    """Made when it is thrown: it takes a second, which all who import this file would wait for."""
    bomb = gzip.compress(bytes(256 * 2**20), 9)
    await calls([CHECK], message(len(bomb), bomb, compressed=True), connections=20, streams=10, grpc_encoding="gzip")(
        target
    )


PLAIN: dict[str, Attack] = {
    "Watch, unknown names of 4 MiB": calls([WATCH], message(NAME + 5, name_request(NAME)), connections=8, streams=32),
    "Watch of the server": calls([WATCH], message(0, b""), connections=100, streams=40),
    "Watch that goes on sending": calls([WATCH], message(0, b"") + _HALF, connections=100, streams=4, end=False),
    "Check, names of 4 MiB": calls([CHECK], message(NAME + 5, name_request(NAME)), connections=8, streams=32),
    "Check, never finished": calls([CHECK], _HALF, connections=50, streams=4, end=False),
    "every call, never finished": calls(CALLS, _HALF, connections=50, streams=len(CALLS), end=False),
    "every call, 8 MiB": calls(CALLS, message(MESSAGE, bytes(MESSAGE)), connections=50, streams=len(CALLS)),
    "reflection": calls([REFLECTION], message(NAME, bytes(NAME)), connections=50, streams=50),
    "gzip bomb of 256 MiB": gzip_bomb,
    "calls whose replies nobody reads": unread("rpc", b"", connections=100),
    "gRPC: silent connections": silent("rpc"),
    "gRPC: connections after a refusal": silent("rpc", _REFUSED),
    "HTTP: silent connections": silent("http"),
    "HTTP: heads byte by byte": silent("http", b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"X-Slow: " + b"x" * 100),
    "HTTP: bodies byte by byte": silent("http", _POST, b"{" + b" " * 100),
    "HTTP: replies nobody reads": unread(
        "http", b"GET /console/base.css HTTP/1.1\r\nHost: x\r\n\r\n" * 8, connections=400
    ),
}
TLS: dict[str, Attack] = {
    "gRPC: handshakes never finished": silent("rpc", hello()),
    "gRPC: TLS and then nothing": shaken("rpc", _REFUSED, connections=300),
    "HTTP: handshakes never finished": silent("http", hello()),
    "HTTP: TLS and then nothing": shaken("http", b"", connections=300),
}
