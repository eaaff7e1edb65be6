"""Interface of packet sources (step 1), and the bounded queue between receiver and decoder."""

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

    ``codec``: FFmpeg's codec name. ``width``, ``height``: pixels, 0 when unknown. ``extradata``: decoder configuration:
    Annex-B parameter sets, avcC or hvcC for H.264 and HEVC, else as stored in the container. ``new_clock``: timestamps
    are unrelated to earlier ones, as after an RTSP reconnect.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    new_clock: bool = field(default=False, metadata={"wire": ""})


class CameraState(StrEnum):
    """WAITING for a pushing client; BACKOFF before the next attempt; a source's ERROR and ENDED are final."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    RUNNING = "running"
    BACKOFF = "backoff"
    ERROR = "error"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A state, its reason (one sentence, empty if healthy) and, in BACKOFF, the seconds until the next attempt."""

    state: CameraState
    reason: str = ""
    retry_in_s: float = 0.0


class Source(Protocol):
    """Encoded packets of one camera. One thread calls ``open`` and ``packets``; any thread may call ``close``.

    * ``live``: real-time; silence means that the connection was lost
    * ``pushed``: ``open`` waits for a client indefinitely
    * ``ended``: the video is over; reopening yields nothing new
    """

    live: bool
    pushed: bool

    @property
    def ended(self) -> bool: ...

    def open(self) -> StreamHeader:
        """Connect and read the stream parameters; may be called again once ``packets`` has ended. Raises
        ``SourceError``, ``retryable`` if another attempt may succeed."""
        ...

    def packets(self) -> Iterator[EncodedPacket]:
        """Packets in decoding order until the video ends or the connection is lost. Raises SourceError on a read
        error."""
        ...

    def close(self) -> None:
        """Stop for good, from any thread; unblocks ``open`` and ``packets`` within a second."""
        ...


class PacketQueue:
    """FIFO bounded by packets and bytes. A full queue drops new packets up to the next keyframe: none of them could be
    decoded. Drops are counted and leave holes in the ``sequence`` numbers. Thread-safe."""

    def __init__(self, max_packets: int, max_bytes: int) -> None:
        self.max_packets = max_packets
        self.max_bytes = max_bytes
        self.dropped = 0
        self.bytes = 0
        self.waited_s = 0.0
        """Queueing time of the last packet dequeued, in seconds."""
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
        """Enqueue packets, waking the consumer once; returns the number accepted."""
        arrived = time.monotonic()
        with self._changed:
            accepted = sum(self._put(packet, arrived) for packet in packets)
            if accepted:
                self._changed.notify()
            return accepted

    def _put(self, packet: EncodedPacket, arrived: float) -> bool:
        if self._until_keyframe and packet.keyframe:
            self._until_keyframe = False
        full = len(self._packets) >= self.max_packets or self.bytes + len(packet.data) > self.max_bytes
        if self.closed or self._until_keyframe or full:
            self.dropped += 1
            self._until_keyframe = True
            return False
        self._packets.append((packet, arrived))
        self.bytes += len(packet.data)
        return True

    def get(self, timeout_s: float | None = None) -> EncodedPacket | None:
        """Dequeue the oldest packet; None when closed and empty, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._packets or self.closed, timeout_s)
            if not self._packets:
                return None
            packet, arrived = self._packets.popleft()
            self.waited_s = time.monotonic() - arrived
            self.bytes -= len(packet.data)
            return packet

    def close(self, *, discard: bool = False) -> None:
        """Refuse new packets; queued ones stay readable unless ``discard`` is set."""
        with self._changed:
            self.closed = True
            if discard:
                self._packets.clear()
                self.bytes = 0
            self._changed.notify_all()
