"""Results of a load test: measurements, recovery from faults, and the verdict whether the cluster kept up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from cluster.lab.bench.window_accounting import percentile
from cluster.lab.report.number_format import seconds_text
from loadtest.machine import MachineUse

ANSWERED = 0.99
"""Minimum share of due windows that a stable cluster answers."""

LATE_S = 0.1
LATE_SHARE = 0.01
"""If the generator sends more than ``LATE_SHARE`` of its packets more than ``LATE_S`` late, it was itself the limit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; infinite if unanswered windows reach into them, nan without values."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(*(percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)))


@dataclass(frozen=True, slots=True)
class Tick:
    """One second of a test. ``at_s``: seconds since its start; lags in seconds, of the answers received; ``rungs``:
    cameras on each rung of the quality ladder, as last reported by the cluster."""

    at_s: float
    streams: int
    answers: int
    lag_p50_s: float
    lag_p99_s: float
    late_p99_s: float
    sent_bytes_s: float
    use: MachineUse
    rungs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FaultResult:
    """An injected fault, its victim, and the time until all affected cameras were on time again.

    * ``at_s``: seconds since the test's start; ``struck``: number of affected cameras
    * ``recovery_s``: seconds until every one of them had an answer on time after which none was late or missing;
      infinite if that never happened
    """

    name: str
    victim: str
    at_s: float
    struck: int
    recovery_s: float
    stride_s: float

    @property
    def recovery_strides(self) -> float:
        return self.recovery_s / self.stride_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """``limit``: what could not keep up (``cluster`` or ``generator``); ``reasons``: why, empty for a stable test."""

    stable: bool
    limit: str | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement over ``[from_s, until_s)``, in seconds since the test's start.

    * ``due = answered + unseen + given_up + overdue + silent``: windows of all cameras since their start, so that none
      is lost at the edges of the measurement; ``overdue``: in flight for not much longer than the slowest answer took
    * ``measured``: windows due in the interval; of these ``missing``: without an answer, ``on_time``: answered within a
      stride of their end, ``gated``: answered by the static gate
    * ``lag``: from a window's end to its answer here; ``alert``: from the start of an event to the first answer that
      can show it; ``replica``: from the last frame's arrival at the replica to the answer, for computed windows
    * ``missed_answers``: dropped by the gateway on the way here; ``breaks``: times the result stream broke
    * ``tokens``: by kind, of the answers; ``lost``: windows by reason, as counted by the cluster
    * ``extra``: windows answered or counted in excess of those due
    * ``unaccounted``: for cameras with silent or extra windows, when their unanswered windows were due, in seconds
      since the test's start; these may be more than the silent ones, as the cluster counted some of them
    * ``rungs``: share of the cameras on each rung of the quality ladder, empty if the cluster does not report it
    """

    streams: int
    stride_s: float
    from_s: float
    until_s: float
    due: int
    answered: int
    unseen: int
    given_up: int
    overdue: int
    silent: int
    measured: int
    missing: int
    on_time: int
    gated: int
    lag: Spread
    alert: Spread
    replica: Spread
    late: Spread
    late_share: float
    packets: int
    packets_dropped: int
    packets_refused: int
    packets_lost: int
    reconnects: int
    missed_answers: int
    breaks: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    rungs: Mapping[str, float] = field(default_factory=dict)
    unaccounted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    extra: int = 0

    @property
    def seconds(self) -> float:
        return self.until_s - self.from_s

    @property
    def answered_share(self) -> float:
        """Share of the measured windows that were answered at all."""
        return 1 - self.missing / self.measured if self.measured else math.nan

    @property
    def reduced_share(self) -> float:
        """Share of the cameras below full quality, of which fewer or smaller windows are due; 0 if not reported."""
        return sum(share for rung, share in self.rungs.items() if rung != "full")

    @property
    def verdict(self) -> Verdict:
        """Stable: p99 lag within a stride, 99 % of windows answered, all accounted for, no failure, no late packets."""
        reasons = []
        if not self.measured:
            reasons.append("no window was due during the measurement; measure for longer than a stride")
        if not self.lag.p99 <= self.stride_s:
            reasons.append(f"p99 lag is {seconds_text(self.lag.p99)}, above the stride of {self.stride_s:g} s")
        if not self.answered_share >= ANSWERED:
            reasons.append(f"{100 * self.answered_share:.1f} % of windows were answered, less than {ANSWERED:.0%}")
        if self.silent:
            reasons.append(f"{self.silent} windows were neither answered nor counted")
        if self.extra:
            reasons.append(f"{self.extra} windows were counted that were never due")
        if self.failures:
            reasons.append(f"{len(self.failures)} cameras failed, the first: {self.failures[0]}")
        if self.late_share > LATE_SHARE:
            late = f"{100 * self.late_share:.0f} % of packets left more than {1000 * LATE_S:.0f} ms late"
            reasons.append(f"the load generator was outpaced by its own machine and thus the limit: {late}")
        limit = None
        if reasons:
            limit = "generator" if self.late_share > LATE_SHARE else "cluster"
        return Verdict(not reasons, limit, tuple(reasons))


def occupancy(ticks: Sequence[Tick]) -> dict[str, float]:
    """Mean share of the cameras on each rung over these ticks."""
    total: dict[str, float] = {}
    for tick in ticks:
        for rung, cameras in tick.rungs.items():
            total[rung] = total.get(rung, 0.0) + cameras
    everyone = sum(total.values())
    return {rung: cameras / everyone for rung, cameras in total.items() if cameras} if everyone else {}
