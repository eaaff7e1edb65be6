"""The ledger of a load test: which windows were due, which were answered and how late, and which nobody accounts for.

All times are monotonic seconds of the load generator; a camera's own clock begins at 0 when the camera does, so that
the end of a window on that clock is also a moment here.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

from cluster.types import MICROSECONDS, Answer, TokenCount

ROUNDING = 0.05
"""Share of a stride by which a window's end may be off: cameras' clocks are rounded, and frames have a length."""

ALERT_MOMENTS = 16
"""Moments of a stride at which something may begin to happen, for the time to an alert."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A window that was due at ``end_s`` (of the generator's clock): ``seen_s``: when its answer came, if it did;
    ``latency_s``: from its last frame's arrival at the replica, as the answer says."""

    end_s: float
    seen_s: float | None = None
    gated: bool = False
    latency_s: float = 0.0
    tokens: TokenCount | None = None

    @property
    def lag_s(self) -> float:
        """From the window's end to the answer in the generator's hands; infinite without one."""
        return math.inf if self.seen_s is None else self.seen_s - self.end_s


@dataclass(slots=True)
class CameraLedger:
    """One camera. ``began_s``: when its clock was at 0; ``from_s``: since when it can be seen, if not since then;
    ``until_s``: when it left, infinite while it is there."""

    name: str
    began_s: float
    stride_s: float
    from_s: float | None = None
    until_s: float = math.inf
    _answers: dict[int, Slot] = field(default_factory=dict)
    _windows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def saw(self, answer: Answer, seen_s: float) -> None:
        """An answer came; only the first of a window's questions counts."""
        if answer.end not in self._answers:
            end_s = self.began_s + answer.end / MICROSECONDS
            self._answers[answer.end] = Slot(end_s, seen_s, answer.gated, answer.timing.latency_s, answer.tokens)
            self._windows[answer.end] = answer.window, answer.start

    @property
    def seen(self) -> int:
        """Windows whose answer came."""
        return len(self._answers)

    def slots(self, until_s: float) -> list[Slot]:
        """Every window due by ``until_s``, answered or not, in order.

        A window ends one stride after the one before it. Where the answers leave a hole, as many windows are missing as
        whole strides fit in; a piece of a stride that a fresh start cut off was never a window. Nor was what the
        quality ladder leaves out: windows of subsequent numbers that overlap are one stride apart, however long it is.
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
        """Most windows that can have been answered or counted by then: those due, for each time that the cluster began
        anew the one it cut short, and the last, incomplete one."""
        ends = sorted(self._answers)
        anew = sum(not self._follows(before, end) for before, end in pairwise(ends))
        return len(self.slots(until_s)) + anew + 1

    def _strides(self, ends: Sequence[int]) -> list[float | None]:
        """The stride that each of these windows ended by, as far as it, or else the next one, tells."""
        own = [
            max(self.stride_s, (end - before) / MICROSECONDS) if self._follows(before, end) else None
            for before, end in pairwise(ends)
        ]
        return [mine or after for mine, after in zip([None, *own], [*own, None], strict=True)][: len(ends)]

    def _follows(self, before: int, end: int) -> bool:
        """Whether no window of the cluster's lies between two, and the camera did not begin anew."""
        number, _ = self._windows[before]
        following, start = self._windows[end]
        return following == number + 1 and start <= before

    def on_time_since(self, since_s: float, now_s: float) -> float | None:
        """When the camera was on time again after something happened at ``since_s``: the moment of the first answer to
        a window due after it from which on none was late or missing; None while there is no such answer.

        A window counts as late once its answer is overdue by a stride.
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
    * ``unseen``: answered, but nobody was listening; ``overdue``: may still be answered, at the cluster's present lag
    * ``silent``: neither answered nor counted; ``extra``: answered or counted more often than there were windows
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
    """Compare what was due with what came and what the cluster counted.

    ``answered``: windows that it counts as answered, by a model or the gate; ``given_up``: dropped on purpose or lost.
    ``listened``: answers could not go missing on the way, so that one the cluster counts and nobody saw is no excuse.
    ``since_s``: windows due after it may still be answered, unless one after them was. ``most``: windows that there can
    have been when the cluster counted (:meth:`CameraLedger.most`).
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
    """Those due in ``[from_s, until_s)``."""
    return [slot for slot in slots if from_s <= slot.end_s < until_s]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; nan of none. Infinite values are late ones."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def alert_times(slots: Sequence[Slot], stride_s: float, from_s: float, until_s: float) -> list[float]:
    """Seconds from something that begins at any moment of ``[from_s, until_s)`` to the first answer of a window that it
    is in; infinite where none came. ``ALERT_MOMENTS`` moments a stride."""
    ends = [slot.end_s for slot in slots]
    seen = [math.inf if slot.seen_s is None else slot.seen_s for slot in slots]
    # The first answer among this window's and those after it.
    first_seen = list(accumulate(reversed(seen), min))[::-1]
    times = []
    step = stride_s / ALERT_MOMENTS
    for number in range(math.floor((until_s - from_s) / step)):
        moment = from_s + (number + 0.5) * step
        place = bisect_left(ends, moment)
        times.append(first_seen[place] - moment if place < len(ends) else math.inf)
    return times
