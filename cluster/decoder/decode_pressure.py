"""Which cameras of a decoder process are down to keyframes, so that the others are decoded in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cluster.types.cameras import Priority

LATE, CALM = 0.5, 0.1
"""Strides that packets wait to be decoded: so many and answers are about to come too late, so few and there is room."""

SHARE = 0.1
"""Of the cameras that are decoded whole, how many give way in one step, and come back in the first; then twice as many
each time, since a burst that is over must not be felt for minutes."""

FALLING = 0.9
"""A backlog that became this much smaller in one step is being worked off: nobody else has to give way."""

SETTLE_S = 4.0
HOLD_S, LONGEST_HOLD_S = 10.0, 600.0

SLOW_S = 60.0
"""A backlog may take so long to show that there was no room for those who came back."""


@dataclass(frozen=True, slots=True)
class DecodeBacklog:
    """One camera: ``behind_s`` seconds that its oldest packet has waited, and how often it is to be answered."""

    camera: str
    priority: Priority
    behind_s: float
    stride_s: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Cameras that change. ``down``: to keyframes; the others are decoded whole again."""

    down: bool
    cameras: tuple[str, ...]
    reason: str


class DecodePressure:
    """Call :meth:`judge` every second or so with all cameras that cannot wait; seconds of any clock.

    Threads that decode share a process's cores evenly, so that all of its cameras fall behind together, and none would
    be answered in time. When the median camera is ``LATE``, a tenth of them give way, background ones first and
    critical ones never, and another tenth after ``SETTLE_S`` unless the backlog shrinks. They come back, the most
    urgent first, after each ``HOLD_S`` of calm, more at a time as it goes on; those for which there was no room after
    all wait twice as long next time.
    """

    def __init__(self) -> None:
        self.behind = 0.0
        """Strides that the median camera is behind, of those that are decoded whole."""
        self._down: list[str] = []
        self._next_s = -math.inf
        self._before = math.inf
        self._calm_since: float | None = None
        self._hold_s = HOLD_S
        self._returned_s = -math.inf
        self._share = SHARE

    @property
    def down(self) -> frozenset[str]:
        """Cameras that are down to keyframes."""
        return frozenset(self._down)

    def decide(self, cameras: Sequence[DecodeBacklog], now_s: float) -> DecodeStep | None:
        """The step to take now, if any; cameras that are not named any more are forgotten."""
        known = {each.camera: each for each in cameras}
        self._down = [name for name in self._down if name in known]
        down = frozenset(self._down)
        whole = [each for each in cameras if each.camera not in down]
        self.behind = median(each.behind_s / each.stride_s for each in whole) if whole else 0.0
        if self.behind > CALM:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now_s
        if self.behind > LATE:
            return self._lower(whole, now_s)
        self._before = math.inf
        if self._down and self._calm_since is not None and now_s - self._calm_since >= self._hold_s:
            return self._raise(known, len(whole), now_s)
        return None

    def _lower(self, whole: Sequence[DecodeBacklog], now_s: float) -> DecodeStep | None:
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
        in_vain = now_s - self._returned_s < self._hold_s + SLOW_S
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if in_vain else HOLD_S
        self._share = SHARE
        self._down += chosen
        return DecodeStep(True, chosen, f"decoding is {self.behind:.1f} strides behind")

    def _raise(self, known: dict[str, DecodeBacklog], whole: int, now_s: float) -> DecodeStep:
        # Of one class those that gave way last: the others were the first because somebody had to be.
        order = sorted(range(len(self._down)), key=lambda place: (known[self._down[place]].priority.rank, -place))
        chosen = tuple(self._down[place] for place in order[: math.ceil(self._share * max(1, whole))])
        self._share *= 2
        self._down = [name for name in self._down if name not in chosen]
        self._calm_since = self._returned_s = now_s
        return DecodeStep(False, chosen, "decoding keeps up")
