"""Server of simulated RTSP cameras: one port, a path per camera, packets sent when the fleet delivers them.

The subset of RTSP 1.0 (RFC 2326) that a client needs to play a live camera, with RTP interleaved in TCP and H.264
packetised by RFC 6184 (single NAL units and FU-A). A new client starts at the next keyframe.
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
"""RTP timestamp of a camera's start, sent in RTP-Info; FFmpeg treats 0 as unknown."""

FRAGMENT_BYTES = 1400
UNREAD_BYTES = 4 * 2**20
"""Maximum unsent bytes per client; beyond that, packets are dropped up to the next keyframe."""

FU_A = 28


class RtspCameras:
    """The server. ``host``: address to listen on; ``address``: host in the cameras' URLs. :meth:`start` raises
    ``SightlineError`` if it cannot listen."""

    def __init__(self, host: str = "127.0.0.1", address: str | None = None) -> None:
        self._host = host
        self._address = address or host
        self._lines: dict[str, RtspLine] = {}
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        try:
            self._server = await asyncio.start_server(self._client, self._host, 0)
        except OSError as error:
            raise SightlineError(f"cannot serve RTSP cameras on {self._host}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and disconnect all clients."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        if self._clients:
            await asyncio.wait(self._clients)

    def add(self, name: str, header: StreamHeader, on_first: Callable[[float], None] = lambda _: None) -> RtspLine:
        """Add a camera, which accepts connections from now on. Raises ``ConfigError``: its codec is not H.264."""
        if header.codec != "h264":
            raise ConfigError(f"simulated RTSP cameras send h264, not {header.codec}; use transport: push for it")
        line = self._lines[name] = RtspLine(header, on_first, leave=lambda: self._lines.pop(name, None))
        return line

    def url(self, name: str) -> str:
        """URL of a camera."""
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
            # Clients are only cancelled when the server closes.
            writer.transport.abort()
        finally:
            if played is not None:
                played.stop(writer)
            writer.close()
            self._clients.discard(task)


class RtspLine:
    """One camera of the server, as used by the fleet. ``on_first``: called once, with monotonic seconds, when the first
    keyframe is sent to a client; ``leave``: removes the camera from the server."""

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
        """Wait until cancelled, then leave the server, which does the work."""
        try:
            await asyncio.Event().wait()
        finally:
            self._leave()
            self.cut()
        return self.status

    def deliver(self, packet: EncodedPacket) -> None:
        """Send the camera's next packet to its client, if any, starting at a keyframe; drops packets up to the next
        keyframe if the client is too slow."""
        player = self._player
        self._until_keyframe = self._until_keyframe and not packet.keyframe
        if player is None or self._until_keyframe:
            self._until_keyframe = True
            return
        if player.transport.get_write_buffer_size() > UNREAD_BYTES:
            self._until_keyframe = True
            self._update_status(dropped=self.status.dropped + 1)
            return
        if self._on_first is not None:
            self._on_first(time.monotonic())
            self._on_first = None
        pts = packet.pts if packet.pts is not None else 0
        stamp = (ORIGIN + pts * CLOCK // 1_000_000) % 2**32
        for part in rtp(packet.data, stamp, self._numbers):
            player.write(b"$\x00" + struct.pack(">H", len(part)) + part)
        self._update_status(packets=self.status.packets + 1, bytes=self.status.bytes + len(packet.data))

    def lose(self) -> None:
        """Lose a packet: skips an RTP sequence number."""
        next(self._numbers)

    def cut(self) -> None:
        """Break the connection; reconnecting is up to the client."""
        if self._player is not None:
            self._player.transport.abort()
            self._player = None

    def play(self, client: asyncio.StreamWriter) -> None:
        """Play the camera to ``client`` from the next keyframe on; disconnects a previous client."""
        self.cut()
        self._player = client
        self._until_keyframe = True
        self._plays += 1
        self._update_status(state=CameraState.RUNNING, reconnects=self._plays - 1)

    def stop(self, client: asyncio.StreamWriter) -> None:
        """Stop playing to ``client``, if it is the current one."""
        if self._player is client:
            self._player = None

    def _update_status(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]


def _reply(method: str, url: str, headers: Mapping[str, str], line: RtspLine | None, session: str) -> bytes:
    """Response to a client's request; ``line``: the requested camera, if it exists."""
    status, body = "200 OK", ""
    fields = [f"Session: {session}"]
    if method == "OPTIONS":
        fields = ["Public: OPTIONS, DESCRIBE, SETUP, PLAY, GET_PARAMETER, TEARDOWN"]
    elif line is None:
        status, fields = "404 Not Found", []
    elif method == "DESCRIBE":
        body = sdp(line.header)
        size = len(body.encode())
        fields = [f"Content-Base: {url.rstrip('/')}/", "Content-Type: application/sdp", f"Content-Length: {size}"]
    elif method == "SETUP" and "interleaved" not in headers.get("transport", ""):
        status, fields = "461 Unsupported Transport", []
    elif method == "SETUP":
        fields = ["Transport: RTP/AVP/TCP;unicast;interleaved=0-1", f"Session: {session};timeout=60"]
    elif method == "PLAY":
        fields += ["Range: npt=0.000-", f"RTP-Info: url={url.rstrip('/')}/video;rtptime={ORIGIN}"]
    head = "\r\n".join([f"RTSP/1.0 {status}", f"CSeq: {headers.get('cseq', '0')}", *fields])
    return f"{head}\r\n\r\n{body}".encode()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    """Method, URL and headers (with lower-case names) of the next request; None at the end. Interleaved RTCP is
    skipped."""
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
    """Session description of a camera, for DESCRIBE."""
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
    # Zeros before a start code are padding.
    found[:-1] = [unit.rstrip(b"\x00") for unit in found[:-1]]
    return [unit for unit in found if unit]


def rtp(data: bytes, stamp: int, numbers: Iterator[int]) -> Iterator[bytes]:
    """RTP packets of one Annex-B access unit, with the marker bit set on the last one."""
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
    """This machine's address as seen from a cluster behind ``gateway`` (``host:port``)."""
    host, _, port = gateway.rpartition(":")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only selects the interface.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
