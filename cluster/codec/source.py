"""Source interface (step 1): yields encoded packets, decodes nothing; and the queue between receiver and decoder."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.types import EncodedPacket


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """Stream parameters known before the first packet.

    ``codec``: FFmpeg's name. ``width``, ``height``: pixels, 0 when unknown. ``extradata``: decoder configuration:
    Annex-B parameter sets for H.264 and HEVC (avcC and hvcC too), else the container's own. ``new_clock``: timestamps
    are unrelated to earlier ones, as in another RTSP session.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    new_clock: bool = field(default=False, metadata={"wire": ""})


class CameraState(StrEnum):
    """WAITING for a pushing client, CONNECTING, RUNNING, in BACKOFF before a new attempt, ERROR or ENDED for good."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    RUNNING = "running"
    BACKOFF = "backoff"
    ERROR = "error"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A state, its reason (one sentence, empty when all is well) and, in BACKOFF, the seconds to the next attempt."""

    state: CameraState
    reason: str = ""
    retry_in_s: float = 0.0


class Source(Protocol):
    """A camera's packets. ``open`` and ``packets`` are called by one thread, ``close`` by any.

    * ``live``: real-time; silence means that the connection was lost
    * ``pushed``: ``open`` waits for a client without a limit
    * ``ended``: the video is over; opening again would give nothing new
    """

    live: bool
    pushed: bool

    @property
    def ended(self) -> bool: ...

    def open(self) -> StreamHeader:
        """Connect and read the stream's parameters; callable again after ``packets`` ended. Raises ``SourceError``: it
        cannot be read; ``retryable``: trying again may help."""
        ...

    def packets(self) -> Iterator[EncodedPacket]:
        """Packets in decoding order until the video ends or the connection is lost. Raises SourceError: reading
        failed."""
        ...

    def close(self) -> None:
        """Stop for good, from any thread; a blocked ``open`` or ``packets`` returns within a second."""
        ...


class PacketQueue:
    """FIFO bounded by packets and bytes. When full, new packets are dropped up to the next keyframe, as they could not
    be decoded anyway. Drops are counted, and the consumer sees missing ``sequence`` numbers. Thread-safe."""

    def __init__(self, max_packets: int, max_bytes: int) -> None:
        self.max_packets = max_packets
        self.max_bytes = max_bytes
        self.dropped = 0
        self.bytes = 0
        self.waited_s = 0.0
        """How long the packet that was taken last had waited."""
        self._packets: deque[tuple[EncodedPacket, float]] = deque()
        self._changed = threading.Condition()
        self.closed = False
        self._until_keyframe = False

    def __len__(self) -> int:
        return len(self._packets)

    @property
    def behind_s(self) -> float:
        """Age of the oldest packet in seconds; 0 when empty."""
        try:
            return time.monotonic() - self._packets[0][1]
        except IndexError:
            return 0.0

    def put_all(self, packets: Sequence[EncodedPacket]) -> int:
        """Number of packets accepted; the consumer is woken once."""
        came = time.monotonic()
        with self._changed:
            taken = sum(self._put(packet, came) for packet in packets)
            if taken:
                self._changed.notify()
            return taken

    def _put(self, packet: EncodedPacket, came: float) -> bool:
        if self._until_keyframe and packet.keyframe:
            self._until_keyframe = False
        full = len(self._packets) >= self.max_packets or self.bytes + len(packet.data) > self.max_bytes
        if self.closed or self._until_keyframe or full:
            self.dropped += 1
            self._until_keyframe = True
            return False
        self._packets.append((packet, came))
        self.bytes += len(packet.data)
        return True

    def get(self, timeout_s: float | None = None) -> EncodedPacket | None:
        """The oldest packet; None when closed and empty, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._packets or self.closed, timeout_s)
            if not self._packets:
                return None
            packet, came = self._packets.popleft()
            self.waited_s = time.monotonic() - came
            self.bytes -= len(packet.data)
            return packet

    def close(self, *, discard: bool = False) -> None:
        """Refuse new packets; queued ones stay readable unless discarded."""
        with self._changed:
            self.closed = True
            if discard:
                self._packets.clear()
                self.bytes = 0
            self._changed.notify_all()
