"""Input of a simulation: cameras, pools of replicas, timing, and events such as ``600:kill:3``."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from cluster.control.costs import CostModel
from cluster.control.ladder import Ladder, Rung
from cluster.errors import ConfigError
from cluster.lab.city.mix import HOURS, Mix
from cluster.lab.city.replica import EngineSettings

CAMERAS_PER_CONTROLLER = 10_000
FULL = Ladder((Rung("full"),), "every camera stays at full quality")


class What(StrEnum):
    """Kinds of events."""

    KILL = "kill"
    JOIN = "join"
    DRAIN = "drain"
    CONTROLLER = "controller"
    WAKE = "wake"


MEANING = {
    What.KILL: "N replicas die with all they hold",
    What.JOIN: "N replicas join",
    What.DRAIN: "N replicas hand over their cameras and leave",
    What.CONTROLLER: "every controller is down for N seconds and then recovers its state from the replicas",
    What.WAKE: "a share N of all cameras sees motion for one minute",
}

WAKE_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``amount``: replicas, seconds or a share, depending on ``what``."""

    at_s: float
    what: What
    amount: float

    def __str__(self) -> str:
        """The form that :func:`parse_event` reads."""
        return f"{self.at_s:g}:{self.what}:{self.amount:g}"


def parse_event(text: str) -> Event:
    """Parse ``SECONDS:WHAT:N``. Raises ``ConfigError`` if malformed or out of range."""
    parts = text.split(":")
    kinds = ", ".join(What)
    if len(parts) != 3 or parts[1] not in list(What):
        raise ConfigError(f"event {text!r} is not SECONDS:WHAT:N, as in 600:kill:3; WHAT is one of {kinds}")
    try:
        at_s, amount = float(parts[0]), float(parts[2])
    except ValueError:
        raise ConfigError(f"event {text!r}: the time and the amount must be numbers, as in 600:kill:3") from None
    event = Event(at_s, What(parts[1]), amount)
    if not 0 <= at_s < float("inf"):
        raise ConfigError(f"event {text!r}: the time is seconds from the beginning, at least 0")
    whole = event.what in (What.KILL, What.JOIN, What.DRAIN)
    if whole and not (amount >= 1 and amount.is_integer()):
        raise ConfigError(f"event {text!r}: {event.what} takes a number of replicas, at least 1")
    if not 0 < amount < float("inf") or (event.what is What.WAKE and amount > 1):
        raise ConfigError(f"event {text!r}: {MEANING[event.what]}; N must be above 0, and a share at most 1")
    return event


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of simulated time.

    * ``tick_s``: between rounds of reports and decisions; ``detect_s``: until a dead replica is noticed
    * ``report_s``: minimum between two reports of a camera's counts
    * ``bin_s``: width of the bins in which windows are counted
    """

    seconds: float
    tick_s: float = 1.0
    detect_s: float = 2.0
    report_s: float = 20.0
    bin_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas of one kind and their cost model."""

    kind: str
    replicas: int
    costs: CostModel

    @property
    def costs_title(self) -> str:
        return f"{self.costs.model} on {self.costs.device}"


@dataclass(frozen=True, slots=True)
class CityPlan:
    """A city to simulate.

    * ``ladder``: :data:`FULL` for none; ``force``: no camera is refused
    * ``hour``: time of day at 0 s; ``alike``: see :class:`WorkTable`
    * ``drop``: share of windows to compute that is dropped at random, as a baseline for policies
    * ``phases``: each camera's offset of window ends, as a fraction of its stride, in the order of the mix's classes;
      ``None``: random
    """

    cameras: int
    pools: tuple[PoolPlan, ...]
    mix: Mix
    mix_name: str
    ladder: Ladder
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
    drop: float = 0.0
    per_controller: int = CAMERAS_PER_CONTROLLER
    price_per_hour: float | None = None

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    def check(self) -> None:
        """Raise ``ConfigError`` if the plan cannot be simulated."""
        if self.cameras < 1 or self.replicas < 1:
            raise ConfigError(f"a city needs cameras and replicas, not {self.cameras} and {self.replicas}")
        if not 0 <= self.warmup_s < self.timing.seconds:
            raise ConfigError(
                f"the warm-up must be at least 0 s and shorter than the simulated {self.timing.seconds:g} s, not "
                f"{self.warmup_s:g} s"
            )
        if not 0 <= self.hour <= HOURS:
            raise ConfigError(f"the time of day at the start must be from 0 to {HOURS}, not {self.hour:g}")
        if late := [event for event in self.events if event.at_s >= self.timing.seconds]:
            raise ConfigError(
                f"the event at {late[0].at_s:g} s comes after the end of the simulation at {self.timing.seconds:g} s"
            )


def with_replicas(plan: CityPlan, replicas: int) -> CityPlan:
    """The same city with another number of replicas of its only kind."""
    return replace(plan, pools=(replace(plan.pools[0], replicas=replicas),))


def split(events: Sequence[Event], replicas: Sequence[int], rng: np.random.Generator) -> list[list[Event]]:
    """Assign events to districts; kills, joins and drains at random, weighted by the districts' replicas. Raises
    ``ConfigError`` if more replicas are to leave than exist."""
    found: list[list[Event]] = [[] for _ in replicas]
    alive = list(replicas)
    for event in sorted(events, key=lambda each: each.at_s):
        if event.what in (What.CONTROLLER, What.WAKE):
            for mine in found:
                mine.append(event)
            continue
        leaving = event.what is not What.JOIN
        if leaving and event.amount > sum(alive):
            raise ConfigError(
                f"at {event.at_s:g} s {event.amount:g} replicas are to leave, of {sum(alive)}; name fewer"
            )
        shares = [0] * len(replicas)
        for _ in range(int(event.amount)):
            # One at a time, so that no district loses more than it has.
            weights = np.array(alive if leaving else replicas, dtype=float)
            chosen = int(rng.choice(len(replicas), p=weights / weights.sum()))
            shares[chosen] += 1
            alive[chosen] += -1 if leaving else 1
        for index, count in enumerate(shares):
            if count:
                found[index].append(replace(event, amount=float(count)))
    return found
