"""What a decoder process holds of one camera for people: its newest picture, and its newest packets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from cluster.codec.privacy import Polygon, PrivacyMasks
from cluster.codec.source import Source, StreamHeader
from cluster.decoder.footage.clip import Painter
from cluster.decoder.footage.pictures import LatestPicture
from cluster.decoder.footage.ring import PacketRing
from cluster.types import EncodedPacket

log = logging.getLogger(__name__)


class CameraFootage:
    """``ring``: None where no clips are kept. ``masks``: what of the pictures nobody may see."""

    def __init__(self, ring: PacketRing | None = None, masks: Sequence[Polygon] = ()) -> None:
        self.latest = LatestPicture()
        self.ring = ring
        self._masks = tuple(masks)

    def painter(self) -> Painter | None:
        """A new one for every clip and still, since one belongs to one thread; None where all may be seen."""
        return PrivacyMasks(self._masks).apply if self._masks else None

    def watching(self, source: Source) -> Source:
        """The same source, whose packets also go into the ring."""
        return source if self.ring is None else _Watched(source, self.ring)

    def forget(self, before_s: float = 0.0) -> int:
        """Everything up to ``before_s`` seconds ago; how many bytes of packets."""
        # Whenever it was: there is another one in a moment.
        self.latest.forget()
        return 0 if self.ring is None else self.ring.forget(before_s)

    def close(self) -> None:
        """The camera goes."""
        self.latest.forget()
        if self.ring is not None:
            self.ring.close()


class _Watched:
    """A source that shows a ring what it yields."""

    def __init__(self, source: Source, ring: PacketRing) -> None:
        self._source = source
        self._ring = ring
        self.live = source.live
        self.pushed = source.pushed

    @property
    def ended(self) -> bool:
        return self._source.ended

    def open(self) -> StreamHeader:
        header = self._source.open()
        self._ring.open(header)
        return header

    def packets(self) -> Iterator[EncodedPacket]:
        watched = True
        try:
            for packet in self._source.packets():
                if watched:
                    watched = self._take(packet)
                yield packet
        finally:
            self._ring.pause("the video ended" if self._source.ended else "the connection to the camera was lost")

    def _take(self, packet: EncodedPacket) -> bool:
        try:
            self._ring.take(packet)
        except Exception:
            # Whatever is wrong with clips, the camera itself goes on.
            log.exception("no clips of this camera until it connects again")
            self._ring.forget()
            return False
        return True

    def close(self) -> None:
        self._source.close()
