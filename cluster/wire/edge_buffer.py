"""The edge agent's bounded buffer of packets not yet acknowledged; when full, it drops whole GOPs."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cluster.codec.source import StreamHeader
from cluster.types import EncodedPacket


class _Entry(NamedTuple):
    epoch: int
    packet: EncodedPacket


class EdgeBuffer:
    """Filled by the source's thread, emptied by the event loop. Thread-safe.

    An *epoch* is the part of the video under one header; a camera that reconnects with another picture size starts the
    next. ``lossless``: a full buffer blocks :meth:`put` (files); otherwise (live cameras) the oldest GOP not in flight
    is dropped and counted, so that the newest video is kept and remains decodable.
    """

    def __init__(self, max_packets: int, max_bytes: int, *, lossless: bool, wake: Callable[[], None]) -> None:
        self._max_packets = max_packets
        self._max_bytes = max_bytes
        self._lossless = lossless
        self._wake = wake
        self._changed = threading.Condition()
        self._unsent: deque[_Entry] = deque()
        self._unacked: deque[_Entry] = deque()
        self._headers: list[StreamHeader] = []
        self._until_keyframe = False
        self.finished = False
        self._closed = False
        self.bytes = 0
        self.dropped = 0

    # -- the source's thread --------------------------------------------------------------------
    def begin(self, header: StreamHeader) -> None:
        """Start an epoch if ``header`` is new; it applies to all packets from now on."""
        with self._changed:
            if not self._headers or header != self._headers[-1]:
                self._headers.append(header)
        self._wake()

    def put(self, packet: EncodedPacket) -> None:
        """Append a packet; one larger than the whole buffer is accepted if it is alone."""
        with self._changed:
            if self._lossless:
                self._changed.wait_for(lambda: self._closed or self._fits(packet))
            elif not self._evict_for(packet):
                self.dropped += 1
                return
            if self._closed:
                return
            idle = not self._unsent
            self._unsent.append(_Entry(len(self._headers) - 1, packet))
            self.bytes += len(packet.data)
        if idle:
            self._wake()

    def finish(self) -> None:
        """Mark the end of the source: no packet follows."""
        with self._changed:
            self.finished = True
        self._wake()

    # -- the event loop -------------------------------------------------------------------------
    def header(self, epoch: int) -> StreamHeader | None:
        """The header of an epoch; None if it has not begun."""
        with self._changed:
            return self._headers[epoch] if epoch < len(self._headers) else None

    @property
    def epoch(self) -> int:
        """The epoch of the oldest buffered packet, or the newest epoch without one."""
        with self._changed:
            for queue in (self._unacked, self._unsent):
                if queue:
                    return queue[0].epoch
            return max(0, len(self._headers) - 1)

    @property
    def in_flight(self) -> int:
        """Packets sent and not acknowledged."""
        return len(self._unacked)

    @property
    def waiting(self) -> int:
        return len(self._unsent)

    def take(self, epoch: int, max_packets: int, max_bytes: int) -> list[EncodedPacket]:
        """Take the next unsent packets of ``epoch``, at least one if there is any; they count as in flight."""
        taken: list[EncodedPacket] = []
        size = 0
        with self._changed:
            while self._unsent and len(taken) < max_packets and self._unsent[0].epoch == epoch:
                entry = self._unsent[0]
                size += len(entry.packet.data)
                if taken and size > max_bytes:
                    break
                self._unacked.append(self._unsent.popleft())
                taken.append(entry.packet)
        return taken

    def is_over(self, epoch: int) -> bool:
        """Whether nothing of this epoch is unsent or still to come."""
        with self._changed:
            if self._unsent:
                return self._unsent[0].epoch > epoch
            return self.finished or len(self._headers) - 1 > epoch

    def acknowledge(self, next_sequence: int) -> tuple[int, int]:
        """Drop every packet below ``next_sequence``; returns the number of packets and bytes."""
        packets = size = 0
        with self._changed:
            for queue in (self._unacked, self._unsent):
                while queue and queue[0].packet.sequence < next_sequence:
                    packets += 1
                    size += len(queue.popleft().packet.data)
            self.bytes -= size
            self._changed.notify_all()
        return packets, size

    def rewind(self) -> None:
        """Return everything unacknowledged to the unsent packets, after the connection broke."""
        with self._changed:
            self._unsent.extendleft(reversed(self._unacked))
            self._unacked.clear()

    def close(self) -> None:
        """Unblock :meth:`put`, which discards packets from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- under the lock -------------------------------------------------------------------------
    def _fits(self, packet: EncodedPacket) -> bool:
        held = len(self._unsent) + len(self._unacked)
        return held == 0 or (held < self._max_packets and self.bytes + len(packet.data) <= self._max_bytes)

    def _evict_for(self, packet: EncodedPacket) -> bool:
        """Drop older GOPs as needed; returns whether ``packet`` may be appended."""
        if self._until_keyframe and not packet.keyframe:
            return False
        self._until_keyframe = False
        while not self._fits(packet):
            if not self._unsent:
                self._until_keyframe = True
                return False
            self._drop_oldest_gop()
            if not self._unsent and not packet.keyframe:
                # Its own GOP was dropped.
                self._until_keyframe = True
                return False
        return True

    def _drop_oldest_gop(self) -> None:
        while True:
            self.bytes -= len(self._unsent.popleft().packet.data)
            self.dropped += 1
            if not self._unsent or self._unsent[0].packet.keyframe:
                return
