"""A whole city: cameras and replicas dealt to controllers, each district simulated, the counts added up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from cluster.control.costs import CostModel
from cluster.control.demand import load
from cluster.control.ladder import Ladder, Rung
from cluster.errors import ConfigError
from loadtest.city.district import District, DistrictPlan, Timing
from loadtest.city.mix import HOURS, Mix, spells
from loadtest.city.replica import EngineSettings
from loadtest.city.result import Balance, CityResult, Pool
from loadtest.city.tally import Tally
from loadtest.city.timeline import Event, split

CAMERAS_PER_CONTROLLER = 10_000

# Objects more than were freed, young, middle and old, before the garbage collector looks (gc.set_threshold).
_COLLECT = 100_000, 50, 100


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas of one kind and what a step costs there."""

    kind: str
    replicas: int
    costs: CostModel


@dataclass(frozen=True, slots=True)
class CityPlan:
    """A city to simulate.

    * ``ladder``: ``None`` leaves every camera at full quality; ``force``: no camera is refused
    * ``hour``: time of day at 0 s; ``phases``, ``alike``: see :class:`DistrictPlan`
    """

    cameras: int
    pools: tuple[PoolPlan, ...]
    mix: Mix
    mix_name: str
    ladder: Ladder | None
    ladder_name: str
    timing: Timing
    warmup_s: float = 120.0
    hour: float = 8.0
    seed: int = 0
    engine: EngineSettings = field(default_factory=EngineSettings)
    events: tuple[Event, ...] = ()
    force: bool = False
    phases: tuple[float, ...] | None = None
    alike: bool = False
    per_controller: int = CAMERAS_PER_CONTROLLER
    price_per_hour: float | None = None

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    def check(self) -> None:
        """Raises ``ConfigError`` when it cannot be simulated."""
        if self.cameras < 1 or self.replicas < 1:
            raise ConfigError(f"a city needs cameras and replicas, not {self.cameras} and {self.replicas}")
        if not 0 <= self.warmup_s < self.timing.seconds:
            raise ConfigError(
                f"the warm-up must be at least 0 s and shorter than the simulated {self.timing.seconds:g} s, not "
                f"{self.warmup_s:g} s"
            )
        if not 0 <= self.hour <= HOURS:
            raise ConfigError(f"the time of day at the beginning must be from 0 to {HOURS}, not {self.hour:g}")
        if late := [event for event in self.events if event.at_s >= self.timing.seconds]:
            raise ConfigError(
                f"the event at {late[0].at_s:g} s comes after the end of the simulation at {self.timing.seconds:g} s"
            )


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


def deal(plan: CityPlan) -> list[Deal]:
    """Cameras by what each pool can carry, then each pool's cameras and replicas evenly to its controllers."""
    carries = [pool.replicas / mean_load(plan.mix, pool.costs, plan.hour) for pool in plan.pools]
    dealt: list[Deal] = []
    left = plan.cameras
    for index, pool in enumerate(plan.pools):
        last = index == len(plan.pools) - 1
        mine = left if last else round(plan.cameras * carries[index] / sum(carries))
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
    """Run a city from its first second to its last.

    Args:
        on_second: called now and then with the share of the work that is done, 0 to 1.

    Raises:
        ConfigError: the plan cannot be simulated.
        RuntimeError: windows were lost count of, which would be an error of the simulator.
    """
    plan.check()
    began, began_cpu = time.perf_counter(), time.process_time()
    dealt = deal(plan)
    city = np.random.default_rng([plan.seed, 0])
    mine = split(plan.events, [each.replicas for each in dealt], city)
    weather = spells(plan.mix, plan.timing.seconds, city)
    order = _kinds(plan, city)
    tally: Tally | None = None
    waiting, reduced, refused, missing = 0, 0, 0, 0.0
    first = 0
    for index, part in enumerate(dealt):
        district = District(
            DistrictPlan(
                mix=plan.mix,
                kinds=order[first : first + part.cameras],
                replicas=part.replicas,
                costs=plan.pools[part.pool].costs,
                ladder=plan.ladder,
                engine=plan.engine,
                timing=plan.timing,
                hour=plan.hour,
                seed=(plan.seed, 1 + index),
                events=mine[index],
                spells=weather,
                force=plan.force,
                alike=plan.alike,
                phases=None if plan.phases is None else plan.phases[first : first + part.cameras],
            )
        )
        district.run(partial(_share, on_second, index, len(dealt)))
        Balance.of(district.tally, district.waiting).check()
        first += part.cameras
        waiting += district.waiting
        reduced += district.admitted.reduced
        refused += district.admitted.refused
        missing += district.admitted.missing_replicas
        if tally is None:
            tally = district.tally
        else:
            tally.add(district.tally)
    assert tally is not None
    balance = Balance.of(tally, waiting)
    balance.check()
    return CityResult(
        cameras=plan.cameras,
        pools=tuple(
            Pool(pool.kind, pool.replicas, f"{pool.costs.model} on {pool.costs.device}", pool.costs.source)
            for pool in plan.pools
        ),
        mix=plan.mix_name,
        mix_title=plan.mix.title,
        ladder=plan.ladder_name,
        ladder_source=plan.ladder.source if plan.ladder else "every camera stays at full quality",
        rungs=tuple(rung.name for rung in plan.ladder.rungs) if plan.ladder else ("full",),
        seconds=plan.timing.seconds,
        warmup_s=plan.warmup_s,
        seed=plan.seed,
        districts=len(dealt),
        tally=tally,
        balance=balance,
        simulate_s=time.perf_counter() - began,
        simulate_cpu_s=time.process_time() - began_cpu,
        reduced=reduced,
        refused=refused,
        missing_replicas=missing,
        events=plan.events,
        bursts=tuple(weather),
        price_per_hour=plan.price_per_hour,
    )


def _share(tell: Callable[[float], None], done: int, districts: int, share: float) -> None:
    tell((done + share) / districts)


def _kinds(plan: CityPlan, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The class of every camera, in an order that gives each district its part of each class."""
    counts = plan.mix.counts(plan.cameras)
    kinds = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(kinds)
    return kinds


def with_pool(plan: CityPlan, *, cameras: int | None = None, replicas: int | None = None) -> CityPlan:
    """The same city with so many cameras, or so many replicas of its one kind."""
    if replicas is not None:
        plan = replace(plan, pools=(replace(plan.pools[0], replicas=replicas),))
    return plan if cameras is None else replace(plan, cameras=cameras)
