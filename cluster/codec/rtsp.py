"""RTSP source, interleaved over TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import av

from cluster.codec.demux import PROBING, Demuxer
from cluster.codec.packet_queue import PacketQueue
from cluster.codec.source import StreamHeader
from cluster.errors import SourceError
from cluster.redaction import SourceAddress
from cluster.types import EncodedPacket

# FFmpeg would watch about 25 pictures go by to guess a frame rate that nobody asks for: five seconds of a 5 FPS camera.
_OPTIONS = PROBING | {"rtsp_transport": "tcp", "fpsprobesize": "0", "analyzeduration": "500000"}


class RtspSource:
    """Packets of an RTSP session.

    FFmpeg's network calls cannot be interrupted from Python, so a thread per session reads into a bounded queue.
    ``close`` returns at once; the thread ends at its next packet or timeout. A slow decoder loses packets up to the
    next keyframe, counted in ``dropped``.
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
    ) -> None:
        self.url = SourceAddress(url)
        self.name = str(self.url)
        self.connect_timeout_s = connect_timeout_s
        self.frozen_timeout_s = frozen_timeout_s
        self.dropped = 0
        self._limits = (max_packets, max_bytes)
        self._closed = threading.Event()
        self._session: _Session | None = None

    def open(self) -> StreamHeader:
        if self._closed.is_set():
            raise SourceError(f"{self.name} was closed", retryable=False)
        session = self._session = _Session(self, PacketQueue(*self._limits))
        # close() may have come between the check and the session's birth.
        if self._closed.is_set():
            session.abandon()
        session.start()
        # FFmpeg counts the times of a session from its beginning.
        return replace(session.header(self.connect_timeout_s + 1.0), new_clock=True)

    def packets(self) -> Iterator[EncodedPacket]:
        session = self._session
        if session is None:
            raise RuntimeError("open() comes before packets()")
        try:
            # The reader's own timeout comes first; this one only bounds the wait should that fail.
            while (packet := session.queue.get(self.frozen_timeout_s + 5.0)) is not None:
                yield packet
            if self._closed.is_set():
                return
            if not session.queue.closed:
                raise SourceError(f"{self.name} sent nothing for {self.frozen_timeout_s:g} s", retryable=True)
            if session.error is not None:
                raise session.error
        finally:
            self.dropped += session.queue.dropped
            session.abandon()

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

    def __init__(self, source: RtspSource, queue: PacketQueue) -> None:
        super().__init__(name=f"rtsp {source.name}", daemon=True)
        self.queue = queue
        self.error: SourceError | None = None
        self._source = source
        self._header: StreamHeader | None = None
        self._known = threading.Event()
        self._abandoned = threading.Event()

    def header(self, timeout_s: float) -> StreamHeader:
        self._known.wait(timeout_s)
        if self._header is not None and not self._abandoned.is_set():
            return self._header
        name = self._source.name
        self.abandon()
        if self.error is not None:
            raise self.error
        raise SourceError(f"{name} did not answer within {self._source.connect_timeout_s:g} s", retryable=True)

    def abandon(self) -> None:
        self._abandoned.set()
        self.queue.close(discard=True)
        self._known.set()

    def run(self) -> None:
        try:
            self._read()
        except SourceError as error:
            self.error = error
        except Exception as error:  # Nothing may end this thread in silence.
            self.error = SourceError(f"{self._source.name}: {error}", retryable=True)
        finally:
            self.queue.close()
            self._known.set()

    def _read(self) -> None:
        source = self._source
        timeout = (source.connect_timeout_s, source.frozen_timeout_s)
        started = time.monotonic()
        try:
            container = av.open(source.url.openable(), options=_OPTIONS, timeout=timeout)
        except av.FFmpegError as error:
            # Interrupted while probing, FFmpeg blames the data.
            late = time.monotonic() - started >= 0.9 * source.connect_timeout_s
            raise SourceError(_refusal(source, av.ExitError if late else type(error), error), retryable=True) from None
        with container:
            if self._abandoned.is_set():
                return
            demuxer = Demuxer(container, source.name)
            self._header = demuxer.header
            self._known.set()
            try:
                for packet in demuxer.packets():
                    if self._abandoned.is_set():
                        return
                    self.queue.put(packet)
            except av.ExitError:
                raise SourceError(
                    f"{source.name} is frozen: nothing came for {source.frozen_timeout_s:g} s", retryable=True
                ) from None
            except av.FFmpegError as error:
                raise SourceError(f"{source.name} was lost: {error.strerror}", retryable=True) from None


def _refusal(source: RtspSource, kind: type[Exception], error: av.FFmpegError) -> str:
    name = source.name
    if issubclass(kind, av.ConnectionRefusedError):
        return f"{name} refuses the connection: nothing listens there"
    if issubclass(kind, av.HTTPNotFoundError):
        return f"{name} has no stream at this path (RTSP 404)"
    if issubclass(kind, av.HTTPUnauthorizedError | av.HTTPForbiddenError):
        return f"{name} refuses this user or password"
    if issubclass(kind, av.ExitError | av.TimeoutError):
        return f"{name} did not answer within {source.connect_timeout_s:g} s"
    return f"{name} cannot be opened: {error.strerror}"
