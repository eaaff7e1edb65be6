"""Lazy decoding: packets in which nothing happens are held, and decoded only if something does before a keyframe.

An encoder spends bits on what changes. How many a quiet picture costs depends on its type, its layer and its place
after the keyframe, and is learned per camera from pictures that the pruner found unchanged. What a picture costs beyond
that, as a share of what the camera's own last keyframe cost, estimates the *changed area*, a share of the picture:
content that is new costs about what it costs in a keyframe. Sizes are normalised to one quantiser by ``2 ** (qp / 6)``,
since the quantiser's step doubles every 6 (H.264 §8.5.9, H.265 §8.6.4) and the bits of a residual are about inversely
proportional to it.

The thresholds on that area are absolute. A camera whose quiet pictures vary by more (sensor noise, constant bit rate)
exceeds them by itself. Rate control levels such pictures out over seconds, so up to the camera's own spread their mean
over ``SLOW_S`` is judged instead: what comes and stays is told that much later, and decoded from its first picture on.
Where that exceeds its threshold too, the next keyframe is the witness: packets are held without being believed, shortly
before a keyframe that shows whether anything has changed; their samples wait for it.
"""

import bisect
import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

from cluster.codec.nal import CodedPicture, picture_bytes
from cluster.codec.processor import FramedPacket
from cluster.codec.slice_header import SliceHeaders
from cluster.codec.timeline import DecodingClock
from cluster.types import MICROSECONDS

AREA = 0.008
"""Changed area of one picture above which something happens: two groups of patches of a model's grid."""
MEAN_AREA = 0.004
"""The same of the running mean."""
MEAN_WEIGHT = 0.3
"""Weight of the newest picture in the running mean."""
SLOW_AREA, SLOW_S = 0.004, 2.0
"""The same of the mean over seconds, which decides where pictures exceed the other two; how many seconds, and how long
samples wait for it."""
SPREAD, SPREAD_MEMORY, SPREAD_LEAST = 2.0, 512, 64
"""What exceeds the largest area of the last ``SPREAD_MEMORY`` unchanged pictures by this factor happens in any case."""

LEARN_SAMPLES = 12
"""Samples seen before anything is held."""
CALM_SAMPLES = 4
"""Unchanged samples in a row before anything is held: an event that has been seen is decoded to its end."""
CLASS_MEMORY, CLASS_LEAST = 48, 4
"""Quiet pictures remembered per class, and how many it takes to judge one."""
MOST_CLASSES = 64

CHECK_GOPS = 16
"""One GOP in so many is decoded whole; what the packets said is compared with what the pruner finds."""
HISTORY, MOST_MISSED = 32, 2
"""Of the last verdicts, how many may have been wrong; with one more the packets are not believed."""
BACKOFF, LONGEST_BACKOFF = 1200, 172_800
"""For how many samples not (ten minutes, a day at 2 a second); doubled each time."""

HELD_BYTES = 8 * 2**20
HELD_PACKETS = 1024
HELD_S = 10.0
"""Bounds of what is held; beyond them it is decoded."""
STEP_S = 1.0
"""A longer step of the clock between two packets is not held, nor one of nothing."""

LAZY_EVENTS = ("waited", "found", "missed", "overflow")
"""A keyframe was waited for; it showed change; change was found that packets had not told; a bound of what is held was
reached."""

_PENDING = 512
_PLACES = (1, 2, 3, 4, 6, 9, 15, 25, 40, 60, 100)
_PictureClass = tuple[str, bool, int, int]


class QuietModel:
    """What unchanged pictures of one camera cost, by class; sizes in normalised bits. Bounded."""

    def __init__(self) -> None:
        self._sizes: dict[_PictureClass, deque[float]] = {}
        self._keyframe = math.inf
        self._place = 0
        self._pending: deque[tuple[_PictureClass, float, float, float]] = deque(maxlen=_PENDING)
        self._mean = self._slow = 0.0
        self._areas: deque[tuple[float, float]] = deque(maxlen=SPREAD_MEMORY)

    def start_group(self, size: float) -> None:
        """A keyframe of this size."""
        self._keyframe = max(1.0, size)
        self._place = 0
        self._mean = self._slow = 0.0

    def add(self, picture: CodedPicture, size: float, weight: float) -> tuple[float, float, float]:
        """Changed area of the next picture, its running mean and its mean over seconds, 0..1; infinite for an unknown
        class, or before a keyframe. ``weight``: of the picture in the last one."""
        self._place += 1
        key = picture.kind, picture.reference, picture.layer, bisect.bisect_left(_PLACES, self._place)
        known = self._sizes.get(key)
        # Without a keyframe there is nothing to compare with: pictures may be refreshed bit by bit.
        if known is None or len(known) < CLASS_LEAST or math.isinf(self._keyframe):
            self._pending.append((key, size, 0.0, 0.0))
            return math.inf, math.inf, math.inf
        area = (size - median(known)) / self._keyframe
        # Bounded below: a picture that came out small must not hide the next ones.
        self._mean += MEAN_WEIGHT * (max(area, -AREA) - self._mean)
        # Sizes of quiet pictures are skewed: their mean is what a mean of them has to be compared with.
        self._slow += weight * ((size - fmean(known)) / self._keyframe - self._slow)
        self._pending.append((key, size, area, self._mean))
        return area, self._mean, self._slow

    def forget(self) -> None:
        """Forget all but the newest keyframe."""
        self._sizes.clear()
        self._areas.clear()
        self._pending.clear()

    def spread(self) -> tuple[float, float]:
        """Area and running mean that unchanged pictures of this camera stay below."""
        if len(self._areas) < SPREAD_LEAST:
            return AREA, MEAN_AREA
        area, mean = (SPREAD * max(each) for each in zip(*self._areas, strict=True))
        return max(AREA, area), max(MEAN_AREA, mean)

    def label(self, changed: bool) -> None:
        """What the pruner found of the pictures since the last label; only unchanged ones are learned from."""
        if not changed:
            for key, size, area, mean in self._pending:
                self._areas.append((area, mean))
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
    before it. At a keyframe :meth:`skip` drops what is held; where it ``waits``, only if the keyframe shows no change.
    :meth:`label` tells what the pruner found.

    A packet above all thresholds and within the camera's spread is held if the next keyframe is expected within
    ``wait_s``. Samples from there on wait for it, so that none is told unchanged before it is known to be.

    Packets are believed until a sample decoded after them (the next keyframe, or those of a GOP decoded as a check)
    shows change in more than ``MOST_MISSED`` of ``HISTORY`` cases; then everything is decoded for ``BACKOFF``
    samples.
    """

    wait_s: float = 0.0
    """Longest that samples may wait for a keyframe; 0 never holds what is in doubt."""
    spared: int = 0
    """Packets dropped undecoded."""
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAZY_EVENTS, 0))
    """Counts of :data:`LAZY_EVENTS`."""
    held_bytes: int = 0
    told: bool = False
    """Whether something happens in the packet judged last."""
    restarts: bool = False
    """Whether it is an I-frame that needs nothing before it."""
    set_back: bool = False
    """Whether the camera's clock went back before it, or stood still: times come again."""
    waits_from: int | None = None
    """Since when samples of what is held wait for a keyframe, if they do."""

    _headers: SliceHeaders = field(init=False)
    _stream: tuple[str, int, int] | None = None
    _model: QuietModel = field(default_factory=QuietModel)
    _held: deque[FramedPacket] = field(default_factory=deque)
    _times: list[int] = field(default_factory=list)
    _clock: DecodingClock = field(default_factory=DecodingClock)
    _last_given: int | None = None
    _decoded: int | None = None
    _samples: int = 0
    _calm: int = 0
    _groups: int = 0
    _group_start: int | None = None
    _group_length: int | None = None
    _released: bool = False
    _found: bool | None = None
    _lags_from: int | None = None
    _check: bool = False
    _claimed: bool = False
    _doubted: bool = False
    _verdicts: deque[bool] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _backoff: int = field(default_factory=lambda: BACKOFF)
    _backoff_left: int = 0

    def open(self, codec: str, parameter_sets: bytes) -> None:
        """Another session of the camera; what is held of the last one is gone, what was learned stays."""
        self._headers = SliceHeaders(codec, parameter_sets)
        self._last_given = self._decoded = self._group_start = self._group_length = None
        self._clock.restart()
        self.clear()

    def learn_from(self, stream: tuple[str, int, int]) -> None:
        """Codec, width and height of the pictures to come: what those of another stream cost is forgotten."""
        if stream != self._stream:
            self._stream, self._samples, self._calm = stream, 0, 0
            self._model.forget()

    @property
    def state(self) -> str:
        """``learning``, ``on`` or ``suspended``."""
        if self._backoff_left:
            return "suspended"
        return "learning" if self._samples < LEARN_SAMPLES else "on"

    @property
    def unsure(self) -> bool:
        """Whether samples of what is held are still to come, as packets do not tell that nothing has changed."""
        return self.waits_from is not None or self._lags_from is not None

    @property
    def holding(self) -> int:
        return len(self._held)

    def holds(self, each: FramedPacket) -> bool:
        """Judge the next packet in decoding order: whether nothing happens in it, and it may be held."""
        packet, data = each.packet, each.data
        if self._found is not None:
            self._model.label(self._found)
            self._released, self._found = False, None
        picture, given, last_given = self._headers.read(data), packet.decoding_time, self._last_given
        self.set_back = (
            given is not None
            and last_given is not None
            and (given == last_given or given < last_given - STEP_S * MICROSECONDS)
        )
        if self.set_back:
            self._clock.restart()
            self._decoded = None
        self._last_given = given if given is not None else last_given
        self.told, self.restarts = True, False
        if picture is None or packet.pts is None or packet.discard:
            self._doubted = True
            return False
        last, decoded = self._decoded, self._clock.advance(packet.pts)
        self._decoded = decoded
        size = 8 * picture_bytes(packet.codec, data) * 2.0 ** ((picture.qp - 26) / 6)
        self.restarts = packet.keyframe and picture.kind == "I"
        if self.restarts:
            self._model.start_group(size)
            self._groups += 1
            self._check = self._groups % CHECK_GOPS == 0
            if self._group_start is not None:
                self._group_length = decoded - self._group_start
            self._group_start = decoded
            return False
        step_s = 0.0 if last is None else max(0, decoded - last) / MICROSECONDS
        area, mean, slow = self._model.add(picture, size, min(1.0, step_s / SLOW_S))
        quiet = area <= AREA and mean <= MEAN_AREA
        outside = False
        if not quiet:
            # Taken of hundreds of pictures, and wanted for few packets.
            most_area, most_mean = self._model.spread()
            outside = area > most_area or mean > most_mean
        believed = quiet or (not outside and slow <= SLOW_AREA and self.wait_s > 0)
        self._doubted |= not believed
        self.told = not believed and (outside or not self._keyframe_is_near(decoded))
        if self.told or not 0.0 < step_s <= STEP_S or self.state != "on" or self._calm < CALM_SAMPLES:
            return False
        self._claimed |= believed
        if self._check or not self._within_bounds(decoded, len(data)):
            return False
        if not quiet and self._lags_from is None:
            self._lags_from = decoded
        if not believed and self.waits_from is None:
            self.waits_from = decoded
            self.events["waited"] += 1
        return True

    def hold(self, packet: FramedPacket) -> list[int]:
        """Hold a packet; returns the times of held pictures that would now be shown, ascending microseconds, but none
        where they wait."""
        self._held.append(packet)
        self.held_bytes += len(packet.data)
        if packet.packet.pts is not None:
            heapq.heappush(self._times, packet.packet.pts)
        shown = self._decoded
        if self.unsure and shown is not None:
            shown -= round((min(SLOW_S, self.wait_s) if self.waits_from is None else self.wait_s) * MICROSECONDS)
        return self._shown_before(shown)

    def release(self) -> list[FramedPacket]:
        """What is held, in decoding order, to be decoded now."""
        held = list(self._held)
        if held:
            self._released = self._doubted = True
        self.clear()
        return held

    def skip(self) -> list[int]:
        """Drop what is held, as nothing happened in it; returns the remaining times of its pictures."""
        self.spared += len(self._held)
        times = self._shown_before(None)
        self.clear()
        return times

    def clear(self) -> None:
        self._held.clear()
        self._times.clear()
        self.held_bytes = 0
        self.waits_from = self._lags_from = None

    def label(self, changed: bool) -> None:
        """What the pruner found in a decoded sample, against what the packets before it said."""
        self._samples += 1
        self._calm = 0 if changed else self._calm + 1
        if self._held:
            # A picture before those that are held.
            return
        if self._released:
            # Samples of what was held come one by one: the first is no label for the pictures after it.
            self._found = changed or bool(self._found)
        else:
            self._model.label(changed)
        self._backoff_left = max(0, self._backoff_left - 1)
        judged = self._claimed and not self._doubted
        self._claimed = self._doubted = False
        if not judged:
            return
        self._verdicts.append(changed)
        self.events["missed"] += changed
        if sum(self._verdicts) > MOST_MISSED:
            self._verdicts.clear()
            self._backoff_left = self._backoff
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _within_bounds(self, decoded: int, size: int) -> bool:
        first = self._held[0].packet.pts if self._held else None
        if (
            self.held_bytes + size <= HELD_BYTES
            and len(self._held) < HELD_PACKETS
            and (first is None or decoded - first <= HELD_S * MICROSECONDS)
            # Less, as a picture that waited so long would be shown.
            and (self.waits_from is None or decoded - self.waits_from < self.wait_s * MICROSECONDS)
            # What only the mean has told is seen within a stride, or with a keyframe that is near by then.
            and (
                self._lags_from is None
                or decoded - self._lags_from < 2 * self.wait_s * MICROSECONDS
                or self._keyframe_is_near(decoded)
            )
        ):
            return True
        self.events["overflow"] += 1
        return False

    def _keyframe_is_near(self, decoded: int) -> bool:
        """Whether the next keyframe is expected within ``wait_s``, a GOP being as long as the last one."""
        if self._group_start is None or self._group_length is None:
            return False
        return 0 < self._group_start + self._group_length - decoded <= self.wait_s * MICROSECONDS

    def _shown_before(self, time: int | None) -> list[int]:
        """Times of held pictures up to ``time``; all of them for None."""
        times = []
        while self._times and (time is None or self._times[0] <= time):
            times.append(heapq.heappop(self._times))
        return times
