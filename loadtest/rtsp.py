"""A server of simulated RTSP cameras: one port, a path for each, packets sent when the fleet delivers them.

RTSP 1.0 (RFC 2326) with RTP interleaved in TCP and H.264 by RFC 6184 (single units and FU-A), as much as a client that
plays a live camera asks for. Whoever connects begins with the next keyframe.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cluster.codec.source import CameraState, StreamHeader
from cluster.errors import ConfigError, SightlineError
from cluster.types import EncodedPacket
from cluster.wire.push import PushStatus

PAYLOAD_TYPE = 96
CLOCK = 90_000
ORIGIN = 3_600_000
"""RTP timestamp of a camera's beginning, which clients are told; FFmpeg takes 0 for unknown."""

FRAGMENT_BYTES = 1400
UNREAD_BYTES = 4 * 2**20
"""Bytes that a client may leave unread before it loses what follows up to the next keyframe."""

FU_A = 28


class RtspCameras:
    """The server. ``host`` is what it listens on and ``address`` what cameras' addresses name. Raises
    ``SightlineError``: the port cannot be had (from :meth:`start`)."""

    def __init__(self, host: str = "127.0.0.1", address: str | None = None) -> None:
        self._host = host
        self._address = address or host
        self._lines: dict[str, RtspLine] = {}
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen on any free port."""
        try:
            self._server = await asyncio.start_server(self._client, self._host, 0)
        except OSError as error:
            raise SightlineError(f"cannot serve RTSP cameras on {self._host}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Hang up on everyone."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        if self._clients:
            await asyncio.wait(self._clients)

    def add(self, name: str, header: StreamHeader, on_first: Callable[[float], None] = lambda _: None) -> RtspLine:
        """A camera that can be connected to from now on. Raises ``ConfigError``: its codec is not H.264."""
        if header.codec != "h264":
            raise ConfigError(f"simulated RTSP cameras send h264, not {header.codec}; take transport: push for it")
        line = self._lines[name] = RtspLine(header, on_first, leave=lambda: self._lines.pop(name, None))
        return line

    def url(self, name: str) -> str:
        """What a decoder opens."""
        return f"rtsp://{self._address}:{self.port}/{name}"

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        session, played = f"{id(writer):x}", None
        try:
            while (request := await _read_request(reader)) is not None:
                method, url, headers = request
                line = self._lines.get(url.split("://", 1)[-1].partition("/")[2].split("/")[0])
                writer.write(_reply(method, url, headers, line, session))
                if method == "PLAY" and line is not None:
                    played = line
                    line.play(writer)
                elif method == "TEARDOWN":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            # The server is closing, which is all that cancels a client.
            writer.transport.abort()
        finally:
            if played is not None:
                played.stop(writer)
            writer.close()
            self._clients.discard(task)


class RtspLine:
    """One camera of the server; the fleet's side of it. ``on_first``: told once, monotonic seconds, when the first
    client was sent its first keyframe; ``leave``: from then on the server does not know it."""

    def __init__(self, header: StreamHeader, on_first: Callable[[float], None], *, leave: Callable[[], object]) -> None:
        self.header = header
        self.status = PushStatus(state=CameraState.WAITING)
        self._on_first: Callable[[float], None] | None = on_first
        self._leave = leave
        self._player: asyncio.StreamWriter | None = None
        self._until_keyframe = True
        self._numbers = itertools.count()
        self._plays = 0

    async def run(self) -> PushStatus:
        """Until cancelled; the server does the work."""
        try:
            await asyncio.Event().wait()
        finally:
            self._leave()
            self.cut()
        return self.status

    def deliver(self, packet: EncodedPacket) -> None:
        """Send the camera's next packet to whoever plays it; a packet that is not delivered leaves a hole in the RTP
        numbers."""
        player = self._player
        self._until_keyframe = self._until_keyframe and not packet.keyframe
        if player is None or self._until_keyframe:
            self._until_keyframe = True
            return
        if player.transport.get_write_buffer_size() > UNREAD_BYTES:
            self._until_keyframe = True
            self._tell(dropped=self.status.dropped + 1)
            return
        if self._on_first is not None:
            self._on_first(time.monotonic())
            self._on_first = None
        pts = packet.pts if packet.pts is not None else 0
        stamp = (ORIGIN + pts * CLOCK // 1_000_000) % 2**32
        for part in rtp(packet.data, stamp, self._numbers):
            player.write(b"$\x00" + struct.pack(">H", len(part)) + part)
        self._tell(packets=self.status.packets + 1, bytes=self.status.bytes + len(packet.data))

    def lose(self) -> None:
        """A packet went missing on the way: its number is skipped."""
        next(self._numbers)

    def cut(self) -> None:
        """Break the connection; the client comes back when it likes."""
        if self._player is not None:
            self._player.transport.abort()
            self._player = None

    def play(self, client: asyncio.StreamWriter) -> None:
        """A client plays the camera from its next keyframe; one that did before is cut off."""
        self.cut()
        self._player = client
        self._until_keyframe = True
        self._plays += 1
        self._tell(state=CameraState.RUNNING, reconnects=self._plays - 1)

    def stop(self, client: asyncio.StreamWriter) -> None:
        """This client has gone."""
        if self._player is client:
            self._player = None

    def _tell(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]


def _reply(method: str, url: str, headers: Mapping[str, str], line: RtspLine | None, session: str) -> bytes:
    """The answer to a client's request; ``line``: the camera that it names, if there is one."""
    status, body = "200 OK", ""
    told = [f"Session: {session}"]
    if method == "OPTIONS":
        told = ["Public: OPTIONS, DESCRIBE, SETUP, PLAY, GET_PARAMETER, TEARDOWN"]
    elif line is None:
        status, told = "404 Not Found", []
    elif method == "DESCRIBE":
        body = sdp(line.header)
        size = len(body.encode())
        told = [f"Content-Base: {url.rstrip('/')}/", "Content-Type: application/sdp", f"Content-Length: {size}"]
    elif method == "SETUP" and "interleaved" not in headers.get("transport", ""):
        status, told = "461 Unsupported Transport", []
    elif method == "SETUP":
        told = ["Transport: RTP/AVP/TCP;unicast;interleaved=0-1", f"Session: {session};timeout=60"]
    elif method == "PLAY":
        told += ["Range: npt=0.000-", f"RTP-Info: url={url.rstrip('/')}/video;rtptime={ORIGIN}"]
    head = "\r\n".join([f"RTSP/1.0 {status}", f"CSeq: {headers.get('cseq', '0')}", *told])
    return f"{head}\r\n\r\n{body}".encode()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    """Method, address and headers (names in small letters) of the next request; None at the end. RTCP is passed
    over."""
    while True:
        first = await reader.read(1)
        if not first:
            return None
        if first != b"$":
            break
        _, size = struct.unpack(">BH", await reader.readexactly(3))
        await reader.readexactly(size)
    head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *rest = head.strip().split("\r\n")
    method, url, _ = start.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    if length := int(headers.get("content-length", 0)):
        await reader.readexactly(length)
    return method, url, headers


def sdp(header: StreamHeader) -> str:
    """What the camera sends, for DESCRIBE."""
    sets = [base64.b64encode(unit).decode() for unit in units(header.extradata)]
    shape = f";sprop-parameter-sets={','.join(sets)}" if sets else ""
    lines = [
        "v=0",
        "o=- 0 0 IN IP4 0.0.0.0",
        "s=simulated camera",
        "t=0 0",
        "a=range:npt=0-",
        f"m=video 0 RTP/AVP {PAYLOAD_TYPE}",
        "c=IN IP4 0.0.0.0",
        f"a=rtpmap:{PAYLOAD_TYPE} H264/{CLOCK}",
        f"a=fmtp:{PAYLOAD_TYPE} packetization-mode=1{shape}",
        "a=control:video",
    ]
    return "\r\n".join(lines) + "\r\n"


def units(data: bytes) -> list[bytes]:
    """The NAL units of an Annex-B packet, without start codes."""
    found = data.split(b"\x00\x00\x01")[1:]
    # Zeros before a start code belong to nobody.
    found[:-1] = [unit.rstrip(b"\x00") for unit in found[:-1]]
    return [unit for unit in found if unit]


def rtp(data: bytes, stamp: int, numbers: Iterator[int]) -> Iterator[bytes]:
    """RTP packets of one access unit in Annex-B, the last one marked."""
    whole = units(data)
    for index, unit in enumerate(whole):
        last = index + 1 == len(whole)
        if len(unit) <= FRAGMENT_BYTES:
            yield _head(last, stamp, next(numbers)) + unit
            continue
        indicator, kind, rest = unit[0] & 0xE0 | FU_A, unit[0] & 0x1F, unit[1:]
        pieces = [rest[at : at + FRAGMENT_BYTES] for at in range(0, len(rest), FRAGMENT_BYTES)]
        for number, piece in enumerate(pieces):
            first, end = number == 0, number + 1 == len(pieces)
            flags = (0x80 if first else 0) | (0x40 if end else 0) | kind
            yield _head(last and end, stamp, next(numbers)) + bytes((indicator, flags)) + piece


def _head(marker: bool, stamp: int, number: int) -> bytes:
    return struct.pack(">BBHII", 0x80, (0x80 if marker else 0) | PAYLOAD_TYPE, number % 2**16, stamp, 1)


def reachable_from(gateway: str) -> str:
    """This machine's address as a cluster behind ``gateway`` (``host:port``) sees it."""
    host, _, port = gateway.rpartition(":")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the interface.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
