"""Window accounting of load tests: windows due, answered (and how late), dropped, and unaccounted for.

Times are monotonic seconds of the load generator. A camera's clock starts at 0 with the camera, so that window ends
convert to generator time.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

from cluster.types import MICROSECONDS, Answer, TokenCount

ROUNDING = 0.05
"""Tolerance of a window's end as a share of its stride: camera clocks are rounded, and frames have a duration."""

ALERT_MOMENTS = 16
"""Moments per stride at which an event may begin, for the time to an alert."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A window that was due at ``end_s``. ``seen_s``: arrival of its answer; ``latency_s``: as reported in the answer,
    from the last frame's arrival at the replica."""

    end_s: float
    seen_s: float | None = None
    gated: bool = False
    latency_s: float = 0.0
    tokens: TokenCount | None = None

    @property
    def lag_s(self) -> float:
        """Seconds from the window's end to the answer's arrival at the generator; infinite without an answer."""
        return math.inf if self.seen_s is None else self.seen_s - self.end_s


@dataclass(slots=True)
class CameraWindows:
    """One camera's windows. ``began_s``: zero of its clock; ``from_s``: start of observation if later; ``until_s``:
    its removal, else infinite."""

    name: str
    began_s: float
    stride_s: float
    from_s: float | None = None
    until_s: float = math.inf
    _answers: dict[int, Slot] = field(default_factory=dict)
    _windows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def saw(self, answer: Answer, seen_s: float) -> None:
        """Record an answer; only the first one per window counts."""
        if answer.end not in self._answers:
            end_s = self.began_s + answer.end / MICROSECONDS
            self._answers[answer.end] = Slot(end_s, seen_s, answer.gated, answer.timing.latency_s, answer.tokens)
            self._windows[answer.end] = answer.window, answer.start

    @property
    def seen(self) -> int:
        """Number of answered windows."""
        return len(self._answers)

    def slots(self, until_s: float) -> list[Slot]:
        """All windows due by ``until_s``, answered or not, in order.

        Windows end one stride apart. A gap between answers counts as many missing windows as whole strides fit in; a
        partial stride cut off by a restart was never a window. Nor were windows that the quality ladder left out:
        consecutively numbered windows that overlap are one stride apart, however long it is.
        """
        until_s = min(until_s, self.until_s)
        ends = sorted(self._answers)
        found: list[Slot] = []
        before_s, stride_s = self.began_s if self.from_s is None else self.from_s, self.stride_s
        for end, own_s in zip(ends, self._strides(ends), strict=True):
            slot = self._answers[end]
            longest_s = max(stride_s, own_s or stride_s)
            found += self._missing(before_s, slot.end_s - (1 - ROUNDING) * longest_s, longest_s)
            found.append(slot)
            before_s, stride_s = slot.end_s, own_s or stride_s
        found += self._missing(before_s, until_s, stride_s)
        return [slot for slot in found if slot.end_s <= until_s]

    def most(self, until_s: float) -> int:
        """Upper bound on the windows answered or counted by ``until_s``: those due, one cut short per restart, and the
        last, incomplete one."""
        ends = sorted(self._answers)
        restarts = sum(not self._follows(before, end) for before, end in pairwise(ends))
        return len(self.slots(until_s)) + restarts + 1

    def _strides(self, ends: Sequence[int]) -> list[float | None]:
        """Stride of each window, derived from it or else from the next; None if neither tells. A camera's first window
        is a stride long."""
        number, start = self._windows[ends[0]] if ends else (1, 0)
        first = None if number else max(self.stride_s, (ends[0] - start) / MICROSECONDS)
        own = [
            max(self.stride_s, (end - before) / MICROSECONDS) if self._follows(before, end) else None
            for before, end in pairwise(ends)
        ]
        return [mine or after for mine, after in zip([first, *own], [*own, None], strict=True)][: len(ends)]

    def _follows(self, before: int, end: int) -> bool:
        """Whether two windows are consecutive, without a restart of the camera in between."""
        number, _ = self._windows[before]
        following, start = self._windows[end]
        return following == number + 1 and start <= before

    def on_time_since(self, since_s: float, now_s: float) -> float | None:
        """When the camera recovered from an event at ``since_s``: arrival of the first answer to a window due after it
        from which on no answer was late or missing; None before that.

        A window is late once its answer is overdue by a stride.
        """
        found: float | None = None
        for slot in self.slots(now_s):
            if slot.end_s <= since_s:
                continue
            if slot.seen_s is not None and slot.lag_s <= self.stride_s:
                found = slot.seen_s if found is None else found
            elif slot.seen_s is not None or now_s - slot.end_s > self.stride_s:
                found = None
        return found

    @staticmethod
    def _missing(after_s: float, until_s: float, stride_s: float) -> list[Slot]:
        count = math.floor((until_s - after_s) / stride_s + 1e-9)
        return [Slot(after_s + (number + 1) * stride_s) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Account:
    """All windows of a camera up to some moment.

    * ``due = seen + unseen + given_up + overdue + silent``
    * ``unseen``: answered while nobody was subscribed; ``overdue``: may still be answered at the cluster's current lag
    * ``silent``: neither answered nor counted; ``extra``: answered or counted in excess of the windows there were
    """

    due: int
    seen: int
    unseen: int
    given_up: int
    overdue: int
    silent: int
    extra: int = 0


def account(
    slots: Sequence[Slot],
    seen: int,
    *,
    answered: int = 0,
    given_up: int = 0,
    listened: bool,
    since_s: float = math.inf,
    most: float = math.inf,
) -> Account:
    """Reconcile the windows due with the answers received and the cluster's counters.

    ``answered``: windows that the cluster counts as answered, by model or gate; ``given_up``: dropped on purpose or
    lost. ``listened``: the subscription was never interrupted, so that an answer counted but not received is not
    excused. ``since_s``: windows due later may still be answered, unless one after them was. ``most``: upper bound on
    the windows when the cluster counted (:meth:`CameraWindows.most`).
    """
    may_come = takewhile(lambda slot: slot.seen_s is None and slot.end_s > since_s, reversed(slots))
    overdue = sum(1 for _ in may_come)
    missing = sum(slot.seen_s is None for slot in slots) - overdue
    unseen = 0 if listened else min(missing, max(0, answered - seen))
    excused = min(missing - unseen, given_up)
    silent = missing - unseen - excused
    extra = round(max(0.0, answered + given_up - most))
    return Account(len(slots), len(slots) - missing - overdue, unseen, excused, overdue, silent, extra)


def within(slots: Iterable[Slot], from_s: float, until_s: float) -> list[Slot]:
    """Slots due in ``[from_s, until_s)``."""
    return [slot for slot in slots if from_s <= slot.end_s < until_s]


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least ``share`` of the values do not exceed; NaN if empty. Values may be infinite."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def alert_times(slots: Sequence[Slot], stride_s: float, from_s: float, until_s: float) -> list[float]:
    """Seconds from an event that begins in ``[from_s, until_s)``, at ``ALERT_MOMENTS`` moments per stride, to the first
    answer of a window that contains it; infinite without one."""
    ends = [slot.end_s for slot in slots]
    seen = [math.inf if slot.seen_s is None else slot.seen_s for slot in slots]
    # Earliest answer of this window or any later one.
    first_seen = list(accumulate(reversed(seen), min))[::-1]
    times = []
    step = stride_s / ALERT_MOMENTS
    for number in range(math.floor((until_s - from_s) / step)):
        moment = from_s + (number + 0.5) * step
        place = bisect_left(ends, moment)
        times.append(first_seen[place] - moment if place < len(ends) else math.inf)
    return times
