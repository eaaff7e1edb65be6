"""What a decoder process holds of one camera for people: its newest picture, and its newest packets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from cluster.codec.privacy import Polygon, PrivacyMasks
from cluster.codec.source import Source, StreamHeader
from cluster.config import CameraConfig, SightlineConfig, camera_settings
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

    def make_painter(self) -> Painter | None:
        """A new one for every clip and still, since one belongs to one thread; None where all may be seen."""
        return PrivacyMasks(self._masks).apply if self._masks else None

    def tap(self, source: Source) -> Source:
        """The same source, whose packets also go into the ring."""
        return source if self.ring is None else _RingTap(source, self.ring)

    def delete_before(self, before_s: float = 0.0) -> int:
        """Everything up to ``before_s`` seconds ago; how many bytes of packets."""
        # Whenever it was: there is another one in a moment.
        self.latest.clear()
        return 0 if self.ring is None else self.ring.delete_before(before_s)

    def close(self) -> None:
        """The camera goes."""
        self.latest.clear()
        if self.ring is not None:
            self.ring.close()


class _RingTap:
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
            self._ring.add_packet(packet)
        except Exception:
            # Whatever is wrong with clips, the camera itself goes on.
            log.exception("no clips of this camera until it connects again")
            self._ring.delete_before()
            return False
        return True

    def close(self) -> None:
        self._source.close()


TYPICAL_BITS_PER_S = 4_000_000
"""Of an ordinary camera: 1080p, 15 to 25 pictures a second."""
GROUP_S = 2.0
"""Whole groups of pictures are held: so much more than wanted, with a keyframe every two seconds."""
MB = 1_000_000


def clip_lookback_s(settings: CameraConfig, config: SightlineConfig, stride_s: float | None = None) -> float:
    """How far back, seconds, when an incident opens: to the first of the windows that opened it, by what a clip shows
    before, and by how late an answer comes at most.

    Args:
        stride_s: of its windows, where that is another one now than in ``settings``.
    """
    stride_s = settings.window.stride_s if stride_s is None else stride_s
    asked = max((question.consecutive or 0 for question in settings.questions), default=0)
    windows_s = settings.window.length_s + (max(asked, config.alerts.consecutive) - 1) * stride_s
    # A window waits for its turn until so many newer ones have come, and then it is dropped; its answer takes one more.
    late_s = (config.cluster.window_queue + 1) * stride_s
    return min(config.clips.before_s + windows_s, config.clips.longest_s) + late_s


def footage_bytes(seconds: float, bits_per_s: float = TYPICAL_BITS_PER_S) -> int:
    """Bytes of so many seconds, whole groups of pictures."""
    return round((seconds + GROUP_S) * bits_per_s / 8)


def clip_shortages(config: SightlineConfig) -> list[str]:
    """Why clips of ordinary cameras will begin late, one sentence for each reason; empty where they will not."""
    clips = config.clips
    if not clips.enabled or not config.alerts.enabled:
        return []
    wanted = {
        entry.name: footage_bytes(clip_lookback_s(camera_settings(config, entry), config)) for entry in config.cameras
    }
    rate = f"{TYPICAL_BITS_PER_S / MB:g} Mbit/s"
    found = []
    if large := [name for name, size in wanted.items() if size > clips.ring_camera_bytes]:
        most = max(wanted[name] for name in large)
        found.append(
            f"clips of {_listed(large)} will begin late if they send {rate} or more: their packets take up to "
            f"{most / MB:.0f} MB, and clips.ring_camera_bytes is {clips.ring_camera_bytes / MB:.0f} MB"
        )
    decoders = config.cluster.decoders
    each = sum(min(size, clips.ring_camera_bytes) for size in wanted.values()) / decoders
    if each > clips.ring_bytes:
        found.append(
            f"clips will begin late if the {len(wanted)} cameras on {decoders} decoders send {rate} each: their "
            f"packets take {each / MB:.0f} MB of a decoder, and clips.ring_bytes is {clips.ring_bytes / MB:.0f} MB"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    if len(names) > 1:
        return f"{len(names)} cameras ({names[0]}, …)"
    return f"camera {names[0]}"
