"""Network and device sources, read through FFmpeg: RTSP over TCP; HLS, MPEG-TS and MJPEG over HTTP; RTMP; USB."""

import contextlib
import errno
import re
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import av

from cluster.codec.demux import CONTAINERS, PROBING, Demuxer
from cluster.codec.source import PacketQueue, StreamHeader
from cluster.errors import SourceError
from cluster.hosts import is_below
from cluster.redaction import SourceAddress
from cluster.types import MICROSECONDS, EncodedPacket


@dataclass(frozen=True, slots=True)
class Protocol:
    """How FFmpeg opens URLs of a scheme: ``options`` and input ``format`` of ``av.open``."""

    name: str
    options: Mapping[str, str]
    format: str | None = None


# FFmpeg would read about 25 pictures for a frame rate and three for a decoding time, neither needed: seconds of a slow
# camera. With audio it would derive timestamps from the camera's wall clock, which is adjusted now and then.
_RTSP = Protocol(
    "RTSP",
    {
        "rtsp_transport": "tcp",
        "allowed_media_types": "video",
        "fpsprobesize": "0",
        "max_ts_probe": "0",
        "analyzeduration": "500000",
    },
)
_TLS = ("rtsps", "https", "rtmps")
# Playlists and redirects may name further URLs, but never local files.
_HTTP = Protocol(
    "HTTP", {"protocol_whitelist": "http,https,tls,tcp,crypto", "format_whitelist": f"hls,mpjpeg,{CONTAINERS}"}
)
_RTMP = Protocol("RTMP", {"rtmp_live": "live", "format_whitelist": "flv"})

PROTOCOLS: Mapping[str, Protocol] = {
    "rtsp": _RTSP,
    "rtsps": _RTSP,
    "http": _HTTP,
    "https": _HTTP,
    "rtmp": _RTMP,
    "rtmps": _RTMP,
    "v4l2": Protocol("USB camera", {"input_format": "mjpeg"}, "v4l2"),
}
"""By URL scheme. ``v4l2:///dev/video0`` is a USB camera that sends MJPEG."""


class NetworkSource:
    """Packets from a camera, a server or a capture device.

    FFmpeg's network calls cannot be interrupted from Python, so a thread per session reads into a bounded queue.
    ``close`` returns at once; the thread ends at its next packet or timeout. If decoding falls behind, packets are
    dropped up to the next keyframe. Redirects are followed only with ``follow_redirects``, and never for RTSP with
    credentials, which FFmpeg would send to the other host. ``roots``: allowed folders for devices; None allows any.
    ``ca_file``: PEM file of authorities to verify the certificate and host name of ``rtsps``, ``https`` and ``rtmps``
    servers with; None trusts any.
    """

    live = True
    pushed = False
    ended = False

    def __init__(
        self,
        url: str | SourceAddress,
        *,
        connect_timeout_s: float = 5.0,
        frozen_timeout_s: float = 10.0,
        max_packets: int = 512,
        max_bytes: int = 32 << 20,
        follow_redirects: bool = False,
        roots: Sequence[Path] | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = SourceAddress(url)
        self.protocol = PROTOCOLS[self.url.scheme]
        self.follow_redirects = follow_redirects
        self.roots = roots
        self.ca_file = ca_file if self.url.scheme in _TLS else None
        self.name = str(self.url)
        self.connect_timeout_s = connect_timeout_s
        self.frozen_timeout_s = frozen_timeout_s
        self._limits = (max_packets, max_bytes)
        self._closed = threading.Event()
        self._session: _Session | None = None

    def open(self) -> StreamHeader:
        if self._closed.is_set():
            raise SourceError(f"{self.name} was closed", retryable=False)
        session = self._session = _Session(self, PacketQueue(*self._limits))
        # close() may have been called between the check and the assignment.
        if self._closed.is_set():
            session.abandon()
        session.start()
        # Timestamps start over with each session.
        return replace(session.header(self.connect_timeout_s + 1.0), new_clock=True)

    def packets(self) -> Iterator[EncodedPacket]:
        session = self._session
        if session is None:
            raise RuntimeError("call open() before packets()")
        try:
            # The reader thread times out first; this is a backstop.
            while (packet := session.queue.get(self.frozen_timeout_s + 5.0)) is not None:
                yield packet
            if self._closed.is_set():
                return
            if not session.queue.closed:
                raise SourceError(f"{self.name} sent nothing for {self.frozen_timeout_s:g} s", retryable=True)
            if session.error is not None:
                raise session.error
        finally:
            session.abandon()
            if session.relay is not None:
                # This process may end now, and a camera keeps a session that is not torn down until it times out.
                session.join(1.0)

    @property
    def behind_s(self) -> float:
        """Age of the oldest queued packet in seconds; 0 when empty."""
        return 0.0 if self._session is None else self._session.queue.behind_s

    def close(self) -> None:
        self._closed.set()
        if self._session is not None:
            self._session.abandon()


class _Session(threading.Thread):
    """Connects and reads until the server ends, fails or freezes, or the session is abandoned."""

    def __init__(self, source: NetworkSource, queue: PacketQueue) -> None:
        super().__init__(name=f"source {source.name}", daemon=True)
        self.queue = queue
        self.error: SourceError | None = None
        self._source = source
        self._header: StreamHeader | None = None
        self._known = threading.Event()
        self._abandoned = threading.Event()
        self.relay: RtspRelay | None = None

    def header(self, timeout_s: float) -> StreamHeader:
        self._known.wait(timeout_s)
        if self._header is not None and not self._abandoned.is_set():
            return self._header
        source = self._source
        self.abandon()
        silent = SourceError(f"{source.name} did not answer within {source.connect_timeout_s:g} s", retryable=True)
        raise self.error or silent

    def abandon(self) -> None:
        self._abandoned.set()
        if self.relay is not None:
            self.relay.close()
        self.queue.close(discard=True)
        self._known.set()

    def run(self) -> None:
        try:
            self._read()
        except SourceError as error:
            self.error = error
        except Exception as error:  # This thread must not die silently.
            self.error = SourceError(f"{self._source.name}: {error}", retryable=True)
        finally:
            self.queue.close()
            self._known.set()

    def _read(self) -> None:
        source = self._source
        timeout = (source.connect_timeout_s, source.frozen_timeout_s)
        if source.ca_file is not None:
            try:
                ssl.create_default_context(cafile=source.ca_file)
            except OSError as error:
                reason = error.strerror or str(error)
                message = f"{source.name}: {source.ca_file} holds no certificates ({reason}): source_options.ca_file"
                raise SourceError(message, retryable=True) from None
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                address, form = self._address(stack), source.protocol.format
                container = av.open(address, format=form, options=self._options(), timeout=timeout)
                stack.enter_context(container)
            except (av.FFmpegError, OSError) as error:
                # On a timeout while probing, FFmpeg reports invalid data.
                late = time.monotonic() - started >= 0.9 * source.connect_timeout_s
                login = not late and isinstance(error, av.HTTPUnauthorizedError | av.HTTPForbiddenError)
                message = self._refusal(TimeoutError() if late else error)
                raise SourceError(message, retryable=True, login=login) from None
            if self._abandoned.is_set():
                return
            # multipart/x-mixed-replace has no timestamps; FFmpeg would assume 25 FPS.
            untimed = container.format.name == "mpjpeg"
            missing = doubted = 0
            try:
                demuxer = Demuxer(container, source.name)
                self._header = demuxer.header
                self._known.set()
                for packet in demuxer.packets():
                    if self._abandoned.is_set():
                        return
                    if untimed:
                        arrived = round((time.monotonic() - started) * MICROSECONDS)
                        packet = replace(packet, pts=arrived, dts=arrived)
                    if self.relay is not None and self.relay.numbers.missing != missing:
                        missing, doubted = self.relay.numbers.missing, _DOUBTED
                    if doubted:
                        doubted -= 1
                        demuxer.sequence += 1
                        packet = replace(packet, sequence=packet.sequence + 1)
                    self.queue.put_all((packet,))
            except SourceError as error:
                # Retryable: a camera that is still starting may send video in the next session.
                raise SourceError(str(error), retryable=True) from None
            except av.ExitError:
                raise SourceError(
                    f"{source.name} is frozen: no data for {source.frozen_timeout_s:g} s", retryable=True
                ) from None
            except av.FFmpegError as error:
                raise SourceError(f"{source.name} was lost: {error.strerror}", retryable=True) from None

    def _options(self) -> dict[str, str]:
        options = PROBING | dict(self._source.protocol.options)
        if self._source.protocol is _HTTP and not self._source.follow_redirects:
            options["max_redirects"] = "0"
        if self._source.ca_file is not None:
            options |= {"tls_verify": "1", "ca_file": self._source.ca_file}
            if self._source.protocol is _HTTP:
                # FFmpeg verifies no certificate for URLs in a playlist, and a redirect may leave TLS.
                options |= {"protocol_whitelist": "https,tls,tcp,crypto", "format_whitelist": f"mpjpeg,{CONTAINERS}"}
        return options

    def _address(self, stack: contextlib.ExitStack) -> str:
        """What FFmpeg opens: the camera's URL, a device path, or the URL of an RTSP relay."""
        source = self._source
        address = urlsplit(source.url.openable())
        if source.protocol.format is not None:
            if source.roots is not None and not is_below(Path(address.path), source.roots):
                raise SourceError(f"{source.name} is not a device that is allowed", retryable=False)
            return address.path
        direct = source.follow_redirects and "@" not in address.netloc and source.ca_file is None
        if source.protocol is not _RTSP or direct:
            return source.url.openable()
        self.relay = RtspRelay(address, source.connect_timeout_s, source.ca_file)
        stack.callback(self.relay.join, 1.0)
        self.relay.start()
        return self.relay.url

    def _refusal(self, error: Exception) -> str:
        source, name, relay = self._source, self._source.name, self.relay
        if relay is not None and relay.redirected:
            return f"{name} redirects to another address, which is not followed; give the camera that address"
        if isinstance(error, ConnectionRefusedError):
            return f"{name} refuses the connection: nothing listens there"
        if isinstance(error, av.HTTPNotFoundError):
            return f"{name} has no stream at this path ({source.protocol.name} 404)"
        if isinstance(error, av.HTTPUnauthorizedError | av.HTTPForbiddenError):
            sha = ", or accepts SHA digests only: allow MD5 on it" if relay is not None and relay.sha else ""
            return f"{name} refuses this user or password{sha}"
        if isinstance(error, av.ExitError | TimeoutError):
            return f"{name} did not answer within {source.connect_timeout_s:g} s"
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{name} is not trusted: {error.verify_message} (source_options.ca_file)"
        reason = getattr(error, "strerror", None) or str(error)
        if relay is not None and relay.refusal:
            reason = f"it answers {relay.refusal}{' (it sends over UDP only)' if relay.refusal[:3] == '461' else ''}"
        if source.ca_file is not None:
            # FFmpeg reports both alike.
            reason += ", or its certificate is not for this host by source_options.ca_file"
            if source.protocol is _HTTP:
                reason += ", or it is HLS, whose segment addresses cannot be verified"
        if "max_redirects" in self._options() and getattr(error, "errno", None) == errno.EIO:
            reason += ", or it redirects, which is not followed (security.follow_redirects)"
        return f"{name} cannot be opened: {reason}"


PORTS = {"rtsp": 554, "rtsps": 322}
_CHUNK = 2**16
_INTERLEAVED = ord("$")
_BODY = re.compile(rb"(?i)\ncontent-length: *(\d{1,6})")
_LONGEST_HANDSHAKE = 2**18
_REDIRECT = re.compile(rb"\+?0*3\d\d(?!\d)")
_REFUSAL = re.compile(rb"RTSP/1\.\d ((?!401)[45]\d\d[ -~]{0,60})")
_SHA_DIGEST = re.compile(rb'(?im)^www-authenticate: *digest\b[^\r\n]*\balgorithm="?sha[^\r\n]*\r\n')
_REPEATED = 100
"""RTP packets up to this far back are duplicates."""
_DOUBTED = 3
"""Packets from FFmpeg that a loss seen by the relay may affect, since FFmpeg buffers: a gap is left before each, as any
of them may be a keyframe."""


class RtpNumbers:
    """Finds gaps in the RTP sequence numbers (RFC 3550 §5.1) of packets interleaved in an RTSP session (RFC 2326
    §10.12). Cameras drop packets that exceed their uplink, FFmpeg does not report it, and HEVC with a part missing
    decodes to garbage.

    ``missing``: number of lost packets so far. Counting stops at the first data that is not RTP or an RTSP reply.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._rest = b""
        self._skip = 0
        self._last: dict[int, int] = {}
        self._readable = True

    def read(self, data: bytes) -> None:
        """Parse the next bytes from the server."""
        if not self._readable:
            return
        data, at = self._rest + data, self._skip
        while at + 8 <= len(data):
            if data[at] != _INTERLEAVED:
                # An RTSP reply, as to a keep-alive.
                end = data.find(b"\r\n\r\n", at)
                if end < 0:
                    break
                body = _BODY.search(data, at, end)
                at = end + 4 + (int(body[1]) if body else 0)
                continue
            channel, size = data[at + 1], data[at + 2] << 8 | data[at + 3]
            self._readable = data[at + 4] >> 6 == 2
            if not self._readable:
                return
            # RTCP has its packet type where RTP has the payload type (RFC 5761 §4); channel numbers are arbitrary.
            if not 192 <= data[at + 5] < 224:
                number = data[at + 6] << 8 | data[at + 7]
                ahead = (number - self._last.get(channel, number - 1) - 1) % 2**16
                # Slightly back is a duplicate; further back, the camera restarted its numbering (RFC 3550 §A.1).
                if ahead < 2**16 - _REPEATED:
                    self.missing += ahead if ahead < 2**15 else 1
                    self._last[channel] = number
            at += 4 + size
        self._rest, self._skip = data[at:], max(0, at - len(data))
        self._readable = len(self._rest) <= _LONGEST_HANDSHAKE


class RtspRelay(threading.Thread):
    """Loopback relay between FFmpeg and an RTSP server that ends the session when the server redirects: FFmpeg would
    follow to any host and send the password there, and has no option to forbid it.

    Relays one TCP session. For ``rtsps`` it speaks TLS to the server and verifies the certificate against ``ca_file``;
    without one it trusts any, as FFmpeg does. Strips SHA digest challenges: FFmpeg uses the last challenge and supports
    MD5 only. ``redirected``: the server redirected, which ended the session. ``sha``: it sent a SHA challenge.
    ``refusal``: its last error status except 401, or empty. ``numbers``: its RTP sequence numbers.
    """

    def __init__(self, address: SplitResult, timeout_s: float, ca_file: str | None = None) -> None:
        """Connect to the server of ``address`` and listen for FFmpeg at :attr:`url`. Raises OSError if the server
        cannot be reached within ``timeout_s`` or is not trusted."""
        super().__init__(name=f"rtsp relay {address.hostname}", daemon=True)
        self.redirected, self.sha, self.refusal = False, False, ""
        self.numbers = RtpNumbers()
        port = address.port or PORTS[address.scheme]
        server = socket.create_connection((address.hostname or "", port), timeout=timeout_s)
        if address.scheme == "rtsps":
            context = ssl.create_default_context(cafile=ca_file)
            if ca_file is None:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            server = context.wrap_socket(server, server_hostname=address.hostname)
        server.settimeout(None)
        self._server = server
        self._client: socket.socket | None = None
        # Kept open, so that no other process can bind the port FFmpeg sends the password to.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self._listener.settimeout(timeout_s)
        userinfo, at, _ = address.netloc.rpartition("@")
        here = f"{userinfo}{at}127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = address._replace(scheme="rtsp", netloc=here).geturl()

    def close(self) -> None:
        """End the session, from any thread: FFmpeg reads its end, and its TEARDOWN is still relayed."""
        if self._client is not None:
            with contextlib.suppress(OSError):
                self._client.shutdown(socket.SHUT_WR)

    def run(self) -> None:
        with contextlib.suppress(OSError), self._server, self._listener:
            self._client, _ = self._listener.accept()
            with self._client:
                self._relay(self._client)

    def _relay(self, client: socket.socket) -> None:
        replies = b""
        # FFmpeg does not follow redirects after PLAY.
        playing = False
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is client:
                        data = client.recv(_CHUNK)
                        playing = playing or data.startswith(b"PLAY ")
                        self._server.sendall(data)
                    else:
                        if (received := self._receive()) is None:
                            continue
                        data = received
                        if data.startswith(b"RTSP/"):
                            data, offers = _SHA_DIGEST.subn(b"", data)
                            self.sha |= offers > 0
                            for refusal in _REFUSAL.findall(data):
                                self.refusal = refusal.decode()
                        if not playing:
                            replies += data
                            # Anywhere in the data: message boundaries are only the sender's claim.
                            statuses = (reply.split(None, 2)[1:2] for reply in replies.split(b"RTSP/")[1:])
                            self.redirected = any(_REDIRECT.match(status) for found in statuses for status in found)
                            if self.redirected or len(replies) > _LONGEST_HANDSHAKE:
                                return
                        self.numbers.read(data)
                        # A client that has closed may have sent TEARDOWN, which is still to be read.
                        with contextlib.suppress(OSError):
                            client.sendall(data)
                    if not data:
                        return

    def _receive(self) -> bytes | None:
        """Read from the server, including data that TLS has already decrypted, which select() does not see. None if
        there was no application data, only TLS's own such as session tickets: blocking then would deadlock."""
        self._server.setblocking(False)
        try:
            data = self._server.recv(_CHUNK)
            while isinstance(self._server, ssl.SSLSocket) and self._server.pending():
                data += self._server.recv(_CHUNK)
        except (ssl.SSLWantReadError, BlockingIOError):
            return None
        finally:
            self._server.setblocking(True)
        return data
