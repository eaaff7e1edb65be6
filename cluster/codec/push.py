"""Push source: another thread (the gRPC server) enqueues packets into a bounded queue."""

import threading
from collections.abc import Iterator, Sequence

from cluster.codec.source import PacketQueue, StreamHeader
from cluster.errors import SourceError
from cluster.types import EncodedPacket


class PushSource:
    """Thread-safe source; one client at a time begins a session, offers packets and ends it.

    Sequence numbers count within a session. Repeated packets are ignored; holes are left for the codec processor to
    detect. After a new session or a change of stream parameters, ``packets`` drains the old queue and ends; the next
    ``open`` returns the new header.
    """

    live = True
    pushed = True

    def __init__(self, *, max_packets: int = 512, max_bytes: int = 32 << 20) -> None:
        self.max_packets = max_packets
        self.max_bytes = max_bytes
        self.session: str | None = None
        self.next_sequence = 0
        self._dropped_before = 0
        self._header: StreamHeader | None = None
        self._announced = False
        self._ended = False
        self._closed = False
        self._state = threading.Condition()
        self._queue = PacketQueue(max_packets, max_bytes)
        self._reading: PacketQueue | None = None

    # -- client side ----------------------------------------------------------------------------
    def begin_session(self, header: StreamHeader, session: str) -> None:
        """Start a session, or resume it without loss after a reconnect (same session and header). Raises SourceError
        once closed."""
        with self._state:
            if self._closed:
                raise SourceError("the camera no longer accepts packets", retryable=False)
            if session == self.session and header == self._header and not self._ended:
                return
            if session != self.session or self._ended:
                self.next_sequence = self._dropped_before = 0
            else:
                self._dropped_before += self._queue.dropped
            self._queue.close()
            self._queue = PacketQueue(self.max_packets, self.max_bytes)
            self.session, self._header, self._ended, self._announced = session, header, False, True
            self._state.notify_all()

    def offer(self, packets: Sequence[EncodedPacket]) -> int:
        """Enqueue packets; returns how many were dropped as the queue is full or closed. Drops are counted and leave a
        gap."""
        with self._state:
            new = []
            for packet in packets:
                if packet.sequence >= self.next_sequence:
                    self.next_sequence = packet.sequence + 1
                    new.append(packet)
            return len(new) - self._queue.put_all(new)

    def end_session(self) -> None:
        """End the video: queued packets are still decoded, then the camera ends."""
        with self._state:
            self._ended = True
            self._queue.close()
            self._state.notify_all()

    def credit(self) -> int:
        """Number of packets that still fit, estimated from the mean size of the queued ones."""
        queue = self._queue
        waiting, size = len(queue), queue.bytes
        by_count = self.max_packets - waiting
        if waiting == 0:
            return by_count
        return max(0, min(by_count, (self.max_bytes - size) * waiting // max(size, 1)))

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def dropped(self) -> int:
        """Packets of this session dropped on a full queue."""
        return self._dropped_before + self._queue.dropped

    # -- decoder side ---------------------------------------------------------------------------
    @property
    def waited_s(self) -> float:
        """Queueing time of the last packet read, in seconds."""
        return 0.0 if self._reading is None else self._reading.waited_s

    @property
    def behind_s(self) -> float:
        """Age of the oldest queued packet in seconds; 0 when empty."""
        return 0.0 if self._reading is None else self._reading.behind_s

    @property
    def ended(self) -> bool:
        with self._state:
            return self._closed or (self._ended and not self._announced)

    def open(self) -> StreamHeader:
        with self._state:
            self._state.wait_for(lambda: self._announced or self._closed)
            if self._closed or self._header is None:
                raise SourceError("the camera no longer accepts packets", retryable=False)
            self._announced = False
            self._reading = self._queue
            return self._header

    def packets(self) -> Iterator[EncodedPacket]:
        queue = self._reading
        if queue is None:
            raise RuntimeError("call open() before packets()")
        read = False
        try:
            while (packet := queue.get()) is not None:
                yield packet
            read = True
        finally:
            with self._state:
                if queue is self._queue:
                    # The reader failed, but the client is still connected: let the next open() resume its queue.
                    self._announced = not read
                    # Otherwise the camera ends: a session that began from here on would be lost.
                    self._closed |= self._ended and read

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._queue.close(discard=True)
            if self._reading is not None:
                self._reading.close(discard=True)
            self._state.notify_all()
