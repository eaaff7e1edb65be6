"""Simulates a city: deals cameras and replicas to controllers, simulates each district and sums the counts."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cluster.control.costs import CostModel
from cluster.control.demand import load, window_tokens
from cluster.control.ladder import Rung
from cluster.lab.city import Ints
from cluster.lab.city.district import District
from cluster.lab.city.mix import Mix, spells
from cluster.lab.city.plan import CityPlan, split
from cluster.lab.city.result import Admitted, Balance, CityResult
from cluster.lab.city.tally import Tally

# Thresholds of the three garbage collector generations (``gc.set_threshold``).
_GC_THRESHOLDS = 100_000, 50, 100


@dataclass(frozen=True, slots=True)
class DistrictShare:
    """One district's share: the index of its pool, and how many of the pool's replicas and cameras it gets."""

    pool: int
    replicas: int
    cameras: int


def carries(mix: Mix, costs: CostModel, hour: float) -> tuple[float, float]:
    """Cameras of the mix that one replica can compute at full quality, and whose windows fit in its memory (infinite
    when its memory is unknown)."""
    total, full = sum(each.share for each in mix.classes), Rung("full")
    # Of an average camera: replica seconds per second, and tokens of its window.
    demands = [(each.share / total, each.demand(each.name, mix.geometry, hour)) for each in mix.classes]
    seconds = sum(share * load(demand, full, costs) for share, demand in demands)
    tokens = sum(share * window_tokens(demand, full) for share, demand in demands)
    return 1 / seconds, math.inf if costs.window_tokens is None else costs.window_tokens / tokens


def carried(plan: CityPlan) -> list[float]:
    """Cameras that each pool serves at full quality, limited by time or memory, whichever is scarcer."""
    return [pool.replicas * min(carries(plan.mix, pool.costs, plan.hour)) for pool in plan.pools]


def split_districts(plan: CityPlan) -> list[DistrictShare]:
    """Split cameras over pools in proportion to their capacity, then each pool evenly over its controllers."""
    carries_each = carried(plan)
    dealt: list[DistrictShare] = []
    left = plan.cameras
    for index, pool in enumerate(plan.pools):
        last = index == len(plan.pools) - 1
        mine = left if last else round(plan.cameras * carries_each[index] / sum(carries_each))
        left -= mine
        count = max(1, min(pool.replicas, -(-mine // plan.per_controller)))
        for place in range(count):
            dealt.append(
                DistrictShare(index, _even_share(pool.replicas, count, place), _even_share(mine, count, place))
            )
    return dealt


def _even_share(whole: int, parts: int, place: int) -> int:
    return whole * (place + 1) // parts - whole * place // parts


@contextmanager
def _infrequent_gc() -> Iterator[None]:
    """Makes the garbage collector run rarely: a simulation creates millions of short-lived objects without reference
    cycles, and searching them and all cameras for cycles takes a sixth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_infrequent_gc()
def simulate(plan: CityPlan, on_second: Callable[[float], None] = lambda _: None) -> CityResult:
    """Simulate a city from start to end; ``on_second`` is called from time to time with the fraction done.

    Raises ``ConfigError`` if the plan cannot be simulated, ``RuntimeError`` if the window counts do not balance (a bug
    in the simulator)."""
    plan.check()
    began, began_cpu = time.perf_counter(), time.process_time()
    dealt = split_districts(plan)
    city = np.random.default_rng([plan.seed, 0])
    events = split(plan.events, [each.replicas for each in dealt], city)
    bursts = spells(plan.mix, plan.timing.seconds, city)
    order, kinds = _kinds(plan, city)
    tally: Tally | None = None
    waiting, admitted, first = 0, Admitted(), 0
    for index, part in enumerate(dealt):
        mine = slice(first, first + part.cameras)
        first = mine.stop
        district = District(
            plan,
            kinds[mine],
            replicas=part.replicas,
            costs=plan.pools[part.pool].costs,
            seed=(plan.seed, 1 + index),
            events=events[index],
            spells=bursts,
            phases=None if plan.phases is None else [plan.phases[camera] for camera in order[mine].tolist()],
            admitted=admitted,
        )
        district.run(lambda share, done=index: on_second((done + share) / len(dealt)))  # type: ignore[misc]
        Balance.of(district.tally, district.waiting).check()
        waiting += district.waiting
        if tally is None:
            tally = district.tally
        else:
            tally.add(district.tally)
    assert tally is not None
    return CityResult(
        plan=plan,
        tally=tally,
        balance=Balance.of(tally, waiting),
        admitted=admitted,
        districts=len(dealt),
        bursts=tuple(bursts),
        simulate_s=time.perf_counter() - began,
        simulate_cpu_s=time.process_time() - began_cpu,
    )


def _kinds(plan: CityPlan, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """A random camera order, which gives each district its share of every class, and the class of each camera in it.
    The order indexes the mix's cameras, listed class after class."""
    counts = plan.mix.counts(plan.cameras)
    order = rng.permutation(plan.cameras)
    return order, np.repeat(np.arange(len(counts)), counts)[order]
