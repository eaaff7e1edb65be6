"""The least replicas for some cameras, or the most cameras for some replicas, at an objective: by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.errors import ConfigError, SightlineError
from loadtest.city.city import CityPlan, mean_load, simulate, with_pool
from loadtest.city.result import CityResult, Objective

SEARCH_S = 600.0
"""Simulated seconds, after the warm-up, that a count is tried for."""

STEP = 1.06
"""First factor between two counts while both ends are looked for."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One count that was tried."""

    cameras: int
    replicas: int
    met: bool
    on_time: float
    answered: float
    quality: float
    utilisation: float
    lag_p99_s: float


@dataclass(slots=True)
class Search:
    """Tries counts of one city. ``on_trial`` is told of each; ``seconds``: how long each is simulated."""

    plan: CityPlan
    objective: Objective
    on_trial: Callable[[Trial], None] = lambda _: None
    on_share: Callable[[float], None] = lambda _: None
    seconds: float = SEARCH_S
    trials: list[Trial] = field(default_factory=list)

    def least_replicas(self) -> int:
        """The fewest replicas that serve the plan's cameras.

        A city of several controllers is as many districts that are alike: one is searched for, the rest in proportion.

        Raises:
            ConfigError: the pool has several kinds of replicas.
            SightlineError: no pool of the size that the cost model suggests, nor four times that, is enough.
        """
        if len(self.plan.pools) != 1:
            raise ConfigError("the least number of accelerators can be found for one kind only; name one with --gpus")
        cameras = -(-self.plan.cameras // -(-self.plan.cameras // self.plan.per_controller))
        guess = cameras * mean_load(self.plan.mix, self.plan.pools[0].costs, self.plan.hour)
        found = self._bisect(lambda count: self._try(cameras, count), max(1, math.ceil(guess)), fewer=True)
        return math.ceil(found.replicas * self.plan.cameras / cameras)

    def most_cameras(self, guess: int | None = None) -> CityResult:
        """The most cameras that the plan's replicas serve, in the run that showed it. ``guess``: where to begin.

        Raises:
            SightlineError: not even a quarter of what the cost model suggests can be served.
        """
        carries = [pool.replicas / mean_load(self.plan.mix, pool.costs, self.plan.hour) for pool in self.plan.pools]
        return self._bisect(
            lambda count: self._try(count, None), max(1, guess or math.floor(sum(carries))), fewer=False
        )

    def _try(self, cameras: int, replicas: int | None) -> CityResult:
        timing = replace(self.plan.timing, seconds=self.plan.warmup_s + self.seconds)
        plan = with_pool(replace(self.plan, timing=timing, events=()), cameras=cameras, replicas=replicas)
        found = simulate(plan, self.on_share)
        figures = found.figures
        trial = Trial(
            cameras,
            found.replicas,
            self.objective.met(figures),
            figures.on_time,
            figures.answered,
            figures.quality,
            figures.utilisation,
            figures.lag_p99_s,
        )
        self.trials.append(trial)
        self.on_trial(trial)
        return found

    def _bisect(self, run: Callable[[int], CityResult], guess: int, *, fewer: bool) -> CityResult:
        """``fewer``: the least count that holds, else the most. What holds for a count holds for easier ones."""
        good: tuple[int, CityResult] | None = None
        bad: int | None = None
        limit = max(16, 4 * guess) if fewer else max(1, guess // 4)
        count, factor = guess, STEP
        while good is None or bad is None:
            found = run(count)
            if self.objective.met(found.figures):
                good = (count, found)
                if count == 1 and fewer:
                    return found
            else:
                bad = count
                if count == limit:
                    raise SightlineError(
                        f"{found.replicas} replicas do not hold the objective for {found.cameras} cameras"
                        f"{_why(found, self.objective)}; allow more by --objective, or change the mix"
                    )
            if good is not None and bad is not None:
                break
            away = (good is None) == fewer
            count = math.ceil(count * factor) if away else math.floor(count / factor)
            count = max(1, min(count, limit) if fewer else max(count, limit))
            factor *= STEP
        while abs(good[0] - bad) > max(1, round(0.003 * good[0])):
            count = (good[0] + bad) // 2
            found = run(count)
            if self.objective.met(found.figures):
                good = (count, found)
            else:
                bad = count
        return good[1]


def _why(found: CityResult, objective: Objective) -> str:
    figures = found.figures
    return (
        f" ({figures.on_time:.1%} on time of {objective.on_time:.1%}, {figures.answered:.1%} answered of "
        f"{objective.answered:.1%}, quality {figures.quality:.3f} of {objective.quality:.3f})"
    )


def scaling_efficiency(many: CityResult, search: Search, seeds: int) -> tuple[float, list[Trial]]:
    """Cameras of a pool over its size times what one replica serves, the mean over ``seeds`` searches; what they tried.

    ``many``: what :meth:`Search.most_cameras` of ``search`` found.
    """
    plan = search.plan
    one = replace(plan, pools=(replace(plan.pools[0], replicas=1),))
    single: list[int] = []
    tried: list[Trial] = []
    for seed in range(seeds):
        alone = Search(replace(one, seed=plan.seed + seed), search.objective, search.on_trial, seconds=search.seconds)
        single.append(alone.most_cameras(many.cameras // many.replicas).cameras)
        tried += alone.trials
    return many.cameras / (many.replicas * (sum(single) / len(single))), tried
