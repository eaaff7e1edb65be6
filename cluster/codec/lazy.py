"""Lazy decoding: packets in which nothing happens are held, and decoded only if something does before a keyframe.

An encoder spends bits on what changes. How many a quiet picture costs depends on its type, its layer and its place
after the keyframe, and is learned per camera from pictures that the pruner found unchanged. What a picture costs beyond
that, as a share of what the camera's own last keyframe cost, estimates the *changed area*, a share of the picture:
content that is new costs about what it costs in a keyframe. Sizes are normalised to one quantiser by ``2 ** (qp / 6)``,
since the quantiser's step doubles every 6 (H.264 §8.5.9, H.265 §8.6.4) and the bits of a residual are about inversely
proportional to it.

The thresholds on that area are absolute. A camera whose quiet pictures vary by more (sensor noise, constant bit rate)
exceeds them by itself, so that noise costs savings and never change.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from cluster.codec.nal import CodedPicture
from cluster.codec.slice_header import SliceHeaders
from cluster.types import MICROSECONDS, EncodedPacket

AREA = 0.008
"""Changed area of one picture above which something happens: two groups of patches of a model's grid."""
MEAN_AREA = 0.004
"""The same of the running mean."""
MEAN_WEIGHT = 0.3
"""Weight of the newest picture in the running mean."""

LEARN_SAMPLES = 20
"""Samples seen before anything is held."""
CALM_SAMPLES = 4
"""Unchanged samples in a row before anything is held: an event that has been seen is decoded to its end."""
CLASS_MEMORY, CLASS_LEAST = 24, 4
"""Quiet pictures remembered per class, and how many it takes to judge one."""
MOST_CLASSES = 64

CHECK_GOPS = 16
"""One GOP in so many is decoded whole; what the packets said is compared with what the pruner finds."""
HISTORY, MOST_MISSED = 32, 2
"""Of the last verdicts, how many may have been wrong; with one more the packets are not believed."""
DISTRUST, LONGEST_DISTRUST = 1200, 172_800
"""For how many samples not (ten minutes, a day at 2 a second); doubled each time."""

HELD_BYTES = 8 * 2**20
HELD_PACKETS = 1024
HELD_S = 10.0
"""Bounds of what is held; beyond them it is decoded."""
STEP_S = 1.0
"""A longer step of the clock between two packets is not held."""

_PENDING = 512
_PLACES = (1, 2, 3, 4, 6, 9, 15)
_PictureClass = tuple[str, bool, int, int]


@dataclass(frozen=True, slots=True)
class HeldPacket:
    """An undecoded packet: with its data in the decoder's framing, and whether others may refer to it."""

    packet: EncodedPacket
    data: bytes
    reference: bool


class QuietModel:
    """What unchanged pictures of one camera cost, by class; sizes in normalised bits. Bounded."""

    def __init__(self) -> None:
        self._sizes: dict[_PictureClass, deque[float]] = {}
        self._keyframe = math.inf
        self._place = 0
        self._pending: deque[tuple[_PictureClass, float]] = deque(maxlen=_PENDING)
        self._mean = 0.0

    def start_group(self, size: float) -> None:
        """A keyframe of this size."""
        self._keyframe = max(1.0, size)
        self._place = 0
        self._mean = 0.0

    def add(self, picture: CodedPicture, size: float) -> tuple[float, float]:
        """Changed area of the next picture and its running mean, 0..1; infinite for an unknown class."""
        self._place += 1
        place = next((index for index, last in enumerate(_PLACES) if self._place <= last), len(_PLACES))
        key = picture.kind, picture.reference, picture.layer, place
        self._pending.append((key, size))
        known = self._sizes.get(key)
        if known is None or len(known) < CLASS_LEAST:
            return math.inf, math.inf
        area = (size - median(known)) / self._keyframe
        # Bounded below: a picture that came out small must not hide the next ones.
        self._mean += MEAN_WEIGHT * (max(area, -AREA) - self._mean)
        return area, self._mean

    def label(self, changed: bool) -> None:
        """What the pruner found of the pictures since the last label; only unchanged ones are learned from."""
        if not changed:
            for key, size in self._pending:
                sizes = self._sizes.get(key)
                if sizes is None:
                    if len(self._sizes) == MOST_CLASSES:
                        self._sizes.clear()
                    sizes = self._sizes[key] = deque(maxlen=CLASS_MEMORY)
                sizes.append(size)
        self._pending.clear()


@dataclass(slots=True)
class LazyDecode:
    """Decides for every packet of a camera whether it is held; holds packets and their times. One thread.

    :meth:`holds` judges a packet. The caller then appends it (:meth:`hold`), or decodes what :meth:`release` returns
    before it. At a keyframe :meth:`skip` drops what is held. :meth:`label` tells what the pruner found.

    Packets are believed until a sample decoded after them (the next keyframe, or those of a GOP decoded as a check)
    shows change in more than ``MOST_MISSED`` of ``HISTORY`` cases; then everything is decoded for ``DISTRUST``
    samples.
    """

    spared: int = 0
    """Packets dropped undecoded."""
    overflows: int = 0
    """Times that a bound of what is held was reached."""
    missed: int = 0
    """Times that change was found which the packets had not told."""
    held_bytes: int = 0
    told: bool = False
    """Whether something happens in the packet judged last."""
    restarts: bool = False
    """Whether it is an I-frame that needs nothing before it."""

    _headers: SliceHeaders = field(init=False)
    _model: QuietModel = field(default_factory=QuietModel)
    _held: deque[HeldPacket] = field(default_factory=deque)
    _times: list[int] = field(default_factory=list)
    _last_pts: int | None = None
    _samples: int = 0
    _calm: int = 0
    _groups: int = 0
    _check: bool = False
    _claimed: bool = False
    _doubted: bool = False
    _verdicts: deque[bool] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _distrust: int = field(default_factory=lambda: DISTRUST)
    _distrusted: int = 0

    def open(self, codec: str, parameter_sets: bytes) -> None:
        """Another stream of the camera; what is held of the last one is gone, what was learned stays."""
        self._headers = SliceHeaders(codec, parameter_sets)
        self._last_pts = None
        self.clear()

    @property
    def state(self) -> str:
        """``learning``, ``on`` or ``distrusted``."""
        if self._distrusted:
            return "distrusted"
        return "learning" if self._samples < LEARN_SAMPLES else "on"

    @property
    def holding(self) -> int:
        """Packets held."""
        return len(self._held)

    def holds(self, packet: EncodedPacket, data: bytes) -> bool:
        """Judge the next packet in decoding order: whether nothing happens in it, and it may be held."""
        picture, last = self._headers.read(data), self._last_pts
        self._last_pts = packet.pts
        self.told, self.restarts = True, False
        if picture is None or packet.pts is None:
            self._doubted = True
            return False
        size = 8 * len(data) * 2.0 ** ((picture.qp - 26) / 6)
        self.restarts = packet.keyframe and picture.kind == "I"
        if self.restarts:
            self._model.start_group(size)
            self._groups += 1
            self._check = self._groups % CHECK_GOPS == 0
            return False
        area, mean = self._model.add(picture, size)
        self.told = area > AREA or mean > MEAN_AREA
        if self.told:
            self._doubted = True
            return False
        regular = last is not None and abs(packet.pts - last) <= STEP_S * MICROSECONDS
        if not regular or self.state != "on" or self._calm < CALM_SAMPLES:
            return False
        self._claimed = True
        return not self._check and self._within_bounds(packet.pts, len(data))

    def hold(self, packet: HeldPacket) -> list[int]:
        """Hold a packet; returns the times of held pictures that would now be shown, ascending microseconds."""
        self._held.append(packet)
        self.held_bytes += len(packet.data)
        if packet.packet.pts is not None:
            heapq.heappush(self._times, packet.packet.pts)
        return self._shown_before(packet.packet.dts)

    def release(self) -> list[HeldPacket]:
        """What is held, in decoding order, to be decoded now."""
        held = list(self._held)
        self.clear()
        return held

    def skip(self) -> list[int]:
        """Drop what is held, as nothing happened in it; returns the remaining times of its pictures."""
        self.spared += len(self._held)
        times = self._shown_before(None)
        self.clear()
        return times

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()
        self._times.clear()
        self.held_bytes = 0

    def label(self, changed: bool) -> None:
        """What the pruner found in a decoded sample, against what the packets before it said."""
        self._samples += 1
        self._calm = 0 if changed else self._calm + 1
        if self._held:
            # A picture before those that are held.
            return
        self._model.label(changed)
        self._distrusted = max(0, self._distrusted - 1)
        judged = self._claimed and not self._doubted
        self._claimed = self._doubted = False
        if not judged:
            return
        self._verdicts.append(changed)
        self.missed += changed
        if sum(self._verdicts) > MOST_MISSED:
            self._verdicts.clear()
            self._distrusted = self._distrust
            self._distrust = min(2 * self._distrust, LONGEST_DISTRUST)

    def _within_bounds(self, pts: int, size: int) -> bool:
        first = self._held[0].packet.pts if self._held else None
        if (
            self.held_bytes + size <= HELD_BYTES
            and len(self._held) < HELD_PACKETS
            and (first is None or pts - first <= HELD_S * MICROSECONDS)
        ):
            return True
        self.overflows += 1
        return False

    def _shown_before(self, dts: int | None) -> list[int]:
        """Times of held pictures up to ``dts``: later packets come later; all of them for None."""
        times = []
        while self._times and (dts is None or self._times[0] <= dts):
            times.append(heapq.heappop(self._times))
        return times
