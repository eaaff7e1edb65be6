"""Lazy decoding: quiet packets are held, and decoded only if something happens before the next keyframe.

An encoder spends bits on what changes. The size of a quiet picture depends on its type, its layer and its position
after the keyframe; it is learned per camera from pictures the pruner found unchanged. The excess over that size, as a
share of the size of the camera's last keyframe, estimates the *changed area* as a share of the picture: new content
costs about as much as in a keyframe. Sizes are normalised to one QP by ``2 ** (qp / 6)``: the quantiser step doubles
every 6 (H.264 §8.5.9, H.265 §8.6.4), and the bits of a residual are about inversely proportional to it.

The thresholds on the changed area are absolute. Where quiet pictures vary by more (sensor noise, constant bit rate),
they exceed them without any event. Rate control evens such pictures out over seconds, so within the camera's own spread
the mean over ``SLOW_S`` decides instead: a lasting change is detected that much later, and decoded from its first
picture. If that mean exceeds its threshold as well, the next keyframe decides: shortly before one, packets in doubt are
held, and their samples wait until the keyframe shows whether anything has changed.
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
"""Changed area above which a picture counts as active: two patch groups of a model's grid."""
MEAN_AREA = 0.004
"""Threshold on the running mean of the changed area."""
MEAN_WEIGHT = 0.3
"""Weight of the newest picture in the running mean."""
SLOW_AREA, SLOW_S = 0.004, 2.0
"""Threshold on the mean over ``SLOW_S`` seconds, which decides where pictures exceed the other two; samples are then
delayed by ``SLOW_S``."""
SPREAD, SPREAD_MEMORY, SPREAD_LEAST = 2.0, 512, 64
"""A picture is active in any case above ``SPREAD`` times the largest area of the last ``SPREAD_MEMORY`` unchanged
pictures, once there are ``SPREAD_LEAST``."""

LEARN_SAMPLES = 12
"""Samples seen before any packet is held."""
CALM_SAMPLES = 4
"""Consecutive unchanged samples before packets are held: a detected event is decoded to its end."""
CLASS_MEMORY, CLASS_LEAST = 48, 4
"""Quiet pictures remembered per class, and the fewest needed to judge another."""
MOST_CLASSES = 64

CHECK_GOPS = 16
"""One GOP in ``CHECK_GOPS`` is decoded whole, to compare the packets' verdict with the pruner's."""
HISTORY, MOST_MISSED = 32, 2
"""Number of recent verdicts, and of wrong ones tolerated among them; beyond that lazy decoding is suspended."""
BACKOFF, LONGEST_BACKOFF = 1200, 172_800
"""Samples for which it is suspended, doubled each time (ten minutes to a day at 2 FPS)."""

HELD_BYTES = 8 * 2**20
HELD_PACKETS = 1024
HELD_S = 10.0
"""Limits on held packets; beyond them, they are decoded."""
STEP_S = 1.0
"""A packet is decoded if the clock advanced by more than this since the last one, or not at all."""

LAZY_EVENTS = ("waited", "found", "missed", "overflow")
"""Packets in doubt waited for a keyframe; it showed change; change was found in packets judged quiet; a limit on held
packets was reached."""

_PENDING = 512
_PLACES = (1, 2, 3, 4, 6, 9, 15, 25, 40, 60, 100)
_PictureClass = tuple[str, bool, int, int]


class QuietModel:
    """Sizes of one camera's unchanged pictures by class, in normalised bits. Bounded memory."""

    def __init__(self) -> None:
        self._sizes: dict[_PictureClass, deque[float]] = {}
        self._keyframe = math.inf
        self._place = 0
        self._pending: deque[tuple[_PictureClass, float, float, float]] = deque(maxlen=_PENDING)
        self._mean = self._slow = 0.0
        self._areas: deque[tuple[float, float]] = deque(maxlen=SPREAD_MEMORY)

    def start_group(self, size: float) -> None:
        """Start a GOP with a keyframe of this size."""
        self._keyframe = max(1.0, size)
        self._place = 0
        self._mean = self._slow = 0.0

    def add(self, picture: CodedPicture, size: float, weight: float) -> tuple[float, float, float]:
        """Changed area of the next picture, its running mean and its mean over seconds, as shares of the picture;
        infinite for an unknown class, or before a keyframe. ``weight``: of the picture in the mean over seconds."""
        self._place += 1
        key = picture.kind, picture.reference, picture.layer, bisect.bisect_left(_PLACES, self._place)
        known = self._sizes.get(key)
        # Without a keyframe there is no reference size: streams with gradual refresh have none.
        if known is None or len(known) < CLASS_LEAST or math.isinf(self._keyframe):
            self._pending.append((key, size, 0.0, 0.0))
            return math.inf, math.inf, math.inf
        area = (size - median(known)) / self._keyframe
        # Bounded below: one unusually small picture must not mask those after it.
        self._mean += MEAN_WEIGHT * (max(area, -AREA) - self._mean)
        # Sizes of quiet pictures are skewed: a mean of them must be compared with their mean, not their median.
        self._slow += weight * ((size - fmean(known)) / self._keyframe - self._slow)
        self._pending.append((key, size, area, self._mean))
        return area, self._mean, self._slow

    def forget(self) -> None:
        """Forget everything but the size of the last keyframe."""
        self._sizes.clear()
        self._areas.clear()
        self._pending.clear()

    def spread(self) -> tuple[float, float]:
        """Area and running mean above which a picture is active in any case, from this camera's unchanged pictures."""
        if len(self._areas) < SPREAD_LEAST:
            return AREA, MEAN_AREA
        area, mean = (SPREAD * max(each) for each in zip(*self._areas, strict=True))
        return max(AREA, area), max(MEAN_AREA, mean)

    def label(self, changed: bool) -> None:
        """Label the pictures since the last call with the pruner's verdict; only unchanged ones are learned from."""
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
    """Decides for every packet of a camera whether to hold it; holds packets and their times. Used from one thread.

    :meth:`holds` judges a packet. The caller then either appends it with :meth:`hold`, or decodes the packets that
    :meth:`release` returns and then this one. At a keyframe :meth:`skip` drops the held packets; if :attr:`unsure`,
    only when the keyframe shows no change. :meth:`label` reports the pruner's verdict.

    A packet above all thresholds but within the camera's spread is held if the next keyframe is expected within
    ``wait_s``. From that packet on samples wait for the keyframe, so that none is reported unchanged too early.

    Verdicts are checked against the next decoded sample (the next keyframe, or one of a GOP decoded as a check). When
    it shows change in more than ``MOST_MISSED`` of ``HISTORY`` cases, everything is decoded for ``BACKOFF`` samples.
    """

    wait_s: float = 0.0
    """Longest time, in seconds, that samples may wait for a keyframe; 0 never holds packets in doubt."""
    spared: int = 0
    """Packets dropped undecoded."""
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAZY_EVENTS, 0))
    """Counts of :data:`LAZY_EVENTS`."""
    held_bytes: int = 0
    active: bool = False
    """Whether the last packet judged has to be decoded and shown: it is neither quiet nor in doubt."""
    keyframe: bool = False
    """Whether the last packet judged is an I-frame at which decoding can start."""
    set_back: bool = False
    """Whether the camera's clock went back, or stood still, before the last packet judged: times repeat."""
    waiting_since: int | None = None
    """Decoding time since which samples of held packets wait for a keyframe, None if they do not."""

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
        """Start another session of the camera: drops the held packets, keeps what was learned."""
        self._headers = SliceHeaders(codec, parameter_sets)
        self._last_given = self._decoded = self._group_start = self._group_length = None
        self._clock.restart()
        self.clear()

    def learn_from(self, stream: tuple[str, int, int]) -> None:
        """Set codec, width and height of the coming pictures; another stream's sizes are forgotten."""
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
        """Whether samples of held packets are delayed, because their sizes alone do not show them to be quiet."""
        return self.waiting_since is not None or self._lags_from is not None

    @property
    def holding(self) -> int:
        return len(self._held)

    def holds(self, each: FramedPacket) -> bool:
        """Judge the next packet in decoding order; returns whether to hold it."""
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
        self.active, self.keyframe = True, False
        if picture is None or packet.pts is None or packet.discard:
            self._doubted = True
            return False
        last, decoded = self._decoded, self._clock.advance(packet.pts)
        self._decoded = decoded
        size = 8 * picture_bytes(packet.codec, data) * 2.0 ** ((picture.qp - 26) / 6)
        self.keyframe = packet.keyframe and picture.kind == "I"
        if self.keyframe:
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
            # Computed only here: it scans hundreds of pictures, and few packets need it.
            most_area, most_mean = self._model.spread()
            outside = area > most_area or mean > most_mean
        believed = quiet or (not outside and slow <= SLOW_AREA and self.wait_s > 0)
        self._doubted |= not believed
        self.active = not believed and (outside or not self._keyframe_is_near(decoded))
        if self.active or not 0.0 < step_s <= STEP_S or self.state != "on" or self._calm < CALM_SAMPLES:
            return False
        self._claimed |= believed
        if self._check or not self._within_bounds(decoded, len(data)):
            return False
        if not quiet and self._lags_from is None:
            self._lags_from = decoded
        if not believed and self.waiting_since is None:
            self.waiting_since = decoded
            self.events["waited"] += 1
        return True

    def hold(self, packet: FramedPacket) -> list[int]:
        """Hold a packet; returns the times of held pictures due for display, in ascending microseconds. If
        :attr:`unsure`, they are due with a delay of up to ``wait_s``."""
        self._held.append(packet)
        self.held_bytes += len(packet.data)
        if packet.packet.pts is not None:
            heapq.heappush(self._times, packet.packet.pts)
        shown = self._decoded
        if self.unsure and shown is not None:
            shown -= round((min(SLOW_S, self.wait_s) if self.waiting_since is None else self.wait_s) * MICROSECONDS)
        return self._shown_before(shown)

    def release(self) -> list[FramedPacket]:
        """Remove and return the held packets, in decoding order, for decoding."""
        held = list(self._held)
        if held:
            self._released = self._doubted = True
        self.clear()
        return held

    def skip(self) -> list[int]:
        """Drop the held packets as quiet; returns the times of their pictures not yet shown."""
        self.spared += len(self._held)
        times = self._shown_before(None)
        self.clear()
        return times

    def clear(self) -> None:
        self._held.clear()
        self._times.clear()
        self.held_bytes = 0
        self.waiting_since = self._lags_from = None

    def label(self, changed: bool) -> None:
        """Learn from the pruner's verdict on a decoded sample, and check the packets' verdict against it."""
        self._samples += 1
        self._calm = 0 if changed else self._calm + 1
        if self._held:
            # The sample precedes the held pictures.
            return
        if self._released:
            # Released packets yield several samples: label their pictures only after the last one.
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
            # Strictly less: a picture that has waited wait_s would be shown.
            and (self.waiting_since is None or decoded - self.waiting_since < self.wait_s * MICROSECONDS)
            # Packets accepted by the slow mean only are decoded within a stride, or at a keyframe expected soon.
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
        """Whether the next keyframe is expected within ``wait_s``, assuming a GOP as long as the last one."""
        if self._group_start is None or self._group_length is None:
            return False
        return 0 < self._group_start + self._group_length - decoded <= self.wait_s * MICROSECONDS

    def _shown_before(self, time: int | None) -> list[int]:
        """Remove and return the times of held pictures up to ``time``, or all for None."""
        times = []
        while self._times and (time is None or self._times[0] <= time):
            times.append(heapq.heappop(self._times))
        return times
