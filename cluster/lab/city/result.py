"""Results of a simulation: punctuality, quality, utilisation and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cluster.lab.city.mix import BurstPeriod
from cluster.lab.city.plan import CityPlan
from cluster.lab.city.tally import Tally, by_reason, lag_quantile
from cluster.types.cameras import Priority

HOURS_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective that a pool must meet.

    * ``on_time``: share of computed windows answered within their stride (0.99: p99 lag at most the stride)
    * ``answered``: share of all windows answered, including those for which the static gate repeats the last answer
    * ``quality``: share of the video that was answered, each second weighted by the value of its camera's rung
      (F1 relative to full quality, halved where answers come half as often)
    """

    on_time: float = 0.99
    answered: float = 0.99
    quality: float = 0.98

    def met(self, figures: Figures) -> bool:
        return (
            figures.on_time >= self.on_time
            and figures.answered >= self.answered
            and figures.quality >= self.quality
            and figures.refused == 0
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares, and lags of computed windows in seconds, over a range of time bins, for one priority or all."""

    windows: int
    answered: float
    on_time: float
    quality: float
    lag_p50_s: float
    lag_p95_s: float
    lag_p99_s: float
    computed_per_s: float
    utilisation: float
    busy: float
    refused: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tally: Tally, *, first: int = 0, end: int | None = None, rank: int | None = None, refused: int = 0
    ) -> Figures:
        """Figures of the bins in ``[first, end)``; ``rank``: of one priority."""
        ranks = slice(None) if rank is None else slice(rank, rank + 1)
        part = (slice(first, end), ranks)
        due, gated, answered = (int(each[part].sum()) for each in (tally.due, tally.gated, tally.answered))
        lags = tally.lags[part].sum(axis=(0, 1))
        capacity_s = float(tally.capacity_s[first:end].sum())
        return cls(
            windows=due,
            answered=_share(gated + answered, due),
            on_time=_share(float(tally.on_time[part].sum()), answered),
            quality=_share(float(tally.value_s[part].sum()), float(tally.due_s[part].sum())),
            lag_p50_s=lag_quantile(lags, 0.50),
            lag_p95_s=lag_quantile(lags, 0.95),
            lag_p99_s=lag_quantile(lags, 0.99),
            computed_per_s=float(tally.done[part].sum()) / (len(tally.done[part]) * tally.bin_s),
            utilisation=_share(float(tally.useful_s[first:end].sum()), capacity_s),
            busy=_share(float(tally.busy_s[first:end].sum()), capacity_s),
            refused=refused,
            dropped=by_reason(tally.dropped[part]),
        )


def _share(part: float, whole: float) -> float:
    """``part / whole``; 0 if ``whole`` is 0, so that an idle pool meets no objective."""
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Balance:
    """Accounts for every window of a run: ``expected`` must equal the sum of the other counts."""

    expected: int
    answered: int
    gated: int
    dropped: int
    waiting: int

    @classmethod
    def of(cls, tally: Tally, waiting: int) -> Balance:
        """The balance of a whole run, including its warm-up."""
        return cls(
            int(tally.due.sum()), int(tally.answered.sum()), int(tally.gated.sum()), int(tally.dropped.sum()), waiting
        )

    @property
    def missing(self) -> int:
        return self.expected - self.answered - self.gated - self.dropped - self.waiting

    def check(self) -> None:
        """Raise ``RuntimeError`` if windows are missing or counted twice."""
        if self.missing:
            raise RuntimeError(f"the simulation lost count of {self.missing} windows: {self}")


@dataclass(slots=True)
class Admitted:
    """Admission results at the start. ``missing_replicas``: replicas that the refused cameras would need."""

    reduced: int = 0
    refused: int = 0
    missing_replicas: float = 0.0


@dataclass(frozen=True, slots=True)
class CityResult:
    """One simulated city. ``figures`` exclude the warm-up, ``balance`` includes it.

    ``bursts``: the mix's bursts within the simulated time. ``simulate_s``, ``simulate_cpu_s``: wall and CPU seconds
    that the simulation took.
    """

    plan: CityPlan
    tally: Tally
    balance: Balance
    admitted: Admitted
    districts: int
    bursts: tuple[BurstPeriod, ...]
    simulate_s: float
    simulate_cpu_s: float

    @property
    def first(self) -> int:
        """Index of the first bin that counts: the warm-up is rounded up to whole bins."""
        return min(self.tally.bins - 1, int(np.ceil(self.plan.warmup_s / self.tally.bin_s)))

    @property
    def figures(self) -> Figures:
        """Figures of all priorities."""
        return Figures.of(self.tally, first=self.first, refused=self.admitted.refused)

    def by_priority(self) -> dict[Priority, Figures]:
        return {
            priority: Figures.of(self.tally, first=self.first, rank=priority.rank)
            for priority in Priority
            if self.tally.due[:, priority.rank].any()
        }

    def rung_shares(self) -> dict[str, float]:
        spent = self.tally.rung_s[self.first :].sum(axis=0)
        rungs = zip(self.plan.ladder.rungs, spent, strict=True)
        return {rung.name: _share(float(value), float(spent.sum())) for rung, value in rungs}

    @property
    def cost_per_hour(self) -> float | None:
        """Cost of the pool, in the currency of ``price_per_hour``."""
        price = self.plan.price_per_hour
        return None if price is None else self.plan.replicas * price

    @property
    def cost_per_camera_month(self) -> float | None:
        return None if self.cost_per_hour is None else self.cost_per_hour * HOURS_A_MONTH / self.plan.cameras

    def as_json(self) -> dict[str, Any]:
        """Everything but the histograms; ``series`` has one entry per time bin."""
        plan, admitted = self.plan, self.admitted
        return {
            "cameras": plan.cameras,
            "pools": [
                {
                    "kind": p.kind,
                    "replicas": p.replicas,
                    "costs": p.costs_title,
                    "source": p.costs.source,
                }
                for p in plan.pools
            ],
            "mix": plan.mix_name,
            "ladder": {"name": plan.ladder_name, "source": plan.ladder.source, "shares": self.rung_shares()},
            "seconds": plan.timing.seconds,
            "warmup_s": plan.warmup_s,
            "seed": plan.seed,
            "districts": self.districts,
            "events": [str(event) for event in plan.events],
            "bursts": [
                {"name": spell.name, "from_s": spell.start_s, "to_s": spell.end_s, "share": spell.share}
                for spell in self.bursts
            ],
            "admission": {"accepted": plan.cameras - admitted.reduced - admitted.refused, **asdict(admitted)},
            "all": asdict(self.figures),
            "by_priority": {str(name): asdict(each) for name, each in self.by_priority().items()},
            "balance": {**asdict(self.balance), "missing": self.balance.missing},
            "moves": int(self.tally.moves.sum()),
            "rung_steps": int(self.tally.steps.sum()),
            "price_per_hour": plan.price_per_hour,
            "cost_per_hour": self.cost_per_hour,
            "cost_per_camera_month": self.cost_per_camera_month,
            "simulate_s": self.simulate_s,
            "simulate_cpu_s": self.simulate_cpu_s,
            "series": self._series(),
        }

    def _series(self) -> list[dict[str, Any]]:
        tally = self.tally
        found = []
        for at in range(tally.bins):
            lags, due_s = tally.lags[at].sum(axis=0), float(tally.due_s[at].sum())
            found.append(
                {
                    "from_s": at * tally.bin_s,
                    "windows": int(tally.due[at].sum()),
                    "gated": int(tally.gated[at].sum()),
                    "answered": int(tally.answered[at].sum()),
                    "dropped": by_reason(tally.dropped[at]),
                    "lag_p50_s": lag_quantile(lags, 0.5),
                    "lag_p99_s": lag_quantile(lags, 0.99),
                    "quality": _share(float(tally.value_s[at].sum()), due_s) if due_s else None,
                    "busy": _share(float(tally.busy_s[at]), float(tally.capacity_s[at])),
                    "rungs_s": tally.rung_s[at].tolist(),
                }
            )
        return found
