"""The account of one pushing connection: which sequence numbers came, and how many packets it may still send."""

from __future__ import annotations

from collections import deque

from sightline.v1 import ingest_pb2

from cluster.decoder.packet_sink import PushProgress
from cluster.errors import CapacityError

UNTOLD_BYTES, SHORT_CREDIT = 256 * 1024, 32
"""Beyond so many bytes, or with no more credit left than two of an agent's batches, a pusher is told at once."""


class Ledger:
    """Checks every batch of one connection against order, size and credit.

    Holes are allowed, they are gaps of the camera's own transport. Going back is not, except at the connection's start,
    where a pusher that reconnected may send again what was taken already: those repeats are dropped and counted.
    """

    def __init__(self, camera: str, start: PushProgress, max_packet_bytes: int) -> None:
        self._camera = camera
        self._max_packet_bytes = max_packet_bytes
        self._expected = start.next_sequence
        self._catching_up = True
        self._received = 0
        self._limit = start.credit
        self._most = start.credit
        self._untold = 0
        self._taken = 0
        # (last sequence, packets received so far) of every batch not acknowledged; holes make the two differ.
        self._marks: deque[tuple[int, int]] = deque()
        self.repeats = 0

    def admit(self, batch: ingest_pb2.PacketBatch) -> ingest_pb2.PacketBatch | None:
        """The batch without repeats, or None when nothing is left of it.

        Raises:
            ValueError: a packet that is empty, over the size limit or out of order.
            CapacityError: more packets than the pusher had credit for.
        """
        repeats = 0
        for packet in batch.packets:
            sequence, size = packet.sequence, len(packet.data)
            if not 0 < size <= self._max_packet_bytes:
                raise ValueError(self._bad_size(sequence, size))
            if sequence >= self._expected:
                self._catching_up = False
                self._expected = sequence + 1
            elif self._catching_up:
                repeats += 1
            else:
                raise ValueError(
                    f"packet {sequence} of camera {self._camera!r} came after packet {self._expected - 1}; "
                    f"sequence numbers must grow within a session"
                )
        if repeats:
            self.repeats += repeats
            batch = ingest_pb2.PacketBatch(packets=batch.packets[repeats:])
        count = len(batch.packets)
        if not count:
            return None
        if self._received + count > self._limit:
            raise CapacityError(
                f"camera {self._camera!r} has {self._received + count - self._taken} packets in flight, more than its "
                f"credit of {self._limit - self._taken}; wait for replies before sending on"
            )
        self._received += count
        self._untold += sum(len(packet.data) for packet in batch.packets)
        self._marks.append((batch.packets[-1].sequence, self._received))
        return batch

    def grant(self, progress: PushProgress) -> None:
        """Note what the pusher is about to be told. A promise once made is never taken back: the limit only grows."""
        while self._marks and self._marks[0][0] < progress.next_sequence:
            self._taken = self._marks.popleft()[1]
        self._limit = max(self._limit, self._taken + progress.credit)
        self._most = max(self._most, progress.credit)
        self._untold = 0

    @property
    def pressing(self) -> bool:
        """Whether the pusher should be told soon what was taken over: half of its credit is used, so that it may come
        to wait for more, or it holds ``UNTOLD_BYTES`` until then."""
        return self._limit - self._received <= max(self._most // 2, SHORT_CREDIT) or self._untold >= UNTOLD_BYTES

    def _bad_size(self, sequence: int, size: int) -> str:
        if not size:
            return f"packet {sequence} of camera {self._camera!r} is empty"
        return (
            f"packet {sequence} of camera {self._camera!r} has {size} bytes, more than the limit of "
            f"{self._max_packet_bytes} (gateway.max_packet_bytes)"
        )
