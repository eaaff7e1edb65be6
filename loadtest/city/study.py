"""The question put to the simulator: how does this go, how few replicas are enough, or how many cameras are served?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.errors import ConfigError
from loadtest.city.city import CityPlan, simulate, with_pool
from loadtest.city.result import CityResult, Objective
from loadtest.city.search import Search, Trial, scaling_efficiency

SINGLE_SEEDS = 4
"""Searches of one replica that a pool is compared with: one alone depends much on its few cameras."""

TOP_UP, TOP_UPS = 0.03, 5
"""Part by which a pool is made larger while the whole of the time does not hold, and how often at most."""


@dataclass(slots=True)
class Study:
    """``figures`` by name; ``trials`` of a search, ``fewer``: for the fewest replicas; ``single``: of one replica."""

    result: CityResult
    objective: Objective
    figures: dict[str, float]
    trials: list[Trial] = field(default_factory=list)
    fewer: bool = False
    single: list[Trial] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, with ``figures`` as the benches have them."""
        return {
            "bench": "city",
            "figures": self.figures,
            "objective": asdict(self.objective),
            "met": self.objective.met(self.result.figures),
            "trials": [asdict(trial) for trial in self.trials],
            "single_trials": [asdict(trial) for trial in self.single],
            **self.result.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is told how a study goes: the share of a simulation that is done, what is simulated, each count tried."""

    share: Callable[[float], None] = lambda _: None
    begins: Callable[[str], None] = lambda _: None
    tried: Callable[[Trial], None] = lambda _: None


def study(
    plan: CityPlan, objective: Objective, *, cameras: bool, replicas: bool, audience: Audience | None = None
) -> Study:
    """Answer the question that the numbers leave open. ``cameras``, ``replicas``: whether the plan's number is given.

    Raises:
        ConfigError: neither is given, or the plan cannot be simulated.
        SightlineError: the objective cannot be held.
    """
    told = audience or Audience()
    if not cameras and not replicas:
        raise ConfigError("give the number of cameras, of accelerators (as in --gpus h100=64), or both")
    if plan.events and not cameras:
        raise ConfigError("events need a number of cameras: a search for the most of them simulates quiet pools")
    if cameras and replicas:
        told.begins(f"{plan.cameras:,} cameras")
        result = simulate(plan, told.share)
        return Study(result, objective, _seconds(result))
    search = Search(plan, objective, told.tried, told.share)
    told.begins("the fewest replicas" if cameras else "the most cameras")
    if cameras:
        result = _whole(plan, objective, search.least_replicas(), told)
        held = objective.met(result.figures)
        figures = ({"replicas_at_objective": float(result.replicas)} if held else {}) | _seconds(result)
        return Study(result, objective, figures, search.trials, fewer=True)
    result = search.most_cameras()
    figures = {
        "utilisation_at_objective": result.figures.utilisation,
        "streams_at_objective": float(result.cameras),
        "streams_per_replica": result.cameras / result.replicas,
    } | _seconds(result)
    found = Study(result, objective, figures, search.trials)
    if len(plan.pools) == 1 and plan.replicas > 1:
        told.begins("one replica alone")
        figures["scaling_efficiency"], found.single = scaling_efficiency(result, search, SINGLE_SEEDS)
    return found


def _seconds(result: CityResult) -> dict[str, float]:
    """What the simulation took, by the clock and of one core: on a busy machine they are far apart."""
    return {"simulate_s": result.simulate_s, "simulate_cpu_s": result.simulate_cpu_s}


def _whole(plan: CityPlan, objective: Objective, enough: int, told: Audience) -> CityResult:
    """The whole of the time, which a search tries ten minutes of. An hour may be busier later on, or something may
    happen in it: then a few more replicas are given."""
    replicas = 0
    for more in range(TOP_UPS + 1):
        # Three percent of a few are none.
        replicas = max(replicas + 1, math.ceil(enough * (1 + TOP_UP * more)))
        told.begins(f"{plan.cameras:,} cameras on {replicas:,} replicas")
        result = simulate(with_pool(plan, replicas=replicas), told.share)
        if objective.met(result.figures):
            break
    return result
