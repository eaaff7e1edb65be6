"""Questions put to the simulator: how does this go, how few replicas are enough, how many cameras."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cluster.control import costs
from cluster.control.ladder import Ladder, default
from cluster.errors import ConfigError, SightlineError
from cluster.lab.city.city import carried, carries, simulate
from cluster.lab.city.plan import CityPlan, PoolPlan, with_pool
from cluster.lab.city.result import CityResult, Objective

SEARCH_S, SEARCH_BIN_S = 600.0, 60.0
"""Simulated seconds, after the warm-up, that a count is tried for; the longest stretches that they are counted in."""

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


SHOWN = ("on_time", "answered", "quality", "utilisation", "lag_p99_s")


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is told how a study goes: the share of a simulation that is done, what is simulated, each count tried."""

    share: Callable[[float], None] = lambda _: None
    begins: Callable[[str], None] = lambda _: None
    tried: Callable[[Trial], None] = lambda _: None


@dataclass(slots=True)
class Search:
    """Tries counts of one city. ``seconds``: how long each is simulated."""

    plan: CityPlan
    objective: Objective
    told: Audience = Audience()
    seconds: float = SEARCH_S
    trials: list[Trial] = field(default_factory=list)

    def least_replicas(self) -> int:
        """The fewest replicas that serve the plan's cameras.

        A city of several controllers is as many districts that are alike: one is searched for, the rest in proportion.
        Raises ``ConfigError``: the pool has several kinds of replicas; ``SightlineError``: no pool of the size that the
        cost model suggests, nor four times that, is enough.
        """
        if len(self.plan.pools) != 1:
            raise ConfigError("the least number of accelerators can be found for one kind only; name one with --gpus")
        cameras = -(-self.plan.cameras // -(-self.plan.cameras // self.plan.per_controller))
        guess = cameras / min(carries(self.plan.mix, self.plan.pools[0].costs, self.plan.hour))
        found = self._bisect(lambda count: self._try(cameras, count), max(1, math.ceil(guess)), fewer=True)
        return math.ceil(found.replicas * self.plan.cameras / cameras)

    def most_cameras(self, guess: int | None = None) -> CityResult:
        """The most cameras that the plan's replicas serve, in the run that showed it. ``guess``: where to begin. Raises
        ``SightlineError``: not even a quarter of what the cost model suggests can be served."""
        return self._bisect(
            lambda count: self._try(count, None), max(1, guess or math.floor(sum(carried(self.plan)))), fewer=False
        )

    def _try(self, cameras: int, replicas: int | None) -> CityResult:
        # Stretches of a simulated day would take in the warm-up.
        bin_s = min(self.plan.timing.bin_s, SEARCH_BIN_S)
        timing = replace(self.plan.timing, seconds=self.plan.warmup_s + self.seconds, bin_s=bin_s)
        plan = with_pool(replace(self.plan, timing=timing, events=()), cameras=cameras, replicas=replicas)
        found = simulate(plan, self.told.share)
        figures = found.figures
        reached = {name: getattr(figures, name) for name in SHOWN}
        trial = Trial(cameras, found.replicas, self.objective.met(figures), **reached)
        self.trials.append(trial)
        self.told.tried(trial)
        return found

    def _bisect(self, run: Callable[[int], CityResult], guess: int, *, fewer: bool) -> CityResult:
        """``fewer``: the least count that holds, else the most. What holds for a count holds for easier ones."""
        good: tuple[int, CityResult] | None = None
        bad: int | None = None
        limit = max(16, 4 * guess) if fewer else max(1, guess // 4)
        count, factor = guess, STEP
        while good is None or bad is None or abs(good[0] - bad) > max(1, round(0.003 * good[0])):
            found = run(count)
            if self.objective.met(found.figures):
                good = (count, found)
                if count == 1 and fewer:
                    break
            else:
                bad = count
                if count == limit and good is None:
                    raise SightlineError(
                        f"{found.replicas} replicas do not hold the objective for {found.cameras} cameras"
                        f"{_why(found, self.objective)}; allow more by --objective, or change the mix"
                    )
            if good is not None and bad is not None:
                count = (good[0] + bad) // 2
                continue
            away = (good is None) == fewer
            count = math.ceil(count * factor) if away else math.floor(count / factor)
            count = max(1, min(count, limit) if fewer else max(count, limit))
            factor *= STEP
        return good[1]


def _why(found: CityResult, objective: Objective) -> str:
    figures = found.figures
    return (
        f" ({figures.on_time:.2%} on time of {objective.on_time:.2%}, {figures.answered:.2%} answered of "
        f"{objective.answered:.2%}, quality {figures.quality:.3f} of {objective.quality:.3f}, "
        f"{figures.refused} refused)"
    )


def _scaling_efficiency(many: CityResult, search: Search) -> tuple[float, list[Trial]]:
    """Cameras of a pool over its size times what one replica serves, the mean over several searches; what they tried.
    ``many``: what :meth:`Search.most_cameras` of ``search`` found."""
    plan = search.plan
    one = replace(plan, pools=(replace(plan.pools[0], replicas=1),))
    single: list[int] = []
    tried: list[Trial] = []
    for seed in range(SINGLE_SEEDS):
        alone = Search(
            replace(one, seed=plan.seed + seed), search.objective, Audience(tried=search.told.tried), search.seconds
        )
        single.append(alone.most_cameras(many.cameras // many.replicas).cameras)
        tried += alone.trials
    return many.cameras / (many.replicas * (sum(single) / len(single))), tried


MODEL = "qwen2.5-vl-7b"
NO_LADDER = "none"


def parse_pools(texts: Sequence[str], model: str = MODEL) -> tuple[tuple[PoolPlan, ...], bool]:
    """``KIND=N`` each, or one ``KIND`` alone; whether the numbers are known.

    A kind is an accelerator with a shipped cost model of ``model`` (h100), the name of a shipped one, or a file. Raises
    ``ConfigError``: no such cost model, no number, or several kinds without one.
    """
    found: list[PoolPlan] = []
    listed = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    counted = ["=" in text for text in listed]
    if not listed or (not all(counted) and len(listed) > 1):
        raise ConfigError(
            "--gpus takes KIND=N for each kind, as in h100=64, or one KIND alone to find its least number"
        )
    for text in listed:
        kind, _, number = text.partition("=")
        if number and (not number.isdecimal() or int(number) < 1):
            raise ConfigError(f"--gpus {text!r}: the number of replicas must be at least 1, as in {kind}=64")
        if "=" in text and not number:
            raise ConfigError(f"--gpus {text!r} has no number after the equals sign, as in {kind}=64")
        if any(pool.kind == kind for pool in found):
            raise ConfigError(f"--gpus names {kind!r} twice; add the numbers up")
        found.append(PoolPlan(kind, int(number or 1), _costs(kind, model)))
    return tuple(found), all(counted)


def _costs(kind: str, model: str) -> costs.CostModel:
    shipped = f"{model}-{kind}"
    if shipped in costs.names():
        return costs.load(shipped)
    if kind in costs.names() or Path(kind).suffix == ".json":
        return costs.load(kind)
    kinds = [name.removeprefix(f"{model}-") for name in costs.names() if name.startswith(f"{model}-")]
    raise ConfigError(
        f"there is no cost model of {model} on {kind!r}; there are: {', '.join(kinds) or 'none'}; name one of "
        f"{', '.join(costs.names())}, or a file that sightline bench cost --out wrote"
    )


def parse_ladder(text: str) -> tuple[Ladder | None, str]:
    """``default``, ``none``, or a file or model folder; the ladder and what to call it. Raises ``ConfigError``: there
    is no ladder there."""
    if text == NO_LADDER:
        return None, NO_LADDER
    if text == "default":
        return default(), text
    return Ladder.load(Path(text)), text


def parse_objective(text: str) -> Objective:
    """``on_time=0.99,answered=0.99,quality=0.98``, any of them left out. Raises ``ConfigError``: another name, or no
    share."""
    known = [each.name for each in fields(Objective)]
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in known or not 0 <= share <= 1:
            raise ConfigError(
                f"--objective {part!r} is not NAME=SHARE with a share from 0 to 1; names are: {', '.join(known)}"
            )
        values[name] = share
    return Objective(**values)


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


def study(plan: CityPlan, objective: Objective, *, cameras: bool, replicas: bool, told: Audience = Audience()) -> Study:
    """Answer the question that the numbers leave open. ``cameras``, ``replicas``: whether the plan's number is given.
    Raises ``ConfigError``: neither is given, or the plan cannot be simulated; ``SightlineError``: the objective cannot
    be held."""
    if not cameras and not replicas:
        raise ConfigError("give the number of cameras, of accelerators (as in --gpus h100=64), or both")
    if plan.events and not cameras:
        raise ConfigError("events need a number of cameras: a search for the most of them simulates quiet pools")
    if cameras and replicas:
        told.begins(f"{plan.cameras:,} cameras")
        result = simulate(plan, told.share)
        return Study(result, objective, _seconds(result))
    search = Search(plan, objective, told)
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
        figures["scaling_efficiency"], found.single = _scaling_efficiency(result, search)
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
