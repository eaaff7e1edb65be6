"""Footage that a decoder process holds of one camera: its newest picture and its packet ring."""

import logging
from collections.abc import Sequence

from cluster.codec.decoder import DECODED_BYTES
from cluster.codec.privacy import Polygon, PrivacyMasks
from cluster.codec.source import StreamHeader
from cluster.config import CameraConfig, SightlineConfig, camera_settings
from cluster.decoder.footage.clip import Painter
from cluster.decoder.footage.pictures import LatestPicture
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.types import BoolGrid, EncodedPacket, ShownPicture
from cluster.types.cameras import several_cameras

log = logging.getLogger(__name__)


class CameraFootage:
    """Footage of one camera. ``ring``: None if clips are off. ``masks``: privacy masks. ``decoded_bytes``: memory limit
    for pictures decoded for stills and clips."""

    def __init__(
        self, ring: PacketRing | None = None, masks: Sequence[Polygon] = (), decoded_bytes: int = DECODED_BYTES
    ) -> None:
        self.latest = LatestPicture()
        self.ring = ring
        self.decoded_bytes = decoded_bytes
        self._masks = tuple(masks)
        self._shortage_logged = self._watched = False

    def make_painter(self) -> Painter | None:
        """New mask painter, one per clip or still as it is not thread-safe; None without masks."""
        return PrivacyMasks(self._masks).apply if self._masks else None

    # -- the camera's thread --------------------------------------------------------------------
    def open(self, header: StreamHeader) -> None:
        """Start a connection of the camera."""
        self._watched = self.ring is not None
        if self.ring is not None:
            self.ring.open(header)

    def add_packet(self, packet: EncodedPacket) -> None:
        """Add a packet of the source, before it is decoded."""
        if not self._watched or self.ring is None:
            return
        try:
            self.ring.add_packet(packet)
        except Exception:
            # An error of the ring must not stop the camera.
            log.exception("no clips of this camera until it reconnects")
            self.ring.delete_before()
            self._watched = False

    def pause(self, why: str) -> None:
        """Note that no packets will arrive until the camera reconnects."""
        if self.ring is not None:
            self.ring.pause(why)

    def show(self, picture: ShownPicture, mask: BoolGrid, at_s: float) -> None:
        """Set the newest decoded sample, its frame's kept patches, and when it was decoded, in monotonic seconds; keeps
        at most a reference."""
        self.latest.show(picture, mask, at_s)

    # -- any thread -----------------------------------------------------------------------------
    def shortage(self, name: str) -> str:
        """Why clips of this camera, called ``name``, begin late; empty if they do not. Logged once, with figures."""
        if self.ring is None or not self.ring.short:
            return ""
        if not self._shortage_logged:
            self._shortage_logged = True
            log.warning("camera %s: %s", name, self.ring.shortage())
        return f"clips begin late: {self.ring.short} is too small"

    def delete_before(self, before_s: float = 0.0) -> int:
        """Delete footage older than ``before_s`` seconds; returns the bytes of packets deleted."""
        # Regardless of its age: the next sample replaces it shortly.
        self.latest.clear()
        return 0 if self.ring is None else self.ring.delete_before(before_s)

    def close(self) -> None:
        self.latest.clear()
        if self.ring is not None:
            self.ring.close()


TYPICAL_BITS_PER_S = 4_000_000
"""Bit rate of a typical camera: 1080p, 15 to 25 FPS."""
GROUP_S = 2.0
"""Extra seconds for holding whole GOPs, assuming a keyframe every two seconds."""
MB = 1_000_000


def clip_lookback_s(settings: CameraConfig, config: SightlineConfig, stride_s: float | None = None) -> float:
    """Seconds that a clip reaches back from the opening of its incident: to the first positive window, plus the
    configured lead and the longest delay of an answer. ``stride_s``: current stride, if not that of ``settings``."""
    stride_s = settings.window.stride_s if stride_s is None else stride_s
    asked = max((question.consecutive or 0 for question in settings.questions), default=0)
    windows_s = settings.window.length_s + (max(asked, config.alerts.consecutive) - 1) * stride_s
    # A window is dropped once window_queue newer ones wait; its answer may take one more stride.
    late_s = (config.cluster.window_queue + 1) * stride_s
    return min(config.clips.before_s + windows_s, config.clips.longest_s) + late_s


def camera_footage(settings: CameraConfig, config: SightlineConfig, rings: RingBudget | None) -> CameraFootage:
    """Create a camera's footage buffers; without a packet ring if ``rings`` is None or clips are off."""
    ring = None
    if rings is not None and config.clips.enabled and config.alerts.enabled:
        ring = PacketRing(clip_lookback_s(settings, config), config.clips.ring_camera_bytes, rings)
    return CameraFootage(ring, settings.privacy_masks, settings.source_options.decoded_bytes)


def footage_bytes(seconds: float) -> int:
    """Bytes of this many seconds of a typical camera, in whole GOPs."""
    return round((seconds + GROUP_S) * TYPICAL_BITS_PER_S / 8)


def clip_shortages(config: SightlineConfig) -> list[str]:
    """Reasons why clips of typical cameras will begin late, one sentence each."""
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
            f"clips of {several_cameras(large)} will begin late if they send {rate} or more: their packets take up to "
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
