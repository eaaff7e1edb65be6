"""What a load test found: one measurement, what faults did, and whether the cluster kept up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from cluster.lab.bench.window_accounting import percentile
from cluster.lab.report.number_format import seconds_text
from loadtest.machine import MachineUse

ANSWERED = 0.99
"""Share of the windows that were due which a cluster that keeps up answers."""

LATE_S = 0.1
LATE_SHARE = 0.01
"""A generator that sends more than this share of its packets more than so many seconds late was the limit itself."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; infinite where what is missing reaches into them, nan of nothing."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(*(percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)))


@dataclass(frozen=True, slots=True)
class Tick:
    """One second of a test. ``at_s``: seconds since it began; lags in seconds, of the answers that came; ``rungs``:
    cameras on each rung of the quality ladder, as the cluster last said."""

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
    """What was done to whom, and how long it took until all of its cameras were on time again.

    * ``at_s``: seconds since the test began; ``struck``: cameras that lived there
    * ``recovery_s``: until the last of them had an answer on time and none was late or missing any more; infinite if
      that did not come
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
    """``limit``: who could not keep up, if anybody; ``reasons``: sentences, empty for a stable test."""

    stable: bool
    limit: str | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Windows that were due in ``[from_s, until_s)``, seconds since the test began.

    * ``due = answered + unseen + given_up + overdue + silent`` over all cameras from their beginning on, so that
      nothing is lost at the edges of a measurement; ``overdue``: on their way for not much longer than the slowest was
    * ``measured``: windows due within it; ``missing``: of them those without an answer, ``on_time``: those with one
      within a stride of their end, ``gated``: those that the static gate answered
    * ``lag``: end of the window to the answer here; ``alert``: something begins to the first answer that may tell it;
      ``replica``: last frame's arrival at the replica to the answer, of windows that were computed
    * ``missed_answers``: those the gateway dropped on the way here, ``breaks``: times it hung up on who listens
    * ``tokens``: by kind, of the answers; ``lost``: windows by reason, as the cluster counts them
    * ``extra``: windows that were counted more often than there were any
    * ``unaccounted``: of cameras with silent or extra windows, when the windows that were not answered were due, in
      seconds since the test began; more than are silent where the cluster counted some of them
    * ``rungs``: share of the cameras on each rung of the quality ladder, empty where the cluster does not say
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
        """Of the windows due within the measurement, those that were answered at all."""
        return 1 - self.missing / self.measured if self.measured else math.nan

    @property
    def verdict(self) -> Verdict:
        """Stable: p99 lag within a stride, at least 99 % of windows answered, none missing or counted twice."""
        reasons = []
        if not self.measured:
            reasons.append("no window was due while it was measured; measure for longer than a stride")
        if not self.lag.p99 <= self.stride_s:
            reasons.append(f"p99 lag is {seconds_text(self.lag.p99)}, above the stride of {self.stride_s:g} s")
        if not self.answered_share >= ANSWERED:
            reasons.append(f"{100 * self.answered_share:.1f} % of windows were answered, fewer than {ANSWERED:.0%}")
        if self.silent:
            reasons.append(f"{self.silent} windows were neither answered nor counted")
        if self.extra:
            reasons.append(f"{self.extra} windows were counted that were never due")
        if self.failures:
            reasons.append(f"{len(self.failures)} cameras failed, the first: {self.failures[0]}")
        if self.late_share > LATE_SHARE:
            late = f"{100 * self.late_share:.0f} % of packets left more than {1000 * LATE_S:.0f} ms late"
            reasons.append(f"the load generator was outpaced by its own machine, so that it was the limit: {late}")
        limit = None
        if reasons:
            limit = "generator" if self.late_share > LATE_SHARE else "cluster"
        return Verdict(not reasons, limit, tuple(reasons))


def occupancy(ticks: Sequence[Tick]) -> dict[str, float]:
    """Share of the cameras on each rung over these seconds."""
    total: dict[str, float] = {}
    for tick in ticks:
        for rung, cameras in tick.rungs.items():
            total[rung] = total.get(rung, 0.0) + cameras
    everyone = sum(total.values())
    return {rung: cameras / everyone for rung, cameras in total.items() if cameras} if everyone else {}
