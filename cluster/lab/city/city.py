"""A whole city: cameras and replicas dealt to controllers, each district simulated, the counts added up."""

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

# Objects more than were freed, young, middle and old, before the garbage collector looks (gc.set_threshold).
_COLLECT = 100_000, 50, 100


@dataclass(frozen=True, slots=True)
class Deal:
    """One district's part: of pool ``pool``, so many replicas, and its cameras' classes."""

    pool: int
    replicas: int
    cameras: int


def mean_load(mix: Mix, costs: CostModel, hour: float) -> float:
    """Seconds of a replica a second that a camera of the mix takes on average at full quality."""
    total = sum(each.share for each in mix.classes)
    return sum(
        each.share / total * load(each.demand(each.name, mix.geometry, hour), Rung("full"), costs)
        for each in mix.classes
    )


def carries(mix: Mix, costs: CostModel, hour: float) -> tuple[float, float]:
    """Cameras of the mix that one replica computes at full quality, and whose windows it holds; infinite where its
    memory is not known."""
    total = sum(each.share for each in mix.classes)
    tokens = sum(
        each.share / total * window_tokens(each.demand(each.name, mix.geometry, hour), Rung("full"))
        for each in mix.classes
    )
    held = math.inf if costs.window_tokens is None else costs.window_tokens / tokens
    return 1 / mean_load(mix, costs, hour), held


def carried(plan: CityPlan) -> list[float]:
    """Cameras that each pool serves at full quality, by the scarcer of time and memory."""
    return [pool.replicas * min(carries(plan.mix, pool.costs, plan.hour)) for pool in plan.pools]


def deal(plan: CityPlan) -> list[Deal]:
    """Cameras by what each pool can carry, then each pool's cameras and replicas evenly to its controllers."""
    carries_each = carried(plan)
    dealt: list[Deal] = []
    left = plan.cameras
    for index, pool in enumerate(plan.pools):
        last = index == len(plan.pools) - 1
        mine = left if last else round(plan.cameras * carries_each[index] / sum(carries_each))
        left -= mine
        count = max(1, min(pool.replicas, -(-mine // plan.per_controller)))
        for place in range(count):
            dealt.append(Deal(index, _part(pool.replicas, count, place), _part(mine, count, place)))
    return dealt


def _part(whole: int, parts: int, place: int) -> int:
    return whole * (place + 1) // parts - whole * place // parts


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A city makes millions of objects that live for a second and are part of no cycle: looking for cycles among them,
    and among all its cameras, takes a sixth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_seldom_collected()
def simulate(plan: CityPlan, on_second: Callable[[float], None] = lambda _: None) -> CityResult:
    """Run a city from its first second to its last; ``on_second`` is called now and then with the share that is done.
    Raises ``ConfigError``: the plan cannot be simulated; ``RuntimeError``: windows were lost count of, which would be
    an error of the simulator."""
    plan.check()
    began, began_cpu = time.perf_counter(), time.process_time()
    dealt = deal(plan)
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
    """Every camera's place among those of the mix, class after class, and its class, in an order that gives each
    district its part of each class."""
    counts = plan.mix.counts(plan.cameras)
    order = rng.permutation(plan.cameras)
    return order, np.repeat(np.arange(len(counts)), counts)[order]
