"""What is simulated: a city's cameras, its pools of replicas, and its time."""

from dataclasses import dataclass, field, replace

from cluster.control.costs import CostModel
from cluster.control.ladder import Ladder
from cluster.errors import ConfigError
from loadtest.city.mix import HOURS, Mix
from loadtest.city.replica import EngineSettings
from loadtest.city.timeline import Event

CAMERAS_PER_CONTROLLER = 10_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of simulated time.

    * ``tick_s``: between two rounds of reports and decisions; ``detect_s``: until a dead replica is noticed
    * ``report_s``: at least between two reports of what a camera's windows cost
    * ``bin_s``: stretches in which windows are counted
    """

    seconds: float
    tick_s: float = 1.0
    detect_s: float = 2.0
    report_s: float = 20.0
    bin_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas of one kind and what a step costs there."""

    kind: str
    replicas: int
    costs: CostModel

    @property
    def costs_title(self) -> str:
        return f"{self.costs.model} on {self.costs.device}"


@dataclass(frozen=True, slots=True)
class CityPlan:
    """A city to simulate.

    * ``ladder``: ``None`` leaves every camera at full quality; ``force``: no camera is refused
    * ``hour``: time of day at 0 s; ``alike``: see :class:`WorkTable`
    * ``phases``: of each camera, as the shares of its stride by which its windows end late; ``None``: as planned
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


def with_pool(plan: CityPlan, *, cameras: int | None = None, replicas: int | None = None) -> CityPlan:
    """The same city with so many cameras, or so many replicas of its one kind."""
    if replicas is not None:
        plan = replace(plan, pools=(replace(plan.pools[0], replicas=replicas),))
    return plan if cameras is None else replace(plan, cameras=cameras)
