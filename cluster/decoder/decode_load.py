"""Decoding load of a process: limits concurrent decoding, and reduces cameras to keyframes so that the rest keep up."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cluster.hosts import usable_cores
from cluster.types.cameras import Priority

MOST = 8
"""Most threads of a process that decode at once: under the GIL more gain nothing."""

LATE, CALM = 0.5, 0.1
"""Decode backlog in strides: above ``LATE``, answers are about to be late; up to ``CALM``, there is spare capacity."""

SHARE = 0.1
"""Share of the fully decoded cameras reduced in one step, and restored in the first one. The restored share then
doubles at each step, so that a short burst has no effect for minutes."""

FALLING = 0.9
"""A backlog below this share of the one at the last step is being worked off: no further reduction."""

SETTLE_S = 4.0
HOLD_S, LONGEST_HOLD_S = 10.0, 600.0

SLOW_S = 60.0
"""Seconds, beyond the hold time, within which a new backlog is blamed on the cameras restored last."""


class DecodeGate:
    """FIFO semaphore for decoding: a free slot goes to the thread that has waited longest.

    Without a limit, a hundred late cameras contend for the GIL, and the event loop, which sends frames and heartbeats,
    gets a hundredth of it. ``threading.Semaphore`` is unfair: the thread that releases a slot reacquires it for its
    next packet before any waiting one has woken up.
    """

    def __init__(self, slots: int | None = None) -> None:
        """``slots``: by default the number of cores usable by this process, at most :data:`MOST`."""
        self._slots = self._free = slots or min(usable_cores(), MOST)
        self._busy_s = 0.0
        self._since_s = self._taken_s = time.monotonic()
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._count()
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._count()
                self._free += 1

    def take_busy_share(self) -> float:
        """Mean share of slots in use since the last call."""
        with self._lock:
            self._count()
            busy_s, self._busy_s = self._busy_s, 0.0
            passed_s, self._taken_s = self._since_s - self._taken_s, self._since_s
        return busy_s / (self._slots * passed_s) if passed_s else 0.0

    def _count(self) -> None:
        now_s = time.monotonic()
        self._busy_s += (self._slots - self._free) * (now_s - self._since_s)
        self._since_s = now_s


@dataclass(frozen=True, slots=True)
class DecodeBacklog:
    """Decode backlog of one camera. ``behind_s``: age of its oldest queued packet, or lag of a paced file, in seconds.
    ``decodes``: whether its video needs to be decoded in full."""

    camera: str
    priority: Priority
    behind_s: float
    stride_s: float
    decodes: bool = True

    @property
    def reason(self) -> str:
        """Why the camera's answers are late; empty if they are not."""
        return f"decoding is {self.behind_s:.0f} s behind" if self.behind_s > self.stride_s else ""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Cameras to switch: to keyframes only (``down``), or back to full decoding."""

    down: bool
    cameras: tuple[str, ...]
    reason: str


class DecodePressure:
    """Decides which cameras to reduce to keyframes. Call :meth:`decide` about once a second, on any clock in seconds,
    with all cameras except patient ones.

    Decoding threads share the cores evenly, so all cameras of a process fall behind together and none would be answered
    in time. When the median camera is ``LATE``, a tenth of them are reduced, background ones first and critical ones
    never, and another tenth every ``SETTLE_S`` unless the backlog shrinks. They are restored, the most urgent first,
    after each ``HOLD_S`` without backlog, in growing numbers; if that causes a new backlog, the hold time doubles.
    """

    def __init__(self) -> None:
        self.behind = 0.0
        """Median backlog, in strides, of the fully decoded cameras."""
        self._down: list[str] = []
        self._next_s = -math.inf
        self._before = math.inf
        self._calm_since: float | None = None
        self._hold_s = HOLD_S
        self._returned_s = -math.inf
        self._share = SHARE

    @property
    def down(self) -> frozenset[str]:
        """Cameras that decode keyframes only."""
        return frozenset(self._down)

    def decide(self, cameras: Sequence[DecodeBacklog], now_s: float) -> DecodeStep | None:
        """The step to take now, if any; forgets cameras missing from ``cameras``."""
        known = {each.camera: each for each in cameras}
        self._down = [name for name in self._down if name in known]
        down = frozenset(self._down)
        whole = [each for each in cameras if each.decodes and each.camera not in down]
        self.behind = median(each.behind_s / each.stride_s for each in whole) if whole else 0.0
        if self.behind > CALM:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now_s
        if self.behind > LATE:
            return self._reduce(whole, now_s)
        self._before = math.inf
        if self._down and self._calm_since is not None and now_s - self._calm_since >= self._hold_s:
            return self._restore(known, len(whole), now_s)
        return None

    def _reduce(self, whole: Sequence[DecodeBacklog], now_s: float) -> DecodeStep | None:
        if now_s < self._next_s:
            return None
        self._next_s = now_s + SETTLE_S
        before, self._before = self._before, self.behind
        if self.behind < FALLING * before < math.inf:
            return None
        willing = sorted(
            (each for each in whole if each.priority is not Priority.CRITICAL),
            key=lambda each: (-each.priority.rank, each.camera),
        )
        chosen = tuple(each.camera for each in willing[: math.ceil(SHARE * len(whole))])
        if not chosen:
            return None
        too_early = now_s - self._returned_s < self._hold_s + SLOW_S
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if too_early else HOLD_S
        self._share = SHARE
        self._down += chosen
        return DecodeStep(True, chosen, f"decoding is {self.behind:.1f} strides behind")

    def _restore(self, known: dict[str, DecodeBacklog], whole: int, now_s: float) -> DecodeStep:
        # Within a priority class, restore the most recently reduced first.
        order = sorted(range(len(self._down)), key=lambda place: (known[self._down[place]].priority.rank, -place))
        chosen = tuple(self._down[place] for place in order[: math.ceil(self._share * max(1, whole))])
        self._share *= 2
        self._down = [name for name in self._down if name not in chosen]
        self._calm_since = self._returned_s = now_s
        return DecodeStep(False, chosen, "decoding keeps up")
