"""How far back a camera's packets must reach for its clips to begin where they should, and how much that takes."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import CameraConfig, SightlineConfig, camera_settings

TYPICAL_BITS_PER_S = 4_000_000
"""Of an ordinary camera: 1080p, 15 to 25 pictures a second."""
GROUP_S = 2.0
"""Whole groups of pictures are held: so much more than wanted, with a keyframe every two seconds."""
MB = 1_000_000


def reach_s(settings: CameraConfig, config: SightlineConfig, stride_s: float | None = None) -> float:
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


def bytes_of(seconds: float, bits_per_s: float = TYPICAL_BITS_PER_S) -> int:
    """Bytes of so many seconds, whole groups of pictures."""
    return round((seconds + GROUP_S) * bits_per_s / 8)


def shortages(config: SightlineConfig) -> list[str]:
    """Why clips of ordinary cameras will begin late, one sentence for each reason; empty where they will not."""
    clips = config.clips
    if not clips.enabled or not config.alerts.enabled:
        return []
    wanted = {entry.name: bytes_of(reach_s(camera_settings(config, entry), config)) for entry in config.cameras}
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
